"""The table's rows about running plans, from what `runtime` and `links` time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import links
import runtime
import starting

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime import Timed

    Result = dict[str, object]


@dataclass(frozen=True)
class Group:
    """Rows that are measured together.

    Attributes:
        name: What `--only` takes.
        measure: Runs so many steps of each contestant and gives the rows.
        reps: Steps by default.
    """

    name: str
    measure: Callable[[int], list[Result]]
    reps: int


def row(
    timed: Timed, name: str, work: str, ours: str, peer: str, goal: float, *,
    per: int = 1, less: str | None = None, shift_s: float = 0.0, **more: Any,
) -> Result:  # fmt: skip
    """One line: medians of two contestants, in seconds, and the median of each round's ratio.

    Args:
        timed: All contestants.
        name: Of the row.
        work: What is done.
        ours: Contestant.
        peer: Contestant.
        goal: The least ratio of the peer's time to ours.
        per: Number of ops that the times are shared by.
        less: Contestant whose time both are measured above.
        shift_s: Seconds taken off ours: what the plan itself must pay.
        more: Further entries of the row.
    """

    def figure(contestant: str, statistic: Callable[[str], float]) -> float:
        above = statistic(contestant) - (statistic(less) if less else 0.0)
        return max(above, 1e-8) / per

    mine, theirs = figure(ours, timed.median) - shift_s, figure(peer, timed.median)
    best = {"ours": figure(ours, timed.best) - shift_s, "peer": figure(peer, timed.best)}
    ratio = theirs / mine
    if not less and not shift_s:  # runs in one round saw the same load
        rounds = zip(timed.seconds[ours], timed.seconds[peer], strict=True)
        ratio = statistics.median(other / own for own, other in rounds)
    return {
        "name": name, "work": work, "goal": goal, "ours": mine, "peer": theirs, "ratio": ratio,
        "unit": "s", "met": ratio >= goal, "noise": timed.noise(ours), "best": best, **more,
    }  # fmt: skip


def overhead(reps: int) -> list[Result]:
    timed = runtime.overhead(reps)
    return [
        row(
            timed, f"overhead_{name}", f"CPU an op above the bare computation, tiny stages, {name}",
            name, f"{name} torch", 3.0, per=2 * 64 * vp, less=f"{name} bare",
        )
        for name, vp in (("1f1b", 1), ("interleaved_1f1b", 4))
    ]  # fmt: skip


def transfers(reps: int) -> list[Result]:
    timed = runtime.transfers(reps)
    return [
        row(
            timed, f"wall_{name}", f"wall an op between two processes, tiny stages, {name}",
            name, f"{name} torch", 2.0, per=2 * 32 * vp,
            ours_over_gloo=timed.median(f"{name} gloo") / (2 * 32 * vp),
        )
        for name, vp in (("1f1b", 1), ("interleaved_1f1b", 2))
    ]  # fmt: skip


def steps(pp: int, *, alone: bool) -> Callable[[int], list[Result]]:
    def measure(reps: int) -> list[Result]:
        names = list(runtime.TORCH_CLASSES)
        timed = runtime.gpt_steps(pp, reps, names, recompute=False, alone=alone)
        work = f"step of the GPT, pp {pp}"
        rows = [row(timed, f"step_pp{pp}_{n}", f"{work}, {n}", n, f"{n} torch", 1.0) for n in names]
        if alone:
            work += " against one process"
            rows.append(row(timed, f"step_pp{pp}_alone", work, "1f1b", "one process", 1.0))
        return rows

    return measure


def recompute(reps: int) -> list[Result]:
    names = ["interleaved_1f1b", "zb_v"]
    timed = runtime.gpt_steps(2, reps, names, recompute=True, alone=False)
    work = "step of the GPT with recompute, pp 2"
    rows = [row(timed, f"recompute_{n}", f"{work}, {n}", n, f"{n} torch", 1.0) for n in names]
    between = f"{work}, zb_v against our interleaved_1f1b"
    return [*rows, row(timed, "recompute_split", between, "zb_v", "interleaved_1f1b", 1.0)]


def overlap(reps: int) -> list[Result]:
    timed = links.overlap(reps)
    fill_s = 2 * (links.OVERLAP["pp"] - 1) * links.OVERLAP_DELAY_S
    work = "eager_1f1b on a link of 0.6 forwards' delay"
    free = f"{work}, fill and drain taken off, against no delay"
    steady = f"{work}, steady phase by the trace, against no delay"
    waited = f"{work}, against sends that are waited for"
    return [
        row(timed, "overlap", free, "delay", "no delay", 0.97, shift_s=fill_s),
        row(timed, "overlap_steady", steady, "delay steady", "no delay steady", 0.97),
        row(timed, "overlap_waited", waited, "delay", "waited", 1.1),
    ]


def late(reps: int) -> list[Result]:
    rows = []
    for is_late, label in ((True, "late"), (False, "prompt")):
        timed = links.late_messages(reps, late=is_late)
        messages = "one message in ten late" if is_late else "no message late"
        for name in links.PLANS:
            gains = is_late and name in ("zb_h2", "zb_v", "dualpipe_v")
            work = f"ready-first against the plan's order, {name}, {messages}"
            goal = 1.05 if gains else 0.97
            ours, peer = f"{name} ready", f"{name} plan"
            rows.append(row(timed, f"{label}_{name}", work, ours, peer, goal))
    return rows


def threads(reps: int) -> list[Result]:
    timed = links.threads(reps)
    work = "step of the GPT, pp 2 in one process, a thread a rank against one thread"
    return [
        row(timed, "threads", f"{work} on one core", "threads", "one core", 1.2),
        # Two cores on one kernel have no bubble; 8 microbatches on two ranks have one of 1/9.
        row(timed, "threads_kernels", f"{work} with kernels on two", "threads", "kernels", 8 / 9),
    ]


GROUPS = [
    Group("overhead", overhead, 20),
    Group("transfers", transfers, 10),
    Group("steps_pp2", steps(2, alone=True), 7),
    Group("steps_pp4", steps(4, alone=False), 7),
    Group("recompute", recompute, 3),
    Group("overlap", overlap, 5),
    Group("late", late, 5),
    Group("threads", threads, 3),
    Group("start", starting.measure, 10),
]
