"""Grids in the terminal: as wide as it is, in the colours that it has."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

from pipeloom import plot
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from pipeloom._core import Drawing, Timeline

__all__ = ["print_grids", "print_waits"]


def _wants_color(choice: str, output: TextIO) -> bool:
    if choice != "auto":
        return choice == "always"
    return output.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _encodes(text: str, output: TextIO) -> bool:
    try:
        text.encode(output.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


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
    # Colour brings bars, which not every encoding has.
    color = color and _encodes("█", sys.stdout)
    translate = color and terminal and arguments.color == "auto"
    for what in drawn:
        if translate and _print_translated(plot.grid(what, width=width, color=True, **settings)):
            continue
        plain = translate or not color
        sys.stdout.write(plot.grid(what, width=width, color=not plain, **settings))


def print_waits(
    drawing: Drawing,
    *,
    window: tuple[float | None, float | None] = (None, None),
    ranks: tuple[int, int] | None = None,
) -> None:
    """Print how long each rank idles and its longest wait, and what the makespan can't go below.

    Args:
        drawing: What a grid shows.
        window: The part of the time in which waits count; idle shares are of the whole.
        ranks: The part of the ranks.
    """
    peaks, idle = drawing.memory_peaks, drawing.idle_percent
    digits = options.digits_for(drawing.extent[1])
    rows: list[tuple[str, ...]] = [("RANK", "IDLE", "PEAK MEMORY", "LONGEST WAIT")]
    waits = drawing.longest_waits((*window, ranks))
    # The sort is stable: of ranks that idle as long the first are listed.
    listed = sorted(waits, key=lambda wait: -idle[wait[0]])[:_LISTED_RANKS]
    for rank, wait in sorted(listed, key=lambda wait: wait[0]):
        story = "-"
        if wait is not None:
            _, start, end, reason, _ = wait
            times = [options.number(time, digits) for time in (end - start, start, end)]
            story = f"{times[0]} ({times[1]} to {times[2]}): {reason}"
        rows.append((str(rank), f"{idle[rank]}%", peaks[rank] if peaks else "-", story))
    if not peaks:
        rows = [(rank, share, story) for rank, share, _, story in rows]
    print()
    print(options.table(rows, right=range(len(rows[0]) - 1)))
    if len(waits) > _LISTED_RANKS:
        print(f"(of {len(waits)} ranks the {_LISTED_RANKS} that idle most)")
    for _, text, meaning, _ in drawing.limits:
        print(f"{text} is the {meaning}")


_LISTED_RANKS = 16


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
