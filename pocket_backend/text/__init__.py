"""Text on both sides of the model: prompts to ids, ids to text.

| Module | Concept |
|---|---|
| `gguf_metadata` | bounds-checked reader of a GGUF file's key/values |
| `tokenizer` | the `Tokenizer` contract and `load_tokenizer` |
| `token_bytes` | table from id to bytes: what text is defined by |
| `incremental` | chunks of an output, cut at complete characters |
| `stop_strings` | exact matching of stop strings with minimal hold-back |
| `output` | both together, as the engine's output stage uses them |
| `chat` | chat templates |

May import `api` and `observability`; knows nothing of scheduling, tensors or Triton.
"""

from pocket_backend.text.chat import ChatTemplate
from pocket_backend.text.incremental import IncrementalDetokenizer, TextChunk, chunk_text
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
    "load_tokenizer",
]
