"""Text on both sides of the model: prompts to ids, ids to text.

| Module | Concept |
|---|---|
| `token_bytes` | table from id to bytes: what text is defined by |
| `incremental` | chunks of an output, cut at complete characters |
| `stop_strings` | exact matching of stop strings with minimal hold-back |
| `token_index`, `bad_words` | tokens by the bytes in them; which tokens would complete a bad word |
| `output` | both together, as the engine's output stage uses them |
| `tokenizer` | the `Tokenizer` contract and `load_tokenizer` |
| `backend_tokenizer` | its implementation over the `tokenizers` library |
| `gguf_metadata` | bounds-checked reader of GGUF key/values |
| `gguf_files` | which files make a GGUF model, and whether they belong together |
| `gguf_tokenizer` | a tokenizer from a GGUF file |
| `pre_tokenizers` | how byte-level vocabularies split text, by name |
| `hf_tokenizer` | a tokenizer from a Hugging Face directory |
| `chat`, `chat_messages` | chat templates; checks on conversations |
| `control_tokens` | keeps messages from forging control tokens |

May import `api` and `observability`; knows nothing of scheduling, tensors or Triton. Needs the
packages `tokenizers` and `jinja2`, nothing native of ours. See docs/text.md.
"""

from pocket_backend.text.chat import ChatTemplate
from pocket_backend.text.incremental import (
    IncrementalDetokenizer,
    TextChunk,
    chunk_text,
    chunk_texts,
)
from pocket_backend.text.output import OutputText
from pocket_backend.text.token_bytes import TokenBytes
from pocket_backend.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "OutputText",
    "TextChunk",
    "TokenBytes",
    "Tokenizer",
    "chunk_text",
    "chunk_texts",
    "load_tokenizer",
]
