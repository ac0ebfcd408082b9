"""Plans against the slow twin: every small configuration, op for op."""

import itertools

import pytest

import pipeloom as pl
from pipeloom import reference
from pipeloom.testing import invariants

NAMES = [row.name for row in pl.schedules()]


def arguments_of(row, pp, m):
    """Every set of optional arguments of a family, for small shapes."""
    chunks = [None] if row.vp is not None else [1, 2, 3]
    options = {
        "microbatch_group_size": [None, *range(1, m + 1)],
        "extra_warmup": [None, 1],
        "reverse_backward": [None, False, True],
        "forward_only": [None, True],
        "num_seq_pieces": [None, 2],
        "num_microbatches_with_partial_activation_checkpoints": [None, 1],
    }
    used = [name for name in options if name in row.arguments]
    for vp, *values in itertools.product(chunks, *(options[name] for name in used)):
        given = dict(zip(["vp", *used], [vp, *values], strict=True))
        chosen = {name: value for name, value in given.items() if value is not None}
        yield {"schedule": row.name, "pp": pp, "num_microbatches": m, **chosen}


def test_every_family_has_a_twin():
    assert sorted(reference.FAMILIES) == sorted(NAMES)


@pytest.mark.parametrize("style", ["fifo", "batched", "even_odd", "streams"])
@pytest.mark.parametrize("name", NAMES)
def test_transfers_of_small_plans(name, style):
    row = next(row for row in pl.schedules() if row.name == name)
    lowered = 0
    for pp, m in itertools.product(range(1, 5), range(1, 5)):
        for arguments in arguments_of(row, pp, m):
            try:
                plan = pl.plan(**arguments)
            except pl.ConfigError:
                continue
            lowered += 1
            invariants.lowers(plan, style)
    assert lowered > 0


@pytest.mark.parametrize("name", NAMES)
def test_exhaustive_small(name):
    row = next(row for row in pl.schedules() if row.name == name)
    planned = 0
    for pp, m in itertools.product(range(1, 4), range(1, 5)):
        for arguments in arguments_of(row, pp, m):
            invariants.refuses_what_deadlocks(arguments)
            try:
                plan = pl.plan(**arguments)
            except pl.ConfigError:
                continue
            planned += 1
            invariants.is_sound(arguments)
            invariants.equals_twin(arguments)
            invariants.random_access_agrees(plan)
            invariants.marks_agree(plan)
    assert planned > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "m"), [(4, 8), (5, 13), (8, 16)])
def test_middle_sizes(name, pp, m):
    row = next(row for row in pl.schedules() if row.name == name)
    vp = None if row.vp is not None else 2
    pp = 1 if name == "no_pipelining" else pp
    arguments = {"schedule": name, "pp": pp, "vp": vp, "num_microbatches": m}
    try:
        pl.plan(**arguments)
    except pl.ConfigError:
        pytest.skip(f"{name} does not take pp={pp}, m={m}")
    invariants.is_sound(arguments)
    invariants.equals_twin(arguments)


def group_sizes(pp, vp, m, extra=0):
    """The group sizes that progress, by running each."""
    for group in range(1, m + 1):
        twin = reference.schedule(
            "interleaved_1f1b",
            pp=pp,
            vp=vp,
            num_microbatches=m,
            microbatch_group_size=group,
            extra_warmup=extra,
        )
        if not reference.stuck(twin):
            yield group, twin


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5])
def test_group_size_is_refused_exactly_if_it_deadlocks(pp, extra, refused):
    for vp, m in itertools.product(range(1, 5), range(1, 11)):
        legal = {group for group, _ in group_sizes(pp, vp, m, extra)}
        for group in range(1, m + 1):

            def plan(vp=vp, m=m, group=group):
                return pl.plan(
                    "interleaved_1f1b",
                    pp=pp,
                    vp=vp,
                    num_microbatches=m,
                    microbatch_group_size=group,
                    extra_warmup=extra,
                )

            if group in legal:
                assert plan().microbatch_group_size == group
            else:
                refused(pl.ConfigError, plan, f"microbatch_group_size={group} would deadlock")


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_default_group_size_has_the_smallest_makespan(pp, backward):
    for vp, m in itertools.product(range(2, 4), range(1, 10)):
        times = {
            group: reference.simulate(twin, backward=backward).makespan
            for group, twin in group_sizes(pp, vp, m)
        }
        chosen = pl.plan("interleaved_1f1b", pp=pp, vp=vp, num_microbatches=m).microbatch_group_size
        assert chosen == reference.default_group(pp, m)
        assert times[chosen] == min(times.values()), (vp, m, times)


def test_twin_sees_a_deadlock():
    """The twin is a judge: it must see the textbook faults."""
    f0, f1, b0, b1 = (reference.Op(s, k, 0) for k in "FB" for s in (0, 1))
    whole = reference.Schedule([[(f0,), (b0,)], [(f1,), (b1,)]], [0, 1], 1)
    assert not reference.faults(whole)
    assert not reference.stuck(whole)
    reordered = whole.with_steps([[(b0,), (f0,)], [(f1,), (b1,)]])
    assert reference.stuck(reordered) == [(0, 0), (1, 0)]
    assert reference.faults(reordered)
    lost = whole.with_steps([[(f0,), (b0,)], [(f1,)]])
    assert reference.faults(lost) == ["stage 1 unit 0 runs F 1, B 0, I 0, W 0 times"]


def test_twin_knows_what_blocking_calls_do():
    """1F1B's transfers one by one: a queue a channel does, anything stricter is stuck."""
    lowered = reference.lower(reference.schedule("1f1b", pp=2, num_microbatches=3))
    semantics = ("buffered", "streams", "single_stream", "batched", "rendezvous")
    stuck = {name for name in semantics if reference.stuck(lowered, name)}
    assert stuck == {"single_stream", "batched", "rendezvous"}
