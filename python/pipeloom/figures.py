"""Pictures that matplotlib (extra `plot`) draws: PNG, and the loss curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeloom._core import ConfigError, Drawing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipeloom._core import Timeline
    from pipeloom.plot import Ranks, Window

__all__ = ["loss_curve", "png"]


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
    memory: bool = False,
    critical_path: bool = False,
) -> None:
    """Draw a PNG picture with matplotlib (extra `plot`).

    Args:
        what: The timeline or drawing.
        path: File to write.
        window: Part of the time.
        ranks: Part of the ranks.
        width: Width in pixels. None: 1,200.
        memory: Draw each rank's memory below its row, all to one scale.
        critical_path: Outline the ops of the critical path.

    Raises:
        ConfigError: matplotlib is not installed, the window shows nothing or too much, or the
            drawing does not know what is asked for.
    """
    drawing = what
    if not isinstance(what, Drawing):
        drawing = Drawing.predicted(what, critical_path=critical_path)
    assert isinstance(drawing, Drawing)
    begin, end = _clipped(window, drawing.extent)
    first, past = ranks or (0, drawing.pp)
    rows = range(first, past)
    figure = _figure(width or 1200, 120 + (52 if memory else 34) * len(rows))
    axes = figure.subplots()
    # A rank's row is one unit high: boxes take its middle, or its upper part above the memory.
    low, high = (0.0, 0.44) if memory else (-0.4, 0.4)
    pixel = (end - begin) / ((width or 1200) - 80)
    boxes = drawing.boxes((*window, ranks), critical_path=critical_path)
    _draw_boxes(axes, boxes, (low, high), pixel)
    if memory:
        _draw_memory(axes, drawing, rows, low - 0.06)
    axes.set(xlim=(begin, end), ylim=(-past + 0.4, -first + 0.6), xlabel="time")
    axes.set_title(drawing.headline, loc="left", fontsize=10)
    axes.set_yticks([-rank + (low + high) / 2 for rank in rows], [f"rank {r}" for r in rows])
    axes.set_facecolor(drawing.paper["idle"])
    _draw_legend(figure, drawing, memory=memory, critical_path=critical_path)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_boxes(
    axes: Axes, boxes: Sequence[Any], extent: tuple[float, float], pixel: float
) -> None:
    low, high = extent
    middle = (low + high) / 2
    halves = ((low, high), (middle, high), (low, middle))
    drawn: dict[tuple[int, int], list[Any]] = {}
    for box in boxes:
        drawn.setdefault((box[0], box[6]), []).append(box)
    for (rank, half), some in drawn.items():
        bottom, top = halves[half]
        spans = [(left, right - left) for _, _, _, _, left, right, _, _ in some]
        axes.broken_barh(
            spans,
            (bottom - rank, top - bottom),
            facecolors=[box[2] for box in some],
            edgecolor="white",
            linewidth=[0.5 if length > 4 * pixel else 0 for _, length in spans],
        )
        outlined = [span for span, box in zip(spans, some, strict=True) if box[7]]
        if outlined:
            axes.broken_barh(
                outlined,
                (bottom - rank, top - bottom),
                facecolors="none",
                edgecolor="black",
                linewidth=1.5,
            )
        for _, label, _, ink, left, right, _, _ in some:
            if right - left > 8 * len(label) * pixel:
                place = ((left + right) / 2, (bottom + top) / 2 - rank)
                axes.text(*place, label, color=ink, ha="center", va="center", fontsize=8)


def _draw_memory(axes: Axes, drawing: Drawing, rows: Sequence[int], top: float) -> None:
    curves = {rank: drawing.memory_steps(rank) for rank in rows}
    if not all(curves.values()):
        raise ConfigError(
            "memory=True, but this drawing knows no memory"
            "\nhint: draw a simulated plan, or leave memory out"
        )
    most = max(level for curve in curves.values() for _, level in curve) or 1
    bottom, height = -0.44, top + 0.44
    for rank, curve in curves.items():
        times = [time for time, _ in curve] + [drawing.extent[1]]
        levels = [level for _, level in curve] + [curve[-1][1]]
        heights = [bottom - rank + height * max(level, 0) / most for level in levels]
        axes.fill_between(
            times,
            bottom - rank,
            heights,
            step="post",
            facecolor=drawing.paper["memory"],
            edgecolor=drawing.paper["memory line"],
            linewidth=0.8,
        )


def _draw_legend(figure: Figure, drawing: Drawing, *, memory: bool, critical_path: bool) -> None:
    from matplotlib.patches import Patch

    fills = [*drawing.legend, ("idle", drawing.paper["idle"])]
    if memory:
        fills.append(("memory", drawing.paper["memory"]))
    patches = [Patch(facecolor=fill, edgecolor="#969696", label=name) for name, fill in fills]
    if critical_path:
        patches.append(Patch(facecolor="none", edgecolor="black", label="critical path"))
    figure.legend(handles=patches, loc="outside lower left", ncols=4, fontsize=8, frameon=False)


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
