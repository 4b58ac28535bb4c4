"""The `pocketllm` command: argument parsing, and what is printed for people.

| Module | Concept |
|---|---|
| `main` | sub-commands and their options, exit codes |
| `serving` | starting a server from options, serving until a signal |
| `demo` | what `make run` shows: one streamed answer, then examples |
| `chat_client` | one streamed answer through tritonclient, with timings |
| `examples` | ready-to-paste commands for a running server |
| `doctor` | whether this machine can serve, and what to install |

May import everything; nothing imports it.
"""
