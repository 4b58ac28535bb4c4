"""Chat templates: from messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ChatTemplate:
    """A model's Jinja chat template in a sandbox. Rendering is safe from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """``special_tokens``: names such as ``bos_token`` and their text, as templates use them.

        Raises:
            ModelLoadError: the template does not compile.
        """
        raise NotImplementedError

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as one string.

        Raises:
            InvalidRequestError: bad messages, or the template refused them (its own message).
        """
        raise NotImplementedError
