"""`pipeloom compare`: schedules side by side.

Costs are those of one rank's whole share of the model, so that schedules with different numbers of
chunks run the same model: with `vp` chunks each takes a `vp`-th of them.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pipeloom as pl
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom compare --pp 4 -m 8
  pipeloom compare 1f1b zb_h1 interleaved_1f1b --pp 8 --vp 2 -m 32
  pipeloom compare --pp 4 -m 8 --forward 1 --backward-input 1.2 --backward-weight 0.8 --json

Costs are of one rank's whole share of the model: a schedule with vp chunks has a vp-th each.
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
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one row a schedule, fastest first; those that can't make the shape come last."""
    known = {schedule.name: schedule for schedule in pl.schedules()}
    for name in arguments.schedule:
        if name not in known:
            raise pl.ConfigError(f"schedule {name!r} is unknown\nhint: one of {', '.join(known)}")
    shape = options.shape_of(arguments)
    values = _DEFAULTS | options.cost_values(arguments)
    for name in _SHARED:
        if isinstance(values.get(name), list):
            raise pl.ConfigError(
                f"--{name.replace('_', '-')} is a list, but schedules differ in their stages"
                "\nhint: give one number: the cost of one rank's whole share of the model"
            )
    names = arguments.schedule or [name for name in known if name != "forward_only"]
    rows = [_row(known[name], shape, values) for name in dict.fromkeys(names)]
    rows.sort(key=lambda row: (row["makespan"] is None, row["makespan"]))
    if arguments.json:
        options.print_json(rows)
    else:
        _print(rows)
    return 0


def _row(schedule: pl.Schedule, shape: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    # An option that another schedule needs is left out where it has no use.
    optional = set(shape) - {"pp", "num_microbatches", "placement", "vp"}
    own = {k: v for k, v in shape.items() if k not in optional or k in schedule.arguments}
    if schedule.vp is not None:
        own.pop("vp", None)
    try:
        plan = pl.plan(schedule.name, **own)
        timeline = plan.simulate(pl.Costs(**_share(values, plan.vp)))
    except pl.PlanError as error:
        reason, _, _ = str(error).partition("\n")
        return {"schedule": schedule.name, "makespan": None, "reason": reason}
    return {
        "schedule": schedule.name,
        "vp": plan.vp,
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_span": timeline.bubble_span,
        "gap": timeline.gap,
        "peak_memory": max(timeline.peak_memory(rank) for rank in range(plan.pp)),
        "reason": None,
    }


def _share(values: dict[str, Any], chunks: int) -> dict[str, Any]:
    """Give a chunk its part of the costs, exactly where that is a whole number."""

    def part(value: float) -> float:
        exact = Fraction(value) / chunks
        return exact.numerator if exact.denominator == 1 else float(exact)

    return {
        name: part(value) if name in _SHARED and value is not None else value
        for name, value in values.items()
    }


def _print(rows: list[dict[str, Any]]) -> None:
    made = [row for row in rows if row["makespan"] is not None]
    head = ("SCHEDULE", "VP", "MAKESPAN", "BUBBLE", "GAP", "PEAK MEMORY")
    lines = [
        (
            row["schedule"],
            str(row["vp"]),
            f"{row['makespan']:g}",
            f"{row['bubble_ratio']:.1%}",
            f"{row['gap']:.1%}",
            f"{row['peak_memory']:g}",
        )
        for row in made
    ]
    if made:
        print(options.table([head, *lines], right=range(1, 6)))
    for row in rows:
        if row["makespan"] is None:
            print(f"{row['schedule']}: {row['reason']}")
