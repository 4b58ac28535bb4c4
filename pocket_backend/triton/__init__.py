"""Serving through Triton Inference Server: the models' runtimes, and starting the server.

| Module | Concept |
|---|---|
| `fields` | every user-level input, in one table |
| `request` | from tensors, parameters and JSON to one validated request |
| `codec` | tensors to Python values and back |
| `tokenizer`, `generator`, `detokenizer` | what stands behind `model_repository/*/1/model.py` |
| `response_stream` | one request's responses: the engine's sink, the sender's owner |
| `chunks`, `logprobs` | increments of an answer as output tensors; log probabilities as JSON |
| `feedback`, `backlog` | what the detokenizer tells the generator: abandoned streams, progress |
| `control`, `responses`, `metrics` | messages to the generator, errors, Triton's custom metrics |
| `settings`, `startup` | config parameters and environment; a failed load as one sentence |
| `repository` | writes `config.pbtxt` and the documented table |
| `launcher`, `guardian` | one server process: start, wait for an inference, stop |
| `supervisor`, `liveness` | noticing dead and wedged processes, restarting, draining |
| `lifeline`, `probes` | questions to a running server: past Triton, and through it |
| `installation`, `ports`, `shm`, `server_log` | what the launcher needs to know of the machine |

`pb_utils`, the stub's module, is always passed in. Only the engine thread sends responses, asks for
cancellation or writes metrics; see docs/architecture.md (Triton facts) and docs/triton.md.
"""
