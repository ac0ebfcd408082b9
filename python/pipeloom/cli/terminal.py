"""Grids in the terminal: as wide as it is, in the colours that it has."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

from pipeloom import plot

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from pipeloom._core import Drawing, Timeline

__all__ = ["print_grids"]


def _wants_color(choice: str, output: TextIO) -> bool:
    if choice != "auto":
        return choice == "always"
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_grids(
    drawn: Iterable[Timeline | Drawing], arguments: argparse.Namespace, **settings: Any
) -> None:
    """Print grids as `--width` and `--color` say.

    Args:
        drawn: What to draw, one below the other.
        arguments: The options `width` and `color`.
        settings: For `plot.grid`.

    Raises:
        ConfigError: The window shows nothing, or the width is too small.
    """
    terminal = sys.stdout.isatty()
    width = arguments.width
    if width is None and terminal:
        width = shutil.get_terminal_size().columns
    color = _wants_color(arguments.color, sys.stdout)
    translate = color and terminal and arguments.color == "auto"
    for what in drawn:
        if translate and _print_translated(plot.grid(what, width=width, color=True, **settings)):
            continue
        plain = translate or not color
        sys.stdout.write(plot.grid(what, width=width, color=not plain, **settings))


def _print_translated(text: str) -> bool:
    """Let rich turn our colours into those that the terminal has; False without rich."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(Text.from_ansi(text))
    return True
