"""The legend of a PNG picture: its entries, and how matplotlib draws them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from pipeloom._core import Drawing
    from pipeloom.plot import Ranks

__all__ = ["Entry", "draw", "entries"]

_RULE, _TEXT = "#969696", "#222222"


class Entry(NamedTuple):
    """A text, and what stands before it."""

    text: str
    fills: tuple[str, ...] = ()
    """Colours of boxes from left to right; "none" is an outline."""
    line: str = ""
    """Style of a line, as matplotlib writes it."""


def entries(
    drawing: Drawing,
    part: tuple[float | None, float | None, Ranks | None],
    *,
    memory: bool,
    critical_path: bool,
    limits: Sequence[tuple[float, str, str, bool]],
    room: int,
) -> list[Entry]:
    """Say what the colours and lines of a picture mean.

    Args:
        drawing: What is drawn.
        part: The part of it that is seen.
        memory: Whether memory is drawn.
        critical_path: Whether the critical path is outlined.
        limits: Those of the drawing's limits that are seen.
        room: Most characters of a line of text.

    Returns:
        The entries, longer texts broken into lines.
    """
    waits = drawing.waits((None, None, None))
    awaited = ((reason, *op) for *_, reason, op in waits if op is not None)
    idle = next((f"idle; {op} r{rank}: {reason}" for reason, op, rank in awaited), "idle")
    found = [Entry(text, tuple(fills)) for text, fills in drawing.legend(part)]
    found.append(Entry(idle, (drawing.paper["idle"],)))
    if moving := dict.fromkeys(fill for _, fill, *_ in drawing.transfers(part)):
        found.append(Entry("transfers of activations, gradients", tuple(moving)))
    if memory:
        found.append(Entry(drawing.memory_meaning, (drawing.paper["memory"],)))
    if drawing.recomputed:
        found.append(Entry(drawing.recomputed, line=":"))
    if critical_path:
        found.append(Entry("critical path", ("none",)))
    for _, _, meaning, of_work in limits:
        found.append(Entry(meaning, line="--" if of_work else "-"))
    return [entry._replace(text=textwrap.fill(entry.text, room)) for entry in found]


def draw(axes: Axes, shown: Sequence[Entry], *, columns: int, below: float) -> None:
    """Draw a legend below the axis.

    Args:
        axes: Where.
        shown: Its entries.
        columns: In how many columns.
        below: How far below the axes, as a share of their height.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def marks(entry: Entry) -> tuple[Patch | Line2D, ...]:
        if entry.line:
            return (Line2D([], [], color=_TEXT, lw=1, ls=entry.line),)
        edges = [("black" if fill == "none" else _RULE) for fill in entry.fills]
        boxes = zip(entry.fills, edges, strict=True)
        found = [Patch(facecolor=fill, edgecolor=edge) for fill, edge in boxes]
        return tuple(found) or (Patch(facecolor="none", edgecolor="none"),)

    axes.legend(
        [marks(entry) for entry in shown],
        [entry.text for entry in shown],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left",
        bbox_to_anchor=(0, -below),
        borderaxespad=0,
        ncols=columns,
        fontsize=7,
        frameon=False,
    )
