"""What must hold for every plan. Each check raises an ``AssertionError`` that says what did not."""

from __future__ import annotations

import pickle
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pipeloom as pl
from pipeloom import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeloom.testing.strategies import Arguments, Mutation


def _twin_arguments(arguments: Arguments) -> dict[str, Any]:
    """The arguments that change the order of ops, as the twin takes them."""
    marks = ("schedule", "forward_only", "num_microbatches_with_partial_activation_checkpoints")
    return {name: value for name, value in arguments.items() if name not in marks}


def twin_of(arguments: Arguments) -> reference.Schedule:
    """The reference's schedule for the arguments."""
    twin = reference.schedule(arguments["schedule"], **_twin_arguments(arguments))
    if arguments.get("forward_only"):
        forwards = [[step for step in order if step[0].kind == "F"] for order in twin.steps]
        twin = twin.with_steps(forwards)
    return twin


def is_forward_only(arguments: Arguments) -> bool:
    """Whether the plan has no backwards."""
    return bool(arguments.get("forward_only")) or arguments["schedule"] == "forward_only"


def equals_twin(arguments: Arguments) -> None:
    """The plan is the reference's, op for op, with the reference's warm-up and mask."""
    plan, twin = pl.plan(**arguments), twin_of(arguments)
    kept = arguments.get("num_microbatches_with_partial_activation_checkpoints")
    for rank in range(plan.pp):
        expected = twin.ops(rank)
        assert plan.ops(rank) == expected, f"rank {rank}: {plan.ops(rank)} is not {expected}"
        total = plan.columns(rank)["kind"].tolist().count(pl.OpKind.F)
        warmup = plan.num_warmup(rank)
        if is_forward_only(arguments):
            assert warmup == total, f"rank {rank}: warm-up {warmup} of {total} forwards"
            assert plan.recompute_mask(rank) is None
            continue
        try:
            name, given = arguments["schedule"], _twin_arguments(arguments)
            given.pop("reverse_backward", None)
            expected_warmup = reference.warmup(name, rank, **given)
        except KeyError:
            pass  # the family has no formula
        else:
            assert warmup == expected_warmup, f"rank {rank}: {warmup} is not {expected_warmup}"
        mask = plan.recompute_mask(rank)
        if kept is None:
            assert mask is None, f"rank {rank}: a mask that nobody asked for"
        else:
            assert mask is not None, f"rank {rank}: no mask"
            assert mask.tolist() == reference.recompute_mask(warmup, total, kept), f"rank {rank}"


def refuses_what_deadlocks(arguments: Arguments) -> None:
    """A group size is refused by name exactly when its order deadlocks."""
    twin = twin_of(arguments)
    deadlocks = bool(reference.stuck(twin))
    refusal = _refusal(lambda: pl.plan(**arguments))
    if refusal is None:
        assert not deadlocks, f"accepted, but stuck at {reference.stuck(twin)}"
    elif "deadlock" in refusal:
        assert deadlocks, f"refused, but the order progresses: {refusal}"
        assert "microbatch_group_size" in refusal, f"argument not named: {refusal}"


def _refusal(call: Callable[[], object]) -> str | None:
    """The planner's refusal, which must have a hint; None if it accepts."""
    try:
        call()
    except pl.PlanError as error:
        refusal = str(error)
    else:
        return None
    assert "\nhint: " in refusal, f"no hint: {refusal}"
    return refusal


def is_sound(arguments: Arguments) -> None:
    """Every stage runs each of its units once, in dependency order, and no rank gets stuck."""
    schedule = reference.Schedule.of(pl.plan(**arguments))
    found = reference.faults(schedule, forward_only=is_forward_only(arguments))
    assert not found, found
    assert not reference.stuck(schedule), f"stuck at {reference.stuck(schedule)}"


def random_access_agrees(plan: pl.Plan) -> None:
    """Texts, columns, `op` and `position` tell the same order."""
    schedule = reference.Schedule.of(plan)
    for rank in range(plan.pp):
        actions = plan.ops(rank)
        assert actions == schedule.ops(rank), f"rank {rank}: ops differ from columns"
        indices = range(len(actions))
        assert [plan.op(rank, i) for i in indices] == actions, f"rank {rank}: op(i)"
        positions = [plan.position(rank, action) for action in actions]
        assert positions == list(indices), f"rank {rank}: position is not the inverse of op"
        columns = plan.columns(rank)
        placed = [plan.stages[stage] for stage in columns["stage"].tolist()]
        assert placed == [(rank, chunk) for chunk in columns["chunk"].tolist()], f"rank {rank}"


def marks_agree(plan: pl.Plan) -> None:
    """A backward is marked as recomputed exactly if its forward is."""
    for rank in range(plan.pp):
        columns = plan.columns(rank)
        rows = zip(
            columns["kind"].tolist(),
            columns["stage"].tolist(),
            columns["microbatch"].tolist(),
            columns["piece"].tolist(),
            columns["recompute"].tolist(),
            strict=True,
        )
        forwards: dict[tuple[int, ...], bool] = {}
        for kind, *tensor, recompute in rows:
            if kind == pl.OpKind.F:
                forwards[tuple(tensor)] = recompute
            elif kind in (pl.OpKind.B, pl.OpKind.I):
                assert recompute == forwards[tuple(tensor)], f"rank {rank}: {tensor}"


def round_trips(plan: pl.Plan) -> None:
    """A plan survives a pickle; what is equal hashes alike."""
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan, "pickle"
    assert hash(copy) == hash(plan), "equal plans hash differently"
    assert repr(copy) == repr(plan), "pickle loses the name"
    assert "\n" not in repr(plan), "repr is one line"


