"""Hypothesis strategies for shapes, plans, costs, layouts and broken plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack

from hypothesis import assume
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Arguments = dict[str, Any]
"""The arguments of :func:`pipeloom.plan`, by name; plain values, so that JSON holds them."""


class Limits(TypedDict, total=False):
    """What :func:`arguments` may be told."""

    schedules: Sequence[str] | None
    max_pp: int
    max_vp: int
    max_microbatches: int


STYLES = ("streams", "fifo", "batched", "even_odd")


@st.composite
def arguments(
    draw: st.DrawFn,
    *,
    schedules: Sequence[str] | None = None,
    max_pp: int = 5,
    max_vp: int = 3,
    max_microbatches: int = 12,
) -> Arguments:
    """Arguments of :func:`pipeloom.plan` that are in range, but may contradict each other.

    Args:
        draw: Given by hypothesis.
        schedules: Names to choose from; None: all.
        max_pp: Most ranks.
        max_vp: Most chunks a rank, where the schedule leaves it open.
        max_microbatches: Most microbatches.
    """
    rows = [row for row in pl.schedules() if schedules is None or row.name in schedules]
    row = draw(st.sampled_from(rows))
    pp = 1 if row.name == "no_pipelining" else draw(st.integers(1, max_pp))
    m = draw(st.integers(1, max_microbatches))
    chosen: Arguments = {"schedule": row.name, "pp": pp, "num_microbatches": m}
    if row.vp is None:
        chosen["vp"] = draw(st.integers(1, max_vp))
    options: dict[str, st.SearchStrategy[object]] = {
        "microbatch_group_size": st.integers(1, m),
        "extra_warmup": st.just(1),
        "reverse_backward": st.booleans(),
        "forward_only": st.just(True),
        "num_microbatches_with_partial_activation_checkpoints": st.integers(0, 6),
        "num_seq_pieces": st.integers(2, 4),
    }
    for name in row.arguments:
        if name in options and draw(st.integers(0, 3)) == 0:
            chosen[name] = draw(options[name])
    return chosen


def _accepted(chosen: Arguments) -> bool:
    try:
        pl.plan(**chosen)
    except pl.PlanError:
        return False
    return True


def shapes(**limits: Unpack[Limits]) -> st.SearchStrategy[Arguments]:
    """Arguments that :func:`pipeloom.plan` accepts.

    Args:
        **limits: As of :func:`arguments`.

    Examples:
        >>> from hypothesis import find
        >>> find(shapes(schedules=["1f1b"]), lambda shape: True)
        {'schedule': '1f1b', 'pp': 1, 'num_microbatches': 1}
    """
    return arguments(**limits).filter(_accepted)


@st.composite
def plans(draw: st.DrawFn, *, lowered: bool = False, **limits: Unpack[Limits]) -> pl.Plan:
    """Plans of any schedule.

    Args:
        draw: Given by hypothesis.
        lowered: Whether they have transfers, in any style.
        **limits: As of :func:`shapes`.
    """
    plan = pl.plan(**draw(shapes(**limits)))
    if lowered:
        style, prefetch = draw(st.sampled_from(STYLES)), draw(st.integers(1, 3))
        plan = plan.lower(style, prefetch=prefetch)
    return plan


@st.composite
def cost_arguments(draw: st.DrawFn, plan: pl.Plan, *, max_cost: int = 9) -> dict[str, Any]:
    """Arguments of :class:`pipeloom.Costs` for a plan: integers, so that times are exact."""
    time = st.integers(0, max_cost)
    per_stage = st.lists(time, min_size=plan.num_stages, max_size=plan.num_stages)
    chosen: dict[str, Any] = {
        name: draw(st.one_of(time, per_stage))
        for name in ("forward", "backward_input", "backward_weight")
    }
    link = st.lists(
        st.lists(time, min_size=plan.pp, max_size=plan.pp), min_size=plan.pp, max_size=plan.pp
    )
    chosen["latency"] = draw(st.one_of(time, link))
    chosen |= {
        name: draw(time)
        for name in ("backward", "overlapped", "recompute")
        if draw(st.integers(0, 2)) == 0
    }
    memory = st.integers(-3, 5)
    names = ("forward", "backward_input", "backward_weight", "recompute")
    chosen |= {f"memory_{name}": draw(memory) for name in names}
    return chosen


def costs(plan: pl.Plan, *, max_cost: int = 9) -> st.SearchStrategy[pl.Costs]:
    """Costs that fit a plan: scalars or one number a stage, any latency."""
    return cost_arguments(plan, max_cost=max_cost).map(lambda chosen: pl.Costs(**chosen))


@st.composite
def layouts(draw: st.DrawFn, *, max_pp: int = 5, max_vp: int = 3, max_layers: int = 5) -> pl.Layout:
    """Layouts with any number of layers on each stage, at least one in all.

    Args:
        draw: Given by hypothesis.
        max_pp: Most ranks.
        max_vp: Most chunks a rank.
        max_layers: Most layers a stage.
    """
    pp, vp = draw(st.integers(1, max_pp)), draw(st.integers(1, max_vp))
    count = st.integers(0, max_layers)
    counts = [[draw(count) for _ in range(vp)] for _ in range(pp)]
    assume(any(map(any, counts)))
    placements: list[Literal["loop", "v"]] = ["loop", "v"]
    placement = draw(st.sampled_from(placements))
    return pl.Layout.from_counts(counts, placement=placement)


class Mutation(NamedTuple):
    """A plan's orders after one edit; most are broken.

    Attributes:
        name: What was done.
        schedule: The edited orders.
        changed: Ranks whose order was edited.
    """

    name: str
    schedule: reference.Schedule
    changed: tuple[int, ...]

    def to_csv(self) -> str:
        """The edited plan in PyTorch's CSV: one row a rank."""
        ranks = range(len(self.schedule.steps))
        return "".join(",".join(self.schedule.ops(rank)) + "\n" for rank in ranks)


