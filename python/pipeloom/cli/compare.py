"""`pipeloom compare`: schedules side by side.

Costs are those of one rank's whole share of the model, so that schedules with different numbers of
chunks run the same model: with `vp` chunks each takes a `vp`-th of them, and with `k` pieces of a
sequence each piece a `k`-th.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pipeloom as pl
from pipeloom import plot
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom compare --pp 4 -m 8
  pipeloom compare 1f1b zb_h1 interleaved_1f1b --pp 8 --vp 2 -m 32
  pipeloom compare --pp 4 -m 8 --forward 1 --backward-input 1.2 --backward-weight 0.8 --json
  pipeloom compare --all --pp 8 --vp 2 -m 32 --memory-limit 9
  pipeloom compare 1f1b zb_h1 --pp 4 -m 8 --html both.html --svg both.svg

Costs are of one rank's whole share of the model and a whole microbatch: each of vp chunks has a
vp-th, each of k pieces of a sequence a k-th.
"""

# Costs of a stage: a chunk of 1/vp of the rank's layers has 1/vp of them.
_SHARED = (
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "overlapped",
    "recompute",
    "memory_forward",
    "memory_backward_input",
    "memory_backward_weight",
)
# Costs of what passes between stages: a piece of a sequence has its part of them, a chunk all.
_OF_BOUNDARIES = ("boundary_bytes", "memory_recompute")
_LISTED_RANKS = 16
_DEFAULTS = {
    "forward": 1,
    "backward_input": 1,
    "backward_weight": 1,
    "memory_forward": 1,
    "memory_backward_weight": -1,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("schedule", nargs="*", help="names of schedules (default: all)")
    options.add_shape_arguments(parser)
    options.add_cost_arguments(parser)
    parser.add_argument("--all", action="store_true", help="all schedules, as without names")
    parser.add_argument(
        "--memory-limit",
        type=options.cost,
        metavar="X",
        help="leave out what needs more memory: one number, or one a rank",
    )
    form = parser.add_argument_group("output", "a table, or files; - is stdout")
    form.add_argument("--svg", type=Path, metavar="FILE", help="write the plans, one scale of time")
    form.add_argument(
        "--png", type=Path, metavar="FILE", help="the same as a PNG (needs matplotlib)"
    )
    form.add_argument("--html", type=Path, metavar="FILE", help="write an interactive page of them")
    form.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one row a schedule, fastest first; those that can't make the shape come last."""
    known = {schedule.name: schedule for schedule in pl.schedules()}
    for name in arguments.schedule:
        options.refuse_unknown(name)
    shape = options.shape_of(arguments)
    values = _DEFAULTS | options.cost_values(arguments)
    for name in _SHARED:
        if isinstance(values.get(name), list):
            raise pl.ConfigError(
                f"--{name.replace('_', '-')} is a list, but schedules differ in their stages"
                "\nhint: give one number: the cost of one rank's whole share of the model"
            )
    if arguments.all and arguments.schedule:
        raise pl.ConfigError("--all and names are both given\nhint: leave one of them out")
    names = arguments.schedule or [name for name in known if name != "forward_only"]
    limit = _limit(arguments.memory_limit, shape["pp"])
    made = [_simulated(known[name], shape, values) for name in dict.fromkeys(names)]
    made = [_within(entry, limit) for entry in made]
    made.sort(key=lambda entry: (entry.timeline is None, entry.makespan))
    files = [arguments.svg, arguments.png, arguments.html]
    drawn = {entry.name: entry.timeline for entry in made if entry.timeline is not None}
    if files != [None] * len(files) and not drawn:
        raise pl.ConfigError(
            "no schedule can be drawn: "
            + "; ".join(f"{e.name}: {e.reason}" for e in made)
            + "\nhint: change the shape or the memory limit"
        )
    if arguments.svg is not None:
        picture = plot.stacked(list(drawn.values()), memory=True, critical_path=True)
        options.write(arguments.svg, picture)
    if arguments.png is not None:
        several = list(drawn.values())
        options.write_png(arguments.png, several, memory=True, critical_path=True)
    if arguments.html is not None:
        options.write(arguments.html, plot.html(drawn, memory=True, critical_path=True))
    if arguments.json:
        options.print_json([_row(entry) for entry in made])
    elif files == [None] * len(files):
        _print([_row(entry) for entry in made])
    return 0


class _Entry(NamedTuple):
    """A schedule with its prediction, or why it has none."""

    name: str
    timeline: pl.Timeline | None
    reason: str | None = None

    @property
    def makespan(self) -> float:
        return 0.0 if self.timeline is None else self.timeline.makespan


def _simulated(schedule: pl.Schedule, shape: dict[str, Any], values: dict[str, Any]) -> _Entry:
    # An option that another schedule needs is left out where it has no use.
    optional = set(shape) - {"pp", "num_microbatches", "placement", "vp"}
    own = {k: v for k, v in shape.items() if k not in optional or k in schedule.arguments}
    if schedule.vp is not None:
        own.pop("vp", None)
    try:
        plan = pl.plan(schedule.name, **own)
        return _Entry(
            schedule.name, plan.simulate(pl.Costs(**_share(values, plan.vp, plan.num_seq_pieces)))
        )
    except pl.PlanError as error:
        reason, _, _ = str(error).partition("\n")
        return _Entry(schedule.name, None, reason)


def _limit(given: Any, pp: int) -> list[float] | None:
    """The memory limit of each rank."""
    if given is None:
        return None
    limits = given if isinstance(given, list) else [given] * pp
    if len(limits) != pp or any(isinstance(limit, list) for limit in limits):
        raise pl.ConfigError(
            f"--memory-limit has {len(limits)} entries, but pp={pp}"
            "\nhint: give one number, or one a rank: 8,8,6,6"
        )
    return limits


def _within(entry: _Entry, limits: list[float] | None) -> _Entry:
    """The entry, or why it needs too much memory."""
    if entry.timeline is None or limits is None:
        return entry
    for rank, limit in enumerate(limits):
        peak = entry.timeline.peak_memory(rank)
        if peak > limit:
            needed, most = options.number(peak), options.number(limit)
            reason = f"rank {rank} needs {needed} of memory, above the limit of {most}"
            return _Entry(entry.name, None, reason)
    return entry


def _row(entry: _Entry) -> dict[str, Any]:
    timeline = entry.timeline
    if timeline is None:
        return {"schedule": entry.name, "makespan": None, "reason": entry.reason}
    plan = timeline.plan
    return {
        "schedule": entry.name,
        "vp": plan.vp,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_span": timeline.bubble_span,
        "gap": timeline.gap,
        "transfers": _num_transfers(plan),
        "peak_memory": [timeline.peak_memory(rank) for rank in range(plan.pp)],
        "reason": None,
    }


def _num_transfers(plan: pl.Plan) -> int:
    """Messages between ranks: one forward and one backward where the next stage is elsewhere."""
    per_replica = plan.num_stages // plan.num_replicas
    ranks = [rank for rank, _ in plan.stages]
    crossings = sum(
        ranks[stage] != ranks[stage + 1]
        for stage in range(plan.num_stages - 1)
        if (stage + 1) % per_replica
    )
    units = plan.num_microbatches * plan.num_seq_pieces // plan.num_replicas
    return crossings * units * (1 if plan.forward_only else 2)


def _share(values: dict[str, Any], chunks: int, pieces: int) -> dict[str, Any]:
    """Give a piece on a chunk its part of the costs, exactly where that is a whole number."""

    def part(value: Any, parts: int) -> Any:
        if isinstance(value, list):
            return [part(one, parts) for one in value]
        exact = Fraction(value) / parts
        return exact.numerator if exact.denominator == 1 else float(exact)

    parts = dict.fromkeys(_SHARED, chunks * pieces) | dict.fromkeys(_OF_BOUNDARIES, pieces)
    return {
        name: part(value, parts[name]) if name in parts and value is not None else value
        for name, value in values.items()
    }


def _print(rows: list[dict[str, Any]]) -> None:
    made = [row for row in rows if row["makespan"] is not None]
    heads = ("SCHEDULE", "VP", "MAKESPAN", "SPAN", "BUBBLE", "GAP", "TRANSFERS", "PEAK MEMORY")
    lines = [
        (
            row["schedule"],
            str(row["vp"]),
            options.number(row["makespan"]),
            options.number(row["span"]),
            f"{row['bubble_ratio']:.1%}",
            f"{row['gap']:.1%}",
            str(row["transfers"]),
            _peaks(row["peak_memory"]),
        )
        for row in made
    ]
    if made:
        print(options.table([heads, *lines], right=range(1, 7)))
        print("gap: how far the makespan is above a bound that no order of these ops can beat")
    for row in rows:
        if row["makespan"] is None:
            print(f"{row['schedule']}: {row['reason']}")


def _peaks(peaks: list[float]) -> str:
    if len(peaks) <= _LISTED_RANKS:
        return " ".join(options.number(peak) for peak in peaks)
    return f"{options.number(min(peaks))} to {options.number(max(peaks))} a rank"
