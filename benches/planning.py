"""The rows about planning: DESIGN's table of work, our call, the peer's call, the goal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import peers
import pipeloom as pl

if TYPE_CHECKING:
    from collections.abc import Callable

    from timing import Work


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: What `--only` takes.
        work: What is done, in words.
        build: Makes our call and the peer's, which may be None; or measures bytes itself.
        goal: With a peer: how many times faster. Without: the most that `per` may cost.
        per: Without a peer: number of ops that our time, or memory, is shared by.
        unit: Unit of ours and goal without a peer: "ns/op", "us" or "B/op".
    """

    name: str
    work: str
    build: Callable[[], tuple[Work, Work | None] | float]
    goal: float
    per: Callable[[], int] | None = None
    unit: str = "x"


def our_rank(pp: int, vp: int, m: int, rank: int) -> object:
    plan = pl.plan("interleaved_1f1b", pp=pp, vp=vp, num_microbatches=m)
    return plan.num_warmup(rank), plan.columns(rank)


def one_rank() -> tuple[Work, Work]:
    theirs = peers.megatron_rank(64, 8, 4096, 64)
    return lambda: our_rank(64, 8, 4096, 32), lambda: theirs(32)


def all_ranks() -> tuple[Work, Work]:
    theirs = peers.megatron_rank(64, 8, 4096, 64)

    def ours() -> object:
        plan = pl.plan("interleaved_1f1b", pp=64, vp=8, num_microbatches=4096)
        for rank in range(64):
            # Each rank's columns are dropped, as the peer's: a rank needs its own alone.
            plan.num_warmup(rank), plan.columns(rank)
        return plan

    def peer() -> object:
        for rank in range(64):
            theirs(rank)
        return None

    return ours, peer


def small() -> tuple[Work, Work]:
    theirs = peers.megatron_rank(8, 4, 64, 8)
    return lambda: our_rank(8, 4, 64, 4), lambda: theirs(4)


def pipeline(
    name: str, torch_name: str, pp: int, vp: int, m: int, *, constructor: bool, style: str = "auto"
) -> Callable[[], tuple[Work, Work]]:
    def build() -> tuple[Work, Work]:
        make = peers.torch_constructor if constructor else peers.torch_order_and_transfers
        chunks = None if torch_name == "ScheduleZBVZeroBubble" else vp

        def ours() -> object:
            return pl.plan(name, pp=pp, vp=chunks, num_microbatches=m).lower(style)

        return ours, make(torch_name, pp, vp, m)

    return build


def _pipelines() -> list[Row]:
    shapes = [
        ("pipeline", "interleaved_1f1b", "ScheduleInterleaved1F1B", 128, 4, 1024),
        ("pipeline_zb", "interleaved_zb", "ScheduleInterleavedZeroBubble", 64, 4, 512),
        ("pipeline_zbv", "zb_v", "ScheduleZBVZeroBubble", 64, 2, 512),
    ]
    rows = []
    for row, name, torch_name, pp, vp, m in shapes:
        work = f"order + transfers, {name} pp {pp}, vp {vp}, m {m}"
        for suffix, constructor, goal in (("", False, 300.0), ("_constructor", True, 1000.0)):
            build = pipeline(name, torch_name, pp, vp, m, constructor=constructor)
            rows.append(Row(row + suffix, f"{work}; torch {suffix[1:] or 'lowering'}", build, goal))
    name, torch_name, *sizes = shapes[0][1:]
    build = pipeline(name, torch_name, *sizes, constructor=False, style="fifo")
    # Bare torch lowering too, but an order that can't deadlock on one stream; no goal of DESIGN's.
    rows.append(Row("pipeline_fifo", f"order + transfers of one stream, {name}", build, 100.0))
    return rows


LARGE = {"pp": 64, "vp": 4, "num_microbatches": 512}


def large(*, lowered: bool) -> pl.Plan:
    plan = pl.plan("interleaved_1f1b", **LARGE)
    return plan.lower("fifo") if lowered else plan


def check_all() -> tuple[Work, None]:
    plan = large(lowered=True)
    return lambda: plan.check("all"), None


def simulate() -> tuple[Work, None]:
    plan, costs = large(lowered=False), pl.Costs(forward=1, backward_input=1, backward_weight=1)
    return lambda: plan.simulate(costs), None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held_bytes() -> float:
    """Growth of the process by each plan that is kept, once the heap has room for the work."""
    kept = [large(lowered=True) for _ in range(2)]
    before, more = resident_bytes(), 8
    kept += [large(lowered=True) for _ in range(more)]
    return (resident_bytes() - before) / more


ROWS = [
    Row("one_rank", "one rank's rows, table, order; pp 64, vp 8, m 4096", one_rank, 100.0),
    Row("all_ranks", "all 64 ranks of that", all_ranks, 150.0),
    Row("small_vs_megatron", "one small plan, one rank; pp 8, vp 4, m 64", small, 1.0),
    Row(
        "small",
        "one small plan from Python; pp 8, vp 4, m 64, one rank",
        lambda: (small()[0], None),
        10.0,
        per=lambda: 1,
        unit="us",
    ),
    *_pipelines(),
    Row(
        "check_all",
        "check under all five semantics",
        check_all,
        100.0,
        per=lambda: large(lowered=True).num_ops,
        unit="ns/op",
    ),
    Row(
        "simulate",
        "simulate, buffered",
        simulate,
        30.0,
        per=lambda: large(lowered=False).num_ops,
        unit="ns/op",
    ),
    Row(
        "memory",
        "memory of a lowered plan",
        held_bytes,
        16.0,
        per=lambda: large(lowered=True).num_ops,
        unit="B/op",
    ),
]