Order = list[reference.Step]


def _swapped(order: Order, at: int, other: int) -> Order:
    order = list(order)
    order[at], order[other] = order[other], order[at]
    return order


def _moved(order: Order, at: int, other: int) -> Order:
    order = list(order)
    order.insert(other, order.pop(at))
    return order


def _renamed(order: Order, at: int, field: str) -> Order:
    step = order[at]
    op = step[0]._replace(**{field: getattr(step[0], field) + 1})
    return [*order[:at], (op, *step[1:]), *order[at + 1 :]]


EDITS: dict[str, Callable[[Order, int, int], Order]] = {
    "swap": _swapped,
    "move": _moved,
    "drop": lambda order, at, other: order[:at] + order[at + 1 :],  # noqa: ARG005
    "repeat": lambda order, at, other: [*order[:other], order[at], *order[other:]],
    "other microbatch": lambda order, at, other: _renamed(order, at, "unit"),  # noqa: ARG005
    "other stage": lambda order, at, other: _renamed(order, at, "stage"),  # noqa: ARG005
    "other rank": lambda order, at, other: order[:at] + order[at + 1 :],  # noqa: ARG005
}
"""What can be done to one rank's order, at one step, with another step of the same rank."""


@st.composite
def mutations(draw: st.DrawFn, plan: pl.Plan) -> Mutation:
    """Edits of a plan: one op swapped, moved, dropped, repeated, renamed or on another rank.

    Args:
        draw: Given by hypothesis.
        plan: A plan, lowered or not.
    """
    schedule = reference.Schedule.of(plan)
    busy = [rank for rank, order in enumerate(schedule.steps) if order]
    rank = draw(st.sampled_from(busy))
    order = schedule.steps[rank]
    at, other = (draw(st.integers(0, len(order) - 1)) for _ in range(2))
    names = [name for name in EDITS if name != "other rank" or plan.pp > 1]
    name = draw(st.sampled_from(names))
    steps = list(schedule.steps)
    steps[rank] = EDITS[name](order, at, other)
    changed: tuple[int, ...] = (rank,)
    if name == "other rank":
        target = (rank + draw(st.integers(1, plan.pp - 1))) % plan.pp
        there = draw(st.integers(0, len(steps[target])))
        steps[target] = [*steps[target][:there], order[at], *steps[target][there:]]
        changed = (rank, target)
    return Mutation(name, schedule.with_steps(steps), changed)
