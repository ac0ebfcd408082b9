"""`pipeloom simulate`: predict time, bubble and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse

    from pipeloom import Timeline

__all__ = ["EXAMPLES", "add_arguments", "add_semantics_arguments", "report", "run"]

EXAMPLES = """\
  pipeloom simulate 1f1b --pp 4 -m 8
  pipeloom simulate zb_h1 --pp 4 -m 8 --forward 2 --backward-input 2.5 --backward-weight 1.5
  pipeloom simulate 1f1b --pp 4 -m 8 --latency 0.1 --lower fifo --semantics single_stream
  pipeloom simulate --plan step.plan --costs measured.json --json
"""


def add_semantics_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how transfers behave."""
    parser.add_argument(
        "--semantics",
        choices=options.SEMANTICS,
        default="buffered",
        metavar="NAME",
        help=f"{', '.join(options.SEMANTICS)}; all but buffered need --lower (default: buffered)",
    )
    parser.add_argument(
        "--link-contention",
        action="store_true",
        help="transfers of one channel share its bandwidth, one after the other",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_plan_arguments(parser)
    options.add_lower_arguments(parser)
    options.add_cost_arguments(parser)
    add_semantics_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def report(timeline: Timeline, pp: int) -> dict[str, object]:
    """Give the numbers of a timeline, in the unit of the costs."""
    return {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_span": timeline.bubble_span,
        "lower_bound": timeline.lower_bound,
        "gap": timeline.gap,
        "bubble": [timeline.bubble(rank) for rank in range(pp)],
        "bubble_parts": [timeline.bubble_parts(rank) for rank in range(pp)],
        "peak_memory": [timeline.peak_memory(rank) for rank in range(pp)],
    }


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction."""
    plan = options.plan_of(arguments)
    timeline = plan.simulate(
        options.costs_of(arguments),
        semantics=arguments.semantics,
        link_contention=arguments.link_contention,
    )
    if arguments.json:
        options.print_json({"plan": repr(plan), **report(timeline, plan.pp)})
        return 0
    print(repr(plan))
    facts = [
        ("makespan", options.number(timeline.makespan), "first start to last end"),
        ("span", options.number(timeline.span), "the longest of one rank"),
        ("bubble", f"{timeline.bubble_ratio:.1%}", "of the makespan, on the busiest rank"),
        ("lower bound", options.number(timeline.lower_bound), "no order of these ops is faster"),
        ("gap", f"{timeline.gap:.1%}", "of the makespan above the lower bound"),
    ]
    print(options.table(facts, right=[1]))
    ranks: list[tuple[str, ...]] = [
        ("RANK", "BUBBLE", "WARM-UP", "STEADY", "COOL-DOWN", "TRANSFER", "PEAK MEMORY")
    ]
    for rank in range(plan.pp):
        parts = [options.number(part) for part in timeline.bubble_parts(rank).values()]
        bubble = f"{timeline.bubble(rank):.1%}"
        ranks.append((str(rank), bubble, *parts, options.number(timeline.peak_memory(rank))))
    print()
    print(options.table(ranks, right=range(7)))
    return 0
