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

from html import escape
from typing import TYPE_CHECKING, Any

from pipeloom._core import ConfigError, Drawing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from typing import TypeAlias

    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

    from pipeloom._core import Plan, Timeline

    Window: TypeAlias = tuple[float | None, float | None]
    Ranks: TypeAlias = tuple[int, int]

__all__ = ["grid", "html", "loss_curve", "measured", "png", "svg", "trace"]

NANOSECONDS_PER_S = 1_000_000_000


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
) -> str:
    """Draw a grid of text: a row a rank, time to the right.

    Args:
        what: The timeline or drawing.
        window: Part of the time.
        ranks: Part of the ranks.
        width: Most characters of a row. None: as many as show each op.
        color: Add ANSI colours, of 24 bits.

    Returns:
        The text; its lines end in a line feed.

    Raises:
        ConfigError: The window shows nothing, or the width is too small.
    """
    return _drawing(what).grid((*window, ranks), width=width, color=color)


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
    return drawing.svg((*window, ranks), width=width, memory=memory, critical_path=critical_path)


def html(
    what: Timeline | Drawing,
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    width: int | None = None,
    memory: bool = False,
    critical_path: bool = False,
) -> str:
    """Draw a page that holds the SVG picture; its boxes tell about themselves under the mouse.

    Args:
        what: The timeline or drawing.
        window: As for `svg`.
        ranks: As for `svg`.
        width: As for `svg`.
        memory: As for `svg`.
        critical_path: As for `svg`.

    Returns:
        The page's text.

    Raises:
        ConfigError: As `svg`.

    Examples:
        >>> import pipeloom as pl
        >>> html(pl.plan("1f1b", pp=2, num_microbatches=2).simulate(pl.Costs()))[:15]
        '<!DOCTYPE html>'
    """
    drawing = _drawing(what, critical_path=critical_path)
    picture = svg(
        drawing,
        window=window,
        ranks=ranks,
        width=width,
        memory=memory,
        critical_path=critical_path,
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(drawing.headline)}</title>\n"
        "<style>body{margin:0;overflow-x:auto;background:#fff}rect:hover{opacity:.75}</style>\n"
        f"</head>\n<body>\n{picture}</body>\n</html>\n"
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
    return _drawing(what).trace((*window, ranks), microseconds_per_unit=microseconds_per_unit)


def _figure(width_px: float, height_px: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed\nhint: pip install 'pipeloom[plot]'"
        ) from None
    # A figure of its own touches neither pyplot's state nor a display.
    return Figure(figsize=(width_px / 100, height_px / 100), dpi=100, layout="constrained")


def png(
    what: Timeline | Drawing,
    path: str | PathLike[str],
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    width: int | None = None,
) -> None:
    """Draw a PNG picture with matplotlib (extra `plot`).

    Args:
        what: The timeline or drawing.
        path: File to write.
        window: Part of the time.
        ranks: Part of the ranks.
        width: Width in pixels. None: 1,200.

    Raises:
        ConfigError: matplotlib is not installed, or the window shows nothing or too much.
    """
    drawing = _drawing(what)
    boxes = drawing.boxes((*window, ranks))
    drawn: dict[tuple[int, int], list[Any]] = {}
    for box in boxes:
        drawn.setdefault((box[0], box[6]), []).append(box)
    rows = sorted({rank for rank, _ in drawn}) or [0]
    figure = _figure(width or 1200, 120 + 34 * len(rows))
    axes = figure.subplots()
    begin, end = _clipped(window, drawing.extent)
    pixel = (end - begin) / ((width or 1200) - 80)
    for (rank, half), some in drawn.items():
        below, height = ((-0.4, 0.8), (0.0, 0.4), (-0.4, 0.4))[half]
        axes.broken_barh(
            [(left, right - left) for *_, left, right, _ in some],
            (below - rank, height),
            facecolors=[fill for _, _, fill, *_ in some],
            edgecolor="white",
            linewidth=[0.5 if right - left > 4 * pixel else 0 for *_, left, right, _ in some],
        )
        for _, label, _, ink, left, right, _ in some:
            if right - left > 8 * len(label) * pixel:
                middle = ((left + right) / 2, below - rank + height / 2)
                axes.text(*middle, label, color=ink, ha="center", va="center", fontsize=8)
    axes.set(xlim=(begin, end), ylim=(-rows[-1] - 0.6, -rows[0] + 0.6), xlabel="time")
    axes.set_title(drawing.headline, loc="left", fontsize=10)
    axes.set_yticks([-rank for rank in rows], [f"rank {rank}" for rank in rows])
    axes.set_facecolor("#f0f0f0")
    from matplotlib.patches import Patch

    patches = [Patch(color=fill, label=name) for name, fill in drawing.legend]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, format="png", metadata={"Software": None})


def _clipped(window: Window, extent: tuple[float, float]) -> tuple[float, float]:
    (begin, end), (first, last) = window, extent
    return (
        first if begin is None else max(begin, first),
        last if end is None else min(end, last),
    )


def loss_curve(
    losses: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    path: str | PathLike[str],
    *,
    title: str = "loss",
    unit: str = "nats a token",
) -> None:
    """Draw loss curves with matplotlib (extra `plot`); the file's suffix chooses PNG or SVG.

    Args:
        losses: For each curve's name, its steps and its losses.
        path: File to write, `.png` or `.svg`.
        title: Title of the picture.
        unit: Unit of the losses.

    Raises:
        ConfigError: matplotlib is not installed, or a curve has not one loss for each step.
    """
    for name, (steps, values) in losses.items():
        if len(steps) != len(values):
            raise ConfigError(
                f"losses has {len(steps)} steps but {len(values)} losses for {name!r}"
                "\nhint: give one loss for each step"
            )
    figure = _figure(800, 450)
    axes = figure.subplots()
    # Okabe and Ito's colours with line styles, so that colour is never the only difference.
    styles = [("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", ":"), ("#cc79a7", "-.")]
    for at, (name, (steps, values)) in enumerate(losses.items()):
        color, style = styles[at % len(styles)]
        marker = "o" if len(steps) < 20 else None
        axes.plot(steps, values, color=color, linestyle=style, marker=marker, ms=3, label=name)
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.grid(visible=True, color="#dddddd", linewidth=0.5)
    if losses:
        axes.legend(frameon=False)
    figure.savefig(path)
