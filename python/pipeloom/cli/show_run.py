"""`pipeloom show RUN`: plan and reality one above the other, and how each op differs.

The plan is simulated with the costs that the run measured (or those that options give), so that
what differs is what the plan does not explain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pipeloom as pl
from pipeloom import plot
from pipeloom._core import Drawing
from pipeloom.cli import options
from pipeloom.cli.terminal import print_grids, print_waits
from pipeloom.profile import FILE, Profile

if TYPE_CHECKING:
    import argparse

    from pipeloom._core import Timeline
    from pipeloom.profile import OpTimes

__all__ = ["run"]

_MOST_LATE = 5


def run(arguments: argparse.Namespace) -> int:
    """Draw plan and reality into the terminal or into files."""
    for name in ("plan", "begin", "end", "ranks", "lower", "pp", "vp", "num_microbatches"):
        if getattr(arguments, name) is not None:
            words = {"begin": "from", "end": "to"}
            option = words.get(name, name).replace("_", "-")
            raise pl.ConfigError(
                f"--{option} has no use with a run\nhint: leave it out; {FILE} has the plan"
            )
    profile = Profile.load(arguments.schedule)
    given = options.cost_values(arguments)
    costs = pl.Costs(**given) if given else pl.Costs.from_profile(profile)
    planned = profile.plan.simulate(costs)
    real = profile.drawing()
    ops = profile.compare(planned)
    if arguments.json:
        options.print_json(_report(profile, planned, ops))
        return 0
    look = {"memory": arguments.memory, "critical_path": arguments.critical_path}
    note = "plan, ms, at the given costs" if given else "plan, ms, at the measured costs"
    predicted = Drawing.predicted(planned, critical_path=arguments.critical_path, note=note)
    files = (arguments.svg, arguments.html, arguments.png, arguments.trace)
    if arguments.svg is not None:
        options.write(arguments.svg, plot.stacked([predicted, real], width=arguments.width, **look))
    if arguments.html is not None:
        names = [drawing.headline.split("   ")[1] for drawing in (predicted, real)]
        both: dict[str, Timeline | Drawing] = dict(zip(names, (planned, real), strict=True))
        options.write(arguments.html, plot.html(both, paired=True, **look))
    if arguments.png is not None:
        options.write_png(arguments.png, [predicted, real], width=arguments.width, **look)
    if arguments.trace is not None:
        options.write(arguments.trace, plot.trace(real, microseconds_per_unit=1000))
    if files == (None,) * len(files):
        print_grids([predicted], arguments, **look)
        print_waits(predicted)
        print()
        print_grids([real], arguments)
        print_waits(real)
        _print_differences(profile, planned, ops)
    return 0


def _print_differences(profile: Profile, planned: Timeline, ops: list[OpTimes]) -> None:
    measured = profile.drawing().extent[1]
    difference = measured / planned.makespan - 1
    times = [options.number(time) for time in (planned.makespan, measured)]
    print(f"\nstep: planned {times[0]} ms, ran {times[1]} ms ({difference:+.1%})")
    late = sorted(ops, key=lambda op: op.late, reverse=True)[:_MOST_LATE]
    rows = [("OP", "RANK", "PLANNED START", "RAN AT", "LATE", "LONGER")]
    rows += [
        (
            op.op,
            str(op.rank),
            f"{op.planned_start:.2f}",
            f"{op.start:.2f}",
            f"{op.late:+.2f}",
            f"{op.longer:+.2f}",
        )
        for op in late
    ]
    print("the ops that started latest after their plan (--json has all):")
    print(options.table(rows, right=range(1, 6)))


def _report(profile: Profile, planned: Timeline, ops: list[OpTimes]) -> dict[str, object]:
    return {
        "plan": repr(profile.plan),
        "unit": "ms",
        "step": profile.median_step().number,
        "side_by_side": profile.side_by_side,
        "planned_makespan": planned.makespan,
        "makespan": profile.drawing().extent[1],
        "ops": [op._asdict() | {"late": op.late, "longer": op.longer} for op in ops],
    }
