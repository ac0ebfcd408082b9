"""Pictures of plans and of training: text, SVG, HTML, PNG, Chrome trace, loss curve.

What is drawn is a `Timeline`, as `plan.simulate` predicts it, or a `Drawing` of measured times, as
`measured` makes it. A `window` is (from, to) in the timeline's unit of time, None for an open end;
`ranks` is (first, past).

Examples:
    >>> import pipeloom as pl
    >>> from pipeloom import plot
    >>> timeline = pl.plan("1f1b", pp=2, num_microbatches=2).simulate(pl.Costs())
    >>> print(plot.grid(timeline), end="")
    1f1b  pp=2 vp=1 m=2   makespan 9   bubble 33.3%   peak memory 2 1
      time |0              5
    rank 0 |F0 F1 .  .  B0--- .  B1---
    rank 1 |.  F0 B0--- F1 B1--- .  .
    F forward   B backward   . idle   - goes on
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeloom import page
from pipeloom._core import ConfigError, Drawing
from pipeloom.figures import loss_curve, png

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from numpy.typing import ArrayLike

    from pipeloom._core import Plan, Timeline

    Window: TypeAlias = tuple[float | None, float | None]
    Ranks: TypeAlias = tuple[int, int]

__all__ = ["grid", "html", "loss_curve", "measured", "png", "stacked", "svg", "trace"]

NANOSECONDS_PER_S = 1_000_000_000
NANOSECONDS_PER_MS = 1_000_000


def measured(plan: Plan, start: Sequence[ArrayLike], end: Sequence[ArrayLike]) -> Drawing:
    """Make a drawing of measured times.

    Args:
        plan: The plan that ran.
        start: For each rank, when each op started, in seconds.
        end: For each rank, when each op ended, in seconds.

    Returns:
        The drawing; its unit of time is the second.

    Raises:
        ConfigError: The times don't cover the plan's ops, or an op ends before it starts.

    Examples:
        >>> import pipeloom as pl
        >>> p = pl.plan("1f1b", pp=1, num_microbatches=1)
        >>> print(grid(measured(p, [[0.0, 0.002]], [[0.002, 0.005]])), end="")
        1f1b  pp=1 vp=1 m=1   makespan 0.005   bubble 0%
          time |0
        rank 0 |F0- B0---
        F forward   B backward   . idle   - goes on
    """
    import numpy as np

    def ticks(columns: Sequence[ArrayLike]) -> list[Any]:
        scaled = (np.asarray(column, dtype=np.float64) * NANOSECONDS_PER_S for column in columns)
        return [np.rint(column).astype(np.int64) for column in scaled]

    return Drawing(plan, ticks(start), ticks(end), ticks_per_unit=NANOSECONDS_PER_S)


def _part(window: Window, ranks: Ranks | None) -> tuple[float | None, float | None, Ranks | None]:
    """What the core takes as a part.

    Raises:
        ConfigError: A rank is negative.
    """
    if ranks is not None and min(ranks) < 0:
        raise ConfigError(
            f"the window of ranks {ranks[0]}:{ranks[1]} is out of range\nhint: count ranks from 0"
        )
    return (*window, ranks)


def _drawing(what: Timeline | Drawing, *, critical_path: bool = False) -> Drawing:
    if isinstance(what, Drawing):
        return what
    return Drawing.predicted(what, critical_path=critical_path)


def grid(
    what: Timeline | Drawing,
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    width: int | None = None,
    color: bool = False,
    memory: bool = False,
    critical_path: bool = False,
) -> str:
    """Draw a grid of text: a row a rank, time to the right.

    Args:
        what: The timeline or drawing.
        window: Part of the time.
        ranks: Part of the ranks.
        width: Most characters of a row. None: as many as show each op.
        color: Add ANSI colours, of 24 bits.
        memory: Draw each rank's memory below its row: digits, or bars where there is colour.
        critical_path: Mark the ops of the critical path.

    Returns:
        The text; its lines end in a line feed.

    Raises:
        ConfigError: The window shows nothing, the width is too small, or the drawing does not
            know what is asked for.
    """
    drawing = _drawing(what, critical_path=critical_path)
    look = {"memory": memory, "critical_path": critical_path}
    return drawing.grid(_part(window, ranks), width=width, color=color, **look)


def svg(
    what: Timeline | Drawing,
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    width: int | None = None,
    memory: bool = False,
    critical_path: bool = False,
) -> str:
    """Draw an SVG picture: boxes on white paper, a time axis, a legend.

    Args:
        what: The timeline or drawing.
        window: Part of the time.
        ranks: Part of the ranks.
        width: Width in pixels. None: as labels need, up to 1,700.
        memory: Draw each rank's memory below its row, all to one scale.
        critical_path: Outline the ops of the critical path.

    Returns:
        The text of the picture, the same for the same input.

    Raises:
        ConfigError: The window shows nothing or more than 200,000 ops, or the drawing does not
            know what is asked for.

    Examples:
        >>> import pipeloom as pl
        >>> text = svg(pl.plan("1f1b", pp=2, num_microbatches=2).simulate(pl.Costs()))
        >>> text.count("<title>1F0: forward of microbatch 0 on stage 1, 1 to 2</title>")
        1
    """
    drawing = _drawing(what, critical_path=critical_path)
    return drawing.svg(
        _part(window, ranks), width=width, memory=memory, critical_path=critical_path
    )


def stacked(
    drawn: Sequence[Timeline | Drawing],
    *,
    width: int | None = None,
    memory: bool = False,
    critical_path: bool = False,
) -> str:
    """Draw several plans above each other as one SVG, to one scale of time.

    Args:
        drawn: The timelines or drawings, in one unit of time.
        width: Width in pixels. None: about 1,100.
        memory: Draw memory where it is known.
        critical_path: Outline the critical path where it is known.

    Returns:
        The text of the picture.

    Raises:
        ConfigError: There is none, or one has more than 200,000 ops.

    Examples:
        >>> import pipeloom as pl
        >>> times = [
        ...     pl.plan(name, pp=2, num_microbatches=4).simulate(pl.Costs())
        ...     for name in ("gpipe", "1f1b")
        ... ]
        >>> stacked(times).count("<g ")
        2
    """
    drawings = [_drawing(what, critical_path=critical_path) for what in drawn]
    return Drawing.stack(drawings, width=width, memory=memory, critical_path=critical_path)


def html(
    what: Timeline | Drawing | Mapping[str, Timeline | Drawing],
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    memory: bool = False,
    critical_path: bool = False,
    paired: bool = False,
) -> str:
    """Make one self-contained interactive page: zoom, pan, hover, follow a microbatch.

    Args:
        what: The timeline or drawing, or several by name: they share one axis of time.
        window: Part of the time that it shows first.
        ranks: Part of the ranks: the rows that it draws. The others are there to be waited for.
        memory: Whether it shows memory at first.
        critical_path: Whether it outlines the critical path at first.
        paired: Whether an op also tells how the same op of the other plans differs.

    Returns:
        The page's text; it loads nothing.

    Raises:
        ConfigError: A plan has more than a million ops, or none has anything in the window.

    Examples:
        >>> import pipeloom as pl
        >>> html(pl.plan("1f1b", pp=2, num_microbatches=2).simulate(pl.Costs()))[:15]
        '<!DOCTYPE html>'
    """
    named = what if isinstance(what, Mapping) else {"": what}
    plans = []
    for name, one in named.items():
        drawing = _drawing(one, critical_path=True)
        facts = {
            "work of the busiest rank" if of_work else "lower bound": text
            for _, text, _, of_work in drawing.limits
        }
        if not isinstance(one, Drawing):
            facts["gap to the lower bound"] = f"{one.gap:.1%}"
        plans.append((name or drawing.headline.partition("   ")[0], drawing, facts))
    # The widest plan refuses a window that shows nothing.
    longest = max((drawing for _, drawing, _ in plans), key=lambda it: it.extent[1], default=None)
    if longest is None:
        raise ConfigError("there is no plan to draw\nhint: name at least one")
    longest.waits(_part(window, None))
    for _, drawing, _ in plans:
        drawing.waits(_part((None, None), ranks))
    return page.assemble(
        plans, view=window, ranks=ranks, memory=memory, critical_path=critical_path, paired=paired
    )


def trace(
    what: Timeline | Drawing,
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    microseconds_per_unit: int = 1000,
) -> str:
    """Write a Chrome trace: a process a rank, arrows from send to receive.

    Args:
        what: The timeline or drawing.
        window: Part of the time.
        ranks: Part of the ranks.
        microseconds_per_unit: What one unit of the timeline's time is: 1000 for milliseconds,
            1,000,000 for the seconds of `measured`.

    Returns:
        JSON for https://ui.perfetto.dev or chrome://tracing.

    Raises:
        ConfigError: The window shows nothing or more than a million ops.
    """
    return _drawing(what).trace(_part(window, ranks), microseconds_per_unit=microseconds_per_unit)
