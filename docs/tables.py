"""Computes the tables of README.md and format.md again: `python docs/tables.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pipeloom as pl

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)

PP, M = 4, 8
"""The size at which the schedules are compared."""


def rows(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |\n"


def example(row: pl.Schedule) -> pl.Plan:
    """A schedule's plan at the size of the table; two chunks or pieces where it takes any."""
    pp = 1 if row.name == "no_pipelining" else PP
    vp = 2 if row.vp is None else None
    pieces = {"num_seq_pieces": 2} if "num_seq_pieces" in row.arguments else {}
    return pl.plan(row.name, pp=pp, vp=vp, num_microbatches=M, **pieces)


def compared(row: pl.Schedule) -> tuple[float, float]:
    """Bubble, as a part of the makespan, and memory, in microbatches on one rank, at F = I = W."""
    plan = example(row)
    parts = plan.vp * plan.num_seq_pieces
    each = 12 // parts  # whole numbers
    costs = pl.Costs(
        forward=each,
        backward_input=each,
        backward_weight=each,
        memory_forward=each,
        memory_backward_weight=0 if row.name == "forward_only" else -each,
    )
    timeline = plan.simulate(costs)
    memory = max(timeline.peak_memory(rank) for rank in range(plan.pp)) / 12
    return timeline.bubble_ratio, memory


def schedules() -> str:
    """The table of schedules."""
    text = rows("schedule", "what it is for", "constraints", "bubble", "memory")
    text += rows(*["---"] * 5)
    for row in pl.schedules():
        bubble, memory = compared(row)
        held = "-" if row.name == "forward_only" else f"{memory:g}"
        text += rows(f"`{row.name}`", row.summary, row.constraints, f"{bubble:.0%}", held)
    return text


ORDERS = [
    ("interleaved_1f1b", 4, 2, 16),
    ("interleaved_1f1b", 8, 4, 32),
    ("looped_bfs", 8, 2, 32),
    ("looped_bfs", 8, 4, 32),
    ("interleaved_zb", 8, 4, 32),
    ("zb_v", 4, None, 16),
    ("zb_v", 8, None, 32),
    ("dualpipe_v", 4, None, 16),
    ("dualpipe_v", 8, None, 32),
    ("v_half", 8, None, 32),
]


def longer(name: str, pp: int, vp: int | None, m: int) -> Iterator[str]:
    """How much longer than with transfers that hold up nobody, by latency and order."""
    plan = pl.plan(name, pp=pp, vp=vp, num_microbatches=m)
    fifo, batched, streams = (plan.lower(style) for style in ("fifo", "batched", "streams"))
    ahead = plan.lower("streams", prefetch=4)
    for latency in (0.0, 0.25):
        costs = pl.Costs(latency=latency)
        least = plan.simulate(costs).makespan
        for lowered, semantics in (
            (fifo, "single_stream"),
            (fifo, "rendezvous"),
            (batched, "batched"),
            (streams, "streams"),
            (ahead, "streams"),
        ):
            makespan = lowered.simulate(costs, semantics=semantics).makespan
            yield f"{100 * (makespan / least - 1):.0f}"


def orders() -> str:
    """The table of orders of transfers."""
    kinds = ["fifo", "rendezvous", "batched", "streams", "ahead"]
    text = rows("schedule pp, vp, m", *kinds, *(f"{kind}, late" for kind in kinds))
    text += rows(*["---"] * (1 + 2 * len(kinds)))
    for name, pp, vp, m in ORDERS:
        shape = f"`{name}` {pp}, {vp or 2}, {m}"
        text += rows(shape, *longer(name, pp, vp, m))
    return text


TABLES: dict[str, Callable[[], str]] = {"schedules": schedules, "orders": orders}
PAGES = [ROOT / "README.md", ROOT / "docs" / "format.md"]


def recomputed(page: str) -> str:
    """The page with every marked table computed again."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(recomputed(path.read_text()))
