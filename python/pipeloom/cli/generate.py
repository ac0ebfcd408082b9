"""`pipeloom generate`: sample text from a trained GPT."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom generate --checkpoint runs/latest --prompt "def main("
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from pipeloom.training.generate import add_generate_arguments

    add_generate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Sample and print."""
    from pipeloom.training.generate import run_generate

    return run_generate(arguments)
