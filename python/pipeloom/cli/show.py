"""`pipeloom show`: draw a plan, or a profiled run below its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeloom as pl
from pipeloom import plot
from pipeloom._core import Drawing
from pipeloom.cli import options, simulate
from pipeloom.cli.terminal import print_grids, print_waits

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom show interleaved_1f1b --pp 4 --vp 2 -m 8
  pipeloom show zb_h1 --pp 4 -m 8 --svg plan.svg --memory
  pipeloom show 1f1b --pp 64 -m 512 --from 0 --to 200 --ranks 0:8
  pipeloom show 1f1b --pp 4 -m 8 --lower streams --latency 0.2 --trace trace.json
  pipeloom show runs/train-1 --html run.html

The last draws a run of `pipeloom train --profile`: plan and reality, and how each op differs.
Open a trace in https://ui.perfetto.dev or chrome://tracing.
"""

_MOST_OPS = 20_000_000
"""Times of more ops would take gigabytes."""
_MICROSECONDS = {"us": 1, "ms": 1000, "s": 1_000_000}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_plan_arguments(parser, or_run=True)
    options.add_lower_arguments(parser)
    options.add_cost_arguments(parser)
    simulate.add_semantics_arguments(parser)
    part = parser.add_argument_group("part")
    part.add_argument("--from", dest="begin", type=float, metavar="T", help="draw from this time")
    part.add_argument("--to", dest="end", type=float, metavar="T", help="draw up to this time")
    part.add_argument("--ranks", metavar="FIRST:PAST", help="draw these ranks: 0:4 is 0, 1, 2, 3")
    form = parser.add_argument_group("output", "a grid in the terminal, or files; - is stdout")
    for name in ("svg", "html", "png", "trace"):
        form.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {_WHAT[name]}")
    form.add_argument("--json", action="store_true", help="print each op's times as JSON")
    form.add_argument(
        "--width", type=int, metavar="N", help="characters of the grid, or pixels of a picture"
    )
    form.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour the grid (auto: in a terminal, unless NO_COLOR is set)",
    )
    form.add_argument("--memory", action="store_true", help="draw memory below each rank")
    form.add_argument("--critical-path", action="store_true", help="mark the critical path")
    form.add_argument(
        "--time-unit",
        choices=tuple(_MICROSECONDS),
        default="ms",
        help="what one unit of the costs is in a trace (default: ms)",
    )


_WHAT = {
    "svg": "an SVG picture",
    "html": "an interactive page: zoom, hover, follow a microbatch",
    "png": "a PNG picture (needs matplotlib)",
    "trace": "a Chrome trace",
}


def run(arguments: argparse.Namespace) -> int:
    """Draw the plan into the terminal or into files."""
    if _names_a_run(arguments.schedule):
        from pipeloom.cli import show_run

        return show_run.run(arguments)
    plan = options.plan_of(arguments)
    if plan.num_ops > _MOST_OPS:
        raise pl.ConfigError(
            f"a plan of {plan.num_ops} ops is too big to draw: the limit is {_MOST_OPS}"
            "\nhint: fewer microbatches show the same pattern"
        )
    timeline = plan.simulate(
        options.costs_of(arguments),
        semantics=arguments.semantics,
        link_contention=arguments.link_contention,
    )
    if arguments.json:
        options.print_json(_times(plan, timeline))
        return 0
    part: dict[str, Any] = {
        "window": (arguments.begin, arguments.end),
        "ranks": _ranks(arguments.ranks),
    }
    look = {"memory": arguments.memory, "critical_path": arguments.critical_path}
    files = (arguments.svg, arguments.html, arguments.png, arguments.trace)
    if files == (None,) * len(files):
        return _print_grid(arguments, timeline, part)
    if arguments.svg is not None:
        text = plot.svg(timeline, **part, **look, width=arguments.width)
        options.write(arguments.svg, text)
    if arguments.html is not None:
        options.write(arguments.html, plot.html(timeline, **part, **look))
    if arguments.png is not None:
        options.write_png(arguments.png, timeline, **part, **look, width=arguments.width)
    if arguments.trace is not None:
        unit = _MICROSECONDS[arguments.time_unit]
        options.write(arguments.trace, plot.trace(timeline, **part, microseconds_per_unit=unit))
    return 0


def _names_a_run(word: str | None) -> bool:
    """Say whether the first word is a run's folder or profile, not a schedule."""
    if word is None:
        return False
    return Path(word).is_dir() or word.endswith(".json") or len(Path(word).parts) > 1


def _ranks(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, past = text.partition(":")
    try:
        return (int(first or 0), int(past)) if colon else (int(first), int(first) + 1)
    except ValueError:
        raise pl.ConfigError(
            f"--ranks {text!r} is not FIRST:PAST\nhint: --ranks 0:4 draws ranks 0, 1, 2 and 3"
        ) from None


def _times(plan: pl.Plan, timeline: pl.Timeline) -> dict[str, object]:
    orders = {str(rank): _order(plan, timeline, rank) for rank in range(plan.pp)}
    return {"plan": repr(plan), **simulate.report(timeline, plan.pp), "orders": orders}


def _order(plan: pl.Plan, timeline: pl.Timeline, rank: int) -> list[dict[str, object]]:
    """Give a rank's ops with their times; those of an overlapped pair one by one."""
    columns = plan.columns(rank)
    units = columns["microbatch"] * plan.num_seq_pieces + columns["piece"]
    times = (timeline.start(rank), timeline.end(rank))
    rows = zip(
        *(c.tolist() for c in (columns["stage"], columns["kind"], units, *times)), strict=True
    )
    return [
        {"op": f"{stage}{pl.OpKind(kind).name}{unit}", "start": start, "end": end}
        for stage, kind, unit, start, end in rows
    ]


def _print_grid(arguments: argparse.Namespace, timeline: pl.Timeline, part: dict[str, Any]) -> int:
    look = {"memory": arguments.memory, "critical_path": arguments.critical_path}
    drawing = Drawing.predicted(timeline, critical_path=arguments.critical_path)
    print_grids([drawing], arguments, **part, **look)
    print_waits(drawing, **part)
    return 0
