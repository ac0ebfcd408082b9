"""The command line: `pipeloom COMMAND ...`, also `python -m pipeloom`.

Each command is a module with `HELP`, `EXAMPLES`, `add_arguments(parser)` and `run(arguments)`,
which returns the exit status: 0 done, 1 the plan is wrong (`check`, `fuzz`), 2 bad input. Ctrl-C
gives 130, a closed pipe 141, as shells do. Modules load when their command runs, so that help
takes no time.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from pipeloom._core import CheckError, PlanError, __version__
from pipeloom.cli.interrupt import prompt_interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "main", "parser_of"]

COMMANDS = {
    "plan": "print every rank's order; save, lower or export it",
    "show": "draw a plan: terminal, SVG, PNG, HTML or Chrome trace",
    "check": "prove that a plan is right and can't deadlock, or say where it is wrong",
    "simulate": "predict a plan's time, bubble and memory under given costs",
    "schedules": "list the schedules and what they ask for",
    "compare": "put schedules side by side under the same costs",
    "train": "train a pipeline-parallel GPT on real text",
    "generate": "sample text from a trained GPT",
    "fuzz": "hunt wrong plans over random configurations",
    "completion": "print completion for bash, zsh or fish",
    "bench": "time generation, lowering, check and simulation of one shape",
}
"""Each command and what it does, in the order of the help."""

EXIT_WRONG_PLAN = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

_EPILOG = """\
examples:
  pipeloom show 1f1b --pp 4 -m 8
  pipeloom compare 1f1b zb_h1 interleaved_1f1b --pp 4 --vp 2 -m 16
  pipeloom plan interleaved_1f1b --pp 4 --vp 2 -m 8 --lower batched --save step.plan
  pipeloom check --plan step.plan --semantics all

`pipeloom COMMAND --help` has the options and examples of a command.
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like the planner's."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with status 2."""
        sys.stdout.flush()
        print(f"pipeloom: error: {message}\nhint: see {self.prog} --help", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser; only the command that `argv` names gets its options."""
    parser = _Parser(
        prog="pipeloom",
        description="Plan pipeline-parallel training in Rust, run it in PyTorch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pipeloom {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            module = importlib.import_module(f"pipeloom.cli.{name}")
            module.add_arguments(command)
            command.epilog = f"examples:\n{module.EXAMPLES}"
            command.set_defaults(run=module.run)
    return parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """Make the parser of one command.

    Raises:
        ConfigError: The command needs an extra that is not installed.
    """
    parser = argparse.ArgumentParser(prog=f"pipeloom {command}")
    importlib.import_module(f"pipeloom.cli.{command}").add_arguments(parser)
    return parser


def _fail(error: Exception, status: int) -> int:
    sys.stdout.flush()
    print(f"pipeloom: error: {error}", file=sys.stderr)
    return status


class _Closed(io.TextIOBase):
    """Stands for a stdout that was closed before we started: Python has none then."""

    @property
    def buffer(self) -> _Closed:
        """What takes bytes."""
        return self

    def write(self, _text: object) -> NoReturn:
        """Fail as a write to the closed stream would."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = _parser(argv).parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except CheckError as error:
        return _fail(error, EXIT_WRONG_PLAN if "check" in argv[:1] else EXIT_BAD_INPUT)
    except PlanError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(OSError(_told(error)), EXIT_BAD_INPUT)
    return status


def _told(error: OSError) -> str:
    """Say which file, or our output, failed and why."""
    if error.errno is None:  # the core's own, in full
        return str(error.args[0] if error.args else error)
    if error.filename is None:
        hint = "hint: check where it goes: the disk may be full, or the stream closed"
        return f"can't write the output: {error.strerror}\n{hint}"
    hint = "hint: check that the path exists and may be read or written"
    return f"can't open {str(error.filename)!r}: {error.strerror}\n{hint}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The words after the program's name. None: those of this process.

    Returns:
        The exit status.

    Raises:
        SystemExit: After `--help`, `--version` or words that don't parse.

    Examples:
        >>> main(["plan", "1f1b", "--pp", "2", "-m", "2"])
        rank 0  0F0 0F1 0B0 0B1
        rank 1  1F0 1B0 1F1 1B1
        0
    """
    argv = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:
        sys.stdout = _Closed()
    try:
        with prompt_interrupts(EXIT_INTERRUPTED):
            return _run(argv)
    except KeyboardInterrupt:
        print("pipeloom: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter's last flush from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