def csv_round_trips(plan: pl.Plan) -> None:
    """A plan survives its CSV, except for the recompute mask, which a CSV can't carry."""
    for comms in {False, plan.style is not None}:
        again = pl.Plan.from_csv(plan.to_csv(None, comms=comms))
        for rank in range(plan.pp):
            ops = plan.ops(rank)
            if not comms:
                ops = [op for op in ops if "SEND" not in op and "RECV" not in op]
            assert again.ops(rank) == ops, f"rank {rank}, comms={comms}"


def lowers(plan: pl.Plan, style: str, prefetch: int = 1) -> None:
    """Transfers fit the compute order, which stays, and progress under what they promise."""
    lowered = plan.lower(style, prefetch=prefetch)
    before, after = reference.Schedule.of(plan), reference.Schedule.of(lowered)
    for rank in range(plan.pp):
        computed = [step for step in after.steps[rank] if step[0].computes]
        assert computed == before.steps[rank], f"rank {rank}: {style} changed the compute order"
    if not (style == "even_odd" and plan.schedule in ("1f1b", "interleaved_1f1b")):
        twin = reference.lower(before, style, prefetch=prefetch)
        same = _by_slot if style == "streams" else list
        for rank in range(plan.pp):
            ops, expected = same(after.steps[rank]), same(twin.steps[rank])
            assert ops == expected, f"rank {rank}: {ops} is not the reference's {expected}"
    has_backward = any(op.kind in "BI" for _, _, op in before.walk())
    found = reference.faults(after, forward_only=not has_backward)
    assert not found, f"{style}: {found}"
    for semantics in lowered.semantics:
        stuck = reference.stuck(after, semantics)
        assert not stuck, f"{style} promises {semantics}, but is stuck at {stuck}"
    lowered.check()


def _by_slot(steps: list[reference.Step]) -> list[reference.Step]:
    """The steps with neighbouring receives sorted: between channels their order means nothing."""
    runs = groupby(steps, key=lambda step: step[0].kind.startswith("RECV"))
    return [step for received, run in runs for step in (sorted(run) if received else run)]


def verdict_agrees(mutation: Mutation) -> None:
    """A broken plan is refused, and a whole one read, exactly as the reference says.

    A CSV does not name replicas: the plan that was edited must have one.
    """
    refusal = _refusal(lambda: pl.Plan.from_csv(mutation.to_csv()))
    if refusal is not None:
        assert _why_broken(mutation.schedule), f"{mutation.name}: a whole plan: {refusal}"
        return
    plan = pl.Plan.from_csv(mutation.to_csv())
    # Two halves of a model that never meet may read as two replicas: judge what was read.
    broken = _why_broken(reference.Schedule.of(plan), as_read=plan.num_replicas == 1)
    assert not broken, f"{mutation.name}: a broken plan was read: {broken}"
    for rank in range(plan.pp):
        ops = mutation.schedule.ops(rank)
        assert plan.ops(rank) == ops, f"rank {rank} was read differently"
    progress_agrees(plan)


def _why_broken(schedule: reference.Schedule, *, as_read: bool = True) -> object:
    """What is wrong with orders; with `as_read` they alone say how many stages there are."""
    try:
        if as_read:
            schedule = reference.Schedule.read(schedule.steps)
    except ValueError as error:
        return error
    forward_only = all(op.kind not in "BIW" for _, _, op in schedule.walk())
    return reference.faults(schedule, forward_only=forward_only) or reference.stuck(schedule)


def progress_agrees(plan: pl.Plan) -> None:
    """The checker says of each semantics what the reference says."""
    schedule = reference.Schedule.of(plan)
    progress = plan.check("all").progress
    for semantics, progresses in progress.items():
        if progresses is None:  # it is about transfers, and the plan has none
            assert plan.style is None, f"{semantics}: no verdict on a lowered plan"
            continue
        stuck = reference.stuck(schedule, semantics)
        assert progresses == (not stuck), f"{semantics}: {progresses}, but stuck at {stuck}"


def times_agree(plan: pl.Plan, costs: dict[str, Any]) -> None:
    """Start, end, makespan, span and peak memory are the reference's; never below the bound."""
    schedule = reference.Schedule.of(plan)
    expected = reference.simulate(schedule, **costs)
    timeline = plan.simulate(pl.Costs(**costs))
    assert timeline.makespan == expected.makespan, f"{timeline.makespan} {expected.makespan}"
    assert timeline.span == expected.span, f"{timeline.span} {expected.span}"
    assert timeline.lower_bound <= timeline.makespan, "below the lower bound"
    for rank in range(plan.pp):
        lengths = [len(step) for step in schedule.steps[rank]]
        for name, mine in (("start", expected.start), ("end", expected.end)):
            rows = [t for t, n in zip(mine[rank], lengths, strict=True) for _ in range(n)]
            theirs = getattr(timeline, name)(rank).tolist()
            assert theirs == rows, f"rank {rank}: {name} {theirs} is not {rows}"
        peak, peak_memory = timeline.peak_memory(rank), expected.peak_memory[rank]
        assert peak == peak_memory, f"rank {rank}: peak {peak} is not {peak_memory}"


def dearer_is_later(plan: pl.Plan, costs: dict[str, Any], name: str) -> None:
    """A higher cost never makes a step end earlier."""
    dearer = dict(costs)
    dearer[name] = _one_more(costs[name])
    before, after = (plan.simulate(pl.Costs(**c)).makespan for c in (costs, dearer))
    assert after >= before, f"one more {name}: {before} became {after}"


def _one_more(cost: Any) -> Any:
    return [_one_more(each) for each in cost] if isinstance(cost, list) else cost + 1
