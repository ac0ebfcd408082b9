"""`pipeloom train`: train a pipeline-parallel GPT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.cli.interrupt import keep_on_interrupt

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom train
  pipeloom train --help
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from pipeloom.training.options import add_train_arguments

    add_train_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train; a Ctrl-C keeps the checkpoint."""
    from pipeloom.training.command import run_train

    keep_on_interrupt()
    return run_train(arguments)
