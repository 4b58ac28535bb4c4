"""`pocketllm completion SHELL`: a completion script, made from the parser itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from pocket_backend.cli.exit_codes import OK
from pocket_backend.cli.options import Commands

_HELP = """\
  bash   source <(pocketllm completion bash)           in ~/.bashrc
  zsh    source <(pocketllm completion zsh)            in ~/.zshrc, after compinit
  fish   pocketllm completion fish | source            in ~/.config/fish/config.fish
"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Print a script that completes commands and options, and files elsewhere.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    parser.set_defaults(run=lambda options: run(options, commands.choices))


def run(options: argparse.Namespace, parsers: dict[str, argparse.ArgumentParser]) -> int:
    print(_SCRIPTS[options.shell](list(described(parsers))), end="")
    return OK


@dataclass(frozen=True, slots=True)
class CommandWords:
    """What can be typed after a command's name."""

    name: str
    flags: tuple[str, ...]
    with_value: frozenset[str]
    """Flags that are followed by a value, which the shell completes as a file name."""
    words: tuple[str, ...]
    """Values of a positional argument, where they are fixed."""


def described(parsers: dict[str, argparse.ArgumentParser]) -> Iterator[CommandWords]:
    """From argparse's own tables."""
    for name, parser in parsers.items():
        flags: list[str] = []
        with_value: set[str] = set()
        words: list[str] = []
        for action in parser._actions:
            flags += action.option_strings
            if action.option_strings and action.nargs != 0:
                with_value.update(action.option_strings)
            if not action.option_strings and action.choices is not None:
                words += [str(choice) for choice in action.choices]
        yield CommandWords(name, tuple(flags), frozenset(with_value), tuple(words))


def _bash(commands: list[CommandWords]) -> str:
    names = " ".join(command.name for command in commands)
    cases = "".join(
        f"    {command.name})\n"
        f"      flags={shlex.quote(' '.join(command.flags))}\n"
        f"      valued={shlex.quote(' '.join(sorted(command.with_value)))}\n"
        f"      words={shlex.quote(' '.join(command.words))} ;;\n"
        for command in commands
    )
    return f"""\
_pocketllm() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local flags= valued= words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{names}" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}  esac
  case " $valued " in
    *" $before "*) return ;;
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
  esac
}}
complete -o default -F _pocketllm pocketllm
"""


def _zsh(commands: list[CommandWords]) -> str:
    """zsh runs bash's function through its own compatibility layer."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(commands)}"


def _fish(commands: list[CommandWords]) -> str:
    lines = [
        f"complete -c pocketllm -n __fish_use_subcommand -f -a {command.name}"
        for command in commands
    ]
    for command in commands:
        here = f"complete -c pocketllm -n '__fish_seen_subcommand_from {command.name}'"
        for flag in command.flags:
            kind = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
            value = " -r" if flag in command.with_value else ""
            lines.append(f"{here} {kind} {flag.lstrip('-')}{value}")
        if command.words:
            lines.append(f"{here} -f -a '{' '.join(command.words)}'")
    return "\n".join(lines) + "\n"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
