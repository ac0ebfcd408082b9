"""Pictures that matplotlib (extra `plot`) draws: PNG, and the loss curve."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from pipeloom import legend
from pipeloom._core import ConfigError, Drawing, Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipeloom.plot import Ranks, Window

__all__ = ["loss_curve", "png"]


def _figure(width_px: float, height_px: float, layout: Literal["constrained"] | None) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed\nhint: pip install 'pipeloom[plot]'"
        ) from None
    # A figure of its own touches neither pyplot's state nor a display.
    return Figure(figsize=(width_px / 100, height_px / 100), dpi=100, layout=layout)


def png(
    what: Timeline | Drawing | Sequence[Timeline | Drawing],
    path: str | PathLike[str] | IO[bytes],
    *,
    window: Window = (None, None),
    ranks: Ranks | None = None,
    width: int | None = None,
    memory: bool = False,
    critical_path: bool = False,
) -> None:
    """Draw a PNG picture with matplotlib (extra `plot`).

    Args:
        what: The timeline or drawing, or several: they stand above each other, to one scale of
            time, and memory and critical path are drawn where they are known.
        path: File to write, by name or open for bytes.
        window: Part of the time; of one alone.
        ranks: Part of the ranks; of one alone.
        width: Width in pixels, 200 to 20,000. None: 1,200.
        memory: Draw each rank's memory below its row, all to one scale.
        critical_path: Outline the ops of the critical path.

    Raises:
        ConfigError: matplotlib is not installed, the width is out of range, the window shows
            nothing or too much, or the drawing does not know what is asked for.
    """
    alone = isinstance(what, (Drawing, Timeline))
    drawn: Sequence[Timeline | Drawing] = [what] if alone else what  # type: ignore[assignment, list-item]
    if not alone and (window != (None, None) or ranks is not None or not drawn):
        raise ConfigError(
            "several plans are drawn whole, and there must be one"
            "\nhint: draw one plan to see a part of it"
        )
    width = 1200 if width is None else width
    if not _LEAST_WIDTH <= width <= _MOST_WIDTH:
        raise ConfigError(
            f"width={width} is out of range for a PNG picture"
            f"\nhint: give {_LEAST_WIDTH} to {_MOST_WIDTH} pixels, or leave it out"
        )
    look = {"memory": memory, "critical_path": critical_path, "alone": alone}
    panels = [_Panel.of(one, (*window, ranks), **look, width=width) for one in drawn]
    height = sum(panel.height_px for panel in panels)
    figure = _figure(width, height, None)
    extents = [panel.extent for panel in panels]
    extent = (min(begin for begin, _ in extents), max(end for _, end in extents))
    if extent[0] == extent[1]:  # ops that take no time
        extent = (extent[0], extent[0] + 1)
    # Room by the pixel: layout engines don't know what belongs to which plan.
    left, plot_width = _LEFT_PX / width, (width - _LEFT_PX - _RIGHT_PX) / width
    top = height
    for panel in panels:
        bottom = top - panel.title_px - panel.rows_px
        box = (left, bottom / height, plot_width, panel.rows_px / height)
        axes = figure.add_axes(box)
        panel.draw(axes, extent, pixel=(extent[1] - extent[0]) / (width - _LEFT_PX - _RIGHT_PX))
        top -= panel.height_px
    figure.savefig(path, format="png", metadata={"Software": None})


_LEAST_WIDTH, _MOST_WIDTH = 200, 20_000
_ROW_PX, _MEMORY_PX = 34, 18
_LEFT_PX, _RIGHT_PX = 72, 62
_TITLE_PX, _AXIS_PX, _LEGEND_PX = 46, 40, 15
"""Heights above the rows and below them, and of a line of the legend."""
_LEGEND_COLUMN_PX = 330
_CHARACTER_PX, _TITLE_CHARACTER_PX = 5.5, 7.5
"""Widths of a character of small text, and of a headline."""
_TITLE_LINE_PX = 17
"""Height of a line of a headline after the first."""


class _Panel(NamedTuple):
    """A plan in a figure: which part of it, and what is drawn with its ops."""

    drawing: Drawing
    part: tuple[float | None, float | None, Ranks | None]
    memory: bool
    critical_path: bool
    width: int
    """Of the whole figure, in pixels."""

    @classmethod
    def of(
        cls,
        what: Timeline | Drawing,
        part: tuple[float | None, float | None, Ranks | None],
        *,
        memory: bool,
        critical_path: bool,
        alone: bool,
        width: int,
    ) -> _Panel:
        if isinstance(what, Timeline):
            what = Drawing.predicted(what, critical_path=critical_path)
        elif not alone:
            memory = memory and bool(what.memory_steps(0))
            critical_path = critical_path and what.has_critical_path
        return cls(what, part, memory, critical_path, width)

    @property
    def rows(self) -> range:
        return range(*(self.part[2] or (0, self.drawing.pp)))

    @property
    def extent(self) -> tuple[float, float]:
        """First and last time that is seen."""
        return _clipped(self.part[:2], self.drawing.extent)

    @property
    def limits(self) -> list[tuple[float, str, str, bool]]:
        """Of the drawing's limits those that are seen."""
        begin, end = self.extent
        return [limit for limit in self.drawing.limits if begin < limit[0] <= end]

    @property
    def columns(self) -> int:
        """Of the legend."""
        return max(1, self.width // _LEGEND_COLUMN_PX)

    @property
    def title(self) -> str:
        """The headline in lines that fit, broken between its parts."""
        room = (self.width - _LEFT_PX) / _TITLE_CHARACTER_PX
        first, *parts = self.drawing.headline.split("   ")
        lines = [first]
        for part in parts:
            if len(lines[-1]) + 3 + len(part) <= room:
                lines[-1] += f"   {part}"
            else:
                lines.append(part)
        return "\n".join(lines)

    @property
    def title_px(self) -> int:
        return _TITLE_PX + _TITLE_LINE_PX * self.title.count("\n")

    @property
    def rows_px(self) -> int:
        return (_ROW_PX + _MEMORY_PX * self.memory) * len(self.rows)

    @property
    def height_px(self) -> int:
        texts = [entry.text.count("\n") + 1 for entry in self.legend]
        lines = sum(texts) if self.columns == 1 else -(-len(texts) // self.columns)
        return self.title_px + self.rows_px + _AXIS_PX + _LEGEND_PX * lines + 12

    def draw(self, axes: Axes, extent: tuple[float, float], *, pixel: float) -> None:
        """Draw it; `extent` is the scale that all panels share, `pixel` a pixel's time."""
        drawing, rows = self.drawing, self.rows
        boxes = drawing.boxes(self.part, critical_path=self.critical_path)
        # A rank's row is one unit high: boxes take its middle, or its upper part above the memory.
        low, high = (0.0, 0.44) if self.memory else (-0.4, 0.4)
        _draw_boxes(axes, boxes, (low, high), pixel)
        _draw_transfers(axes, drawing.transfers(self.part), low)
        _draw_waits(axes, drawing.waits(self.part), (low + high) / 2, pixel)
        labels = [f"rank {rank}" for rank in rows]
        ticks = [-rank + (low + high) / 2 for rank in rows]
        if self.memory:
            _draw_memory(axes, drawing, rows, low - 0.06)
            # A row holds the peak too, which the curve's height alone would not tell.
            ticks += [-rank - 0.3 for rank in rows]
            labels += [f"peak {drawing.memory_peaks[rank]}" for rank in rows]
        end = self.extent[1]
        for rank in rows:
            place = (end + 6 * pixel, -rank + (low + high) / 2)
            axes.text(*place, f"{drawing.idle_percent[rank]}% idle", va="center", fontsize=7)
        _draw_limits(axes, self.limits)
        axes.set(xlim=extent, ylim=(-rows[-1] - 0.6, -rows[0] + 0.6), xlabel="time")
        axes.xaxis.set_label_coords(0.5, -24 / self.rows_px)
        axes.xaxis.label.set_fontsize(9)
        axes.set_title(self.title, loc="left", fontsize=10, pad=14)
        axes.set_yticks(ticks, labels, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        idle = (self.extent[0], self.extent[1] - self.extent[0])
        paper = drawing.paper["idle"]
        for rank in rows:
            axes.broken_barh([idle], (low - rank, high - low), facecolors=paper, zorder=0)
        legend.draw(axes, self.legend, columns=self.columns, below=_AXIS_PX / self.rows_px)

    @property
    def legend(self) -> list[legend.Entry]:
        """What colours and lines mean."""
        room = (self.width / self.columns - _LEFT_PX) / _CHARACTER_PX
        return legend.entries(
            self.drawing,
            self.part,
            memory=self.memory,
            critical_path=self.critical_path,
            limits=self.limits,
            room=max(12, int(room) - 8),
        )


_Wait = tuple[int, float, float, str, tuple[str, int] | None]


def _draw_waits(axes: Axes, waits: Sequence[_Wait], middle: float, pixel: float) -> None:
    """Write into each gap what ends it, as far as there is room."""
    for rank, start, end, reason, awaited in waits:
        texts = [reason] if reason == "done" else []
        if awaited is not None:
            op, other = awaited
            texts += [reason, f"{op}\nrank {other}", f"{op}\nr{other}"]
        room = (end - start) / pixel / _CHARACTER_PX
        text = next((t for t in texts if max(map(len, t.split("\n"))) + 0.5 < room), None)
        if text is not None:
            place = ((start + end) / 2, middle - rank)
            axes.text(*place, text, ha="center", va="center", fontsize=6.5, linespacing=0.9)


def _draw_transfers(
    axes: Axes, transfers: Sequence[tuple[int, str, float, float, bool]], low: float
) -> None:
    """Bars along a row's lower edge: sends inside it, receives below them."""
    for rank, fill, start, end, sends in transfers:
        bottom = low - rank + (0 if sends else -_TRANSFER)
        axes.broken_barh([(start, end - start)], (bottom, _TRANSFER), facecolors=fill, zorder=2)


_TRANSFER = 0.05
"""Height of a transfer, in rows."""


def _draw_limits(axes: Axes, limits: Sequence[tuple[float, str, str, bool]]) -> None:
    for time, text, _, of_work in limits:
        style = "--" if of_work else "-"
        axes.axvline(time, color="#222222", linewidth=1, linestyle=style, clip_on=False)
        axes.annotate(
            text,
            (time, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-2 if of_work else 2, 3),
            textcoords="offset points",
            ha="right" if of_work else "left",
            fontsize=7,
        )


def _draw_boxes(
    axes: Axes, boxes: Sequence[Any], extent: tuple[float, float], pixel: float
) -> None:
    low, high = extent
    middle = (low + high) / 2
    halves = ((low, high), (middle, high), (low, middle))
    drawn: dict[tuple[int, int], list[Any]] = {}
    for box in boxes:
        drawn.setdefault((box[0], box[6]), []).append(box)
    for (rank, half), all_of_row in drawn.items():
        some = _seen(all_of_row, pixel)
        bottom, top = halves[half]
        spans = [(left, right - left) for _, _, _, _, left, right, *_ in some]
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
        for _, label, _, ink, left, right, *_, recompute in some:
            if right - left > 8 * len(label) * pixel:
                place = ((left + right) / 2, (bottom + top) / 2 - rank)
                axes.text(*place, label, color=ink, ha="center", va="center", fontsize=8)
            if recompute and right - left > 6 * pixel:
                edge = bottom - rank + 0.06
                ends = [left + 2 * pixel, right - 2 * pixel]
                axes.plot(ends, [edge, edge], color=ink, lw=1.2, ls=":", scalex=False, scaley=False)


def _seen(boxes: list[Any], pixel: float) -> list[Any]:
    """The boxes of a row but those inside a pixel that others have taken already."""
    seen, taken_to = [], float("-inf")
    for box in boxes:
        left, right = box[4], box[5]
        if right > taken_to:
            seen.append(box)
            taken_to = max(right, left + pixel)
    return seen


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
    figure = _figure(800, 450, "constrained")
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
