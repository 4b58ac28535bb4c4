"""The `pocketllm` command: argument parsing, and what is printed for people and programs.

| Module | Concept |
|---|---|
| `main` | the sub-commands; errors become one sentence and a status |
| `exit_codes` | the statuses |
| `options` | options that several commands share |
| `session` | where answers come from: an engine in this process, or a server |
| `console` | text, waiting lines and JSON |
| `run` | one answer to one prompt |
| `chat`, `conversation`, `line_editor` | a conversation in the terminal; its turns; reading lines |
| `inspect` | what a model is and needs, from its headers |
| `models` | the models of directories or of a server |
| `bench` | tokens per second and latencies, in process or of a server |
| `completion` | scripts for shells, from the parser |
| `serving` | starting a server from options, serving until a signal |
| `demo` | what `make run` shows: one streamed answer, then examples |
| `examples` | ready-to-paste commands for a running server |
| `probe` | whether a running server can serve: for containers |
| `doctor` | whether this machine can serve, and what to install |

May import everything; nothing imports it.
"""
