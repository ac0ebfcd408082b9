"""`pipeloom fuzz`: hunt wrong plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pipeloom as pl

if TYPE_CHECKING:
    import argparse
    from types import ModuleType

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom fuzz --cases 1000 --seed 7
  pipeloom fuzz --help

exit status: 0 every case holds, 1 one does not, 2 bad input
"""


def _fuzz() -> ModuleType:
    try:
        from pipeloom.testing import fuzz
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise pl.ConfigError(
            "fuzz needs hypothesis, which is not installed\nhint: pip install 'pipeloom[testing]'"
        ) from None
    return fuzz


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    _fuzz().add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Try cases until one fails or all are done."""
    status: int = _fuzz().run(arguments)
    return status
