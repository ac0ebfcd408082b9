"""`pipeloom completion`: completion for the shell, made from the parsers themselves."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pipeloom as pl

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom completion bash > ~/.local/share/bash-completion/completions/pipeloom
  pipeloom completion zsh > ~/.zfunc/_pipeloom
  pipeloom completion fish > ~/.config/fish/completions/pipeloom.fish
"""

SHELLS = ("bash", "zsh", "fish")

# Of these commands the first word is the name of a schedule.
_NAMED = ("plan", "show", "check", "simulate", "schedules", "compare", "bench")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.add_argument("--json", action="store_true", help="print the words as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    words = _words()
    if arguments.json:
        print(json.dumps(words, indent=2))
        return 0
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](words), end="")
    return 0


def _words() -> dict[str, dict[str, str]]:
    """Each command's options and, where it takes them, schedules, with their help."""
    from pipeloom.cli import COMMANDS, parser_of

    names = {row.name: row.summary for row in pl.schedules()}
    found: dict[str, dict[str, str]] = {}
    for command in COMMANDS:
        try:
            parser = parser_of(command)
        except pl.PlanError:  # an extra is not installed
            found[command] = {}
            continue
        found[command] = dict(_options(parser._actions)) | (names if command in _NAMED else {})
    return found


def _options(actions: Iterable[argparse.Action]) -> Iterable[tuple[str, str]]:
    for action in actions:
        for option in action.option_strings:
            if option.startswith("--"):
                yield option, re.sub(r"\s+", " ", action.help or "").replace("%%", "%")
        if not action.option_strings:
            for choice in action.choices or ():
                yield str(choice), action.dest


def _bash(words: dict[str, dict[str, str]]) -> str:
    cases = "".join(f"    {name}) words='{' '.join(own)}' ;;\n" for name, own in words.items())
    return f"""\
_pipeloom() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}}
  case ${{COMP_WORDS[1]}} in
{cases}    *) words='{" ".join(words)}' ;;
  esac
  [ "$COMP_CWORD" = 1 ] && words='{" ".join(words)}'
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _pipeloom pipeloom
"""


def _zsh(words: dict[str, dict[str, str]]) -> str:
    from pipeloom.cli import COMMANDS

    def quoted(text: str) -> str:
        return text.replace("'", "'\\''")

    def described(own: dict[str, str]) -> str:
        return " ".join(f"'{word}:{quoted(text)}'" for word, text in own.items())

    cases = "".join(f"    {name}) options=({described(own)}) ;;\n" for name, own in words.items())
    return f"""\
#compdef pipeloom
local -a commands options
commands=({described(COMMANDS)})
if (( CURRENT == 2 )); then
  _describe command commands
else
  case $words[2] in
{cases}  esac
  _describe option options
  _files
fi
"""


def _fish(words: dict[str, dict[str, str]]) -> str:
    from pipeloom.cli import COMMANDS

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = [
        f"complete -c pipeloom -n __fish_use_subcommand -a {name} -d {quoted(text)}"
        for name, text in COMMANDS.items()
    ]
    for command, own in words.items():
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        for word, text in own.items():
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c pipeloom {seen} {what} -d {quoted(text)}")
    return "\n".join(lines) + "\n"
