"""What users of other planners reported, with the values that they should have seen.

Each test names its threads. Times are in units of a chunk's forward; a backward takes two and
transfers none, unless a test says otherwise.
"""

import itertools
from fractions import Fraction

import pytest

import pipeloom as pl
from pipeloom import reference


def timeline(plan, *, backward=2, latency=0):
    """Simulated by the slow twin from the plan's own orders, so that tests need no second API."""
    return reference.simulate(reference.Schedule.of(plan), backward=backward, latency=latency)


def peaks(plan):
    return timeline(plan).peak_memory


def warmups(plan):
    return [plan.num_warmup(rank) for rank in range(plan.pp)]


def test_first_stage_holds_most_activations():
    """NVIDIA/Megatron-LM#307, IEIT-Yuan/Yuan-2.0#18."""
    assert peaks(pl.plan("1f1b", pp=4, num_microbatches=8)) == [4, 3, 2, 1]


@pytest.mark.parametrize("m", [4, 8, 16])
def test_memory_of_1f1b_does_not_grow_with_microbatches(m):
    """PKU-DAIR/Hetu-Galvatron#36: it does in GPipe."""
    assert peaks(pl.plan("1f1b", pp=2, num_microbatches=m)) == [2, 1]
    assert peaks(pl.plan("gpipe", pp=2, num_microbatches=m)) == [m, m]


def test_interleaved_warmup_has_a_factor_two():
    """NVIDIA/Megatron-LM#169; the bubble is that of AI-Hypercomputer/maxtext PR#1602 too."""
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8)
    assert warmups(plan) == [10, 8, 6, 4]
    assert peaks(plan) == [11, 9, 7, 5]
    makespan = timeline(plan).makespan
    assert makespan == 57
    busy = 3 * 2 * 8  # forward and backward, chunks, microbatches
    assert 1 - Fraction(busy, makespan) == Fraction(3, 19)


def with_warmup(plan, warmup):
    """The plan's own forwards and backwards with another warm-up."""
    steps = []
    for rank in range(plan.pp):
        ops = [op for step in reference.Schedule.of(plan).steps[rank] for op in step]
        f, b = ([op for op in ops if op.kind == kind] for kind in "FB")
        steps.append([(op,) for op in f[: warmup(rank)]])
        rest = itertools.zip_longest(f[warmup(rank) :], b)
        steps[rank] += [(op,) for pair in rest for op in pair if op is not None]
    return reference.Schedule.of(plan).with_steps(steps)


def test_the_shorter_warmup_that_was_asked_for_deadlocks():
    """NVIDIA/Megatron-LM#169: (pp - r - 1) vp."""
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8)
    assert reference.stuck(with_warmup(plan, lambda rank: (3 - rank) * 2))


def test_factor_one_hides_no_transfers():
    """NVIDIA/Megatron-LM#675: fewer activations, as fast without transfers, slower with them."""
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8)
    less = with_warmup(plan, lambda rank: 3 - rank + 4)
    assert not reference.stuck(less)
    free = reference.simulate(less, backward=2)
    assert (free.peak_memory, free.makespan) == ([8, 7, 6, 5], 57)
    assert reference.simulate(less, backward=2, latency=1).makespan == 87
    assert timeline(plan, latency=1).makespan == 71


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_fewer_microbatches_than_ranks(schedule):
    """pytorch/pytorch PR#144702, huggingface/nanotron#347, verl-project/verl#1004."""
    for m in range(1, 8):
        plan = pl.plan(schedule, pp=8, num_microbatches=m)
        assert not reference.stuck(reference.Schedule.of(plan))
    one = timeline(pl.plan("gpipe", pp=8, num_microbatches=1))
    assert (one.makespan, one.peak_memory) == (24, [1] * 8)


def test_warmup_is_capped_at_all_forwards():
    """pytorch/PiPPy PR#1081."""
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=4)
    assert warmups(plan) == [8, 8, 6, 4]
    assert timeline(plan).makespan == 33


def test_as_many_microbatches_as_ranks():
    """hpcaitech/ColossalAI PR#2156."""
    plan = pl.plan("1f1b", pp=4, num_microbatches=4)
    assert warmups(plan) == [3, 2, 1, 0]
    assert timeline(plan).makespan == 21


def test_interleaved_with_fewer_microbatches_than_ranks():
    """NVIDIA-NeMo/Speech#14288: pp=6, m=3 was refused."""
    plan = pl.plan("interleaved_1f1b", pp=6, vp=2, num_microbatches=3)
    assert plan.microbatch_group_size == 3
    assert timeline(plan).makespan == 42


def test_messages_name_the_argument_as_written(refused):
    """NVIDIA-NeMo/Speech#14288, huggingface/nanotron#347, HPDL-Group/Merak#4."""
    message = refused(
        pl.ConfigError,
        lambda: pl.plan(
            "interleaved_1f1b", pp=6, vp=2, num_microbatches=7, microbatch_group_size=3
        ),
        "microbatch_group_size=3",
        "pp=6",
        "vp=2",
        "num_microbatches=7",
    )
    assert "leave it out" in message
    refused(
        pl.ConfigError,
        lambda: pl.plan("dualpipe_v", pp=2, num_microbatches=1),
        "num_microbatches",
        "4",
    )


@pytest.mark.skipif(not hasattr(pl, "legal_num_microbatches"), reason="not bound yet")
def test_a_legal_number_of_microbatches_at_least():
    """verl-project/verl PR#1617, vllm-project/vime PR#119, NVIDIA-NeMo/RL PR#1126."""
    assert pl.legal_num_microbatches("interleaved_1f1b", pp=4, vp=2, at_least=7) == 7
    m = pl.legal_num_microbatches("dualpipe_v", pp=4, at_least=3)
    assert m == 8
    pl.plan("dualpipe_v", pp=4, num_microbatches=m)


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 1), (4, 8), (5, 3)])
def test_one_chunk_is_no_interleaving(pp, m):
    """NovaSky-AI/SkyRL PR#2079, hpcaitech/ColossalAI#796."""
    plan = pl.plan("interleaved_1f1b", pp=pp, vp=1, num_microbatches=m)
    assert plan == pl.plan("1f1b", pp=pp, num_microbatches=m)
    assert plan == pl.plan("1f1b", pp=pp, vp=1, num_microbatches=m)


def test_v_schedules_own_both_ends():
    """pytorch/torchtitan#774."""
    plan = pl.plan("zb_v", pp=4, num_microbatches=8)
    owned = [[s for s, (rank, _) in enumerate(plan.stages) if rank == r] for r in range(4)]
    assert owned == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize(("latency", "starts"), [(0, [0, 2, 4, 6]), (1, [0, 3, 6, 9])])
def test_the_first_forward_waits_for_nothing_else(latency, starts):
    """pytorch/pytorch#188833, sail-sg/zero-bubble-pipeline-parallelism#73."""
    plan = pl.plan("1f1b", pp=4, num_microbatches=8)
    schedule = reference.Schedule.of(plan)
    found = reference.simulate(schedule, forward=2, backward=4, latency=latency)
    assert [start[0] for start in found.start] == starts


def test_bubble_of_a_plain_pipeline():
    """AI-Hypercomputer/maxtext PR#1602: 3/11."""
    makespan = timeline(pl.plan("1f1b", pp=4, num_microbatches=8)).makespan
    assert 1 - Fraction(3 * 8, makespan) == Fraction(3, 11)


def test_bubbles_that_were_disputed():
    """deepseek-ai/DeepSeek-V3#211: F=1, B=2 (half of it W), a pair 3 - with 8 ranks."""

    def bubble(plan, work, **times):
        schedule = reference.Schedule.of(plan)
        return reference.simulate(schedule, **times).makespan - work

    m = 16
    one = pl.plan("1f1b", pp=8, num_microbatches=m)
    assert bubble(one, 3 * m, backward=2) == 7 * (1 + 2)
    two = pl.plan("interleaved_1f1b", pp=8, vp=2, num_microbatches=m)
    assert bubble(two, 2 * 3 * m, backward=2) == 7 * (1 + 2)  # in units of half a stage
    both = pl.plan("dualpipe", pp=8, num_microbatches=2 * m)
    assert bubble(both, 3 * 2 * m, overlapped=3) == 3 * (3 + 2 - 3 * 1)
    assert peaks(both) == [9] * 8
    assert both.num_replicas == 2, "twice the parameters"


def test_the_last_scheduled_backward_is_known():
    """huggingface/picotron PR#5: the last microbatch is the last in order, not by number."""
    plan = pl.plan("looped_bfs", pp=2, vp=2, num_microbatches=4)
    last = [op for op in plan.ops(0) if op.startswith("0B")][-1]
    assert last == "0B0"
    interleaved = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4)
    assert interleaved.ops(0)[-1] == "0B3"


def test_evaluation_has_a_plan_of_its_own():
    """deepspeedai/DeepSpeed#3649, pytorch/pytorch PR#157795: its own m, forwards only."""
    train = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=8)
    evaluate = pl.plan("forward_only", pp=2, vp=2, num_microbatches=3)
    assert {op[1] for rank in range(2) for op in evaluate.ops(rank)} == {"F"}
    assert evaluate.num_ops == 2 * 2 * 3
    assert train.num_ops == 2 * 2 * 8 * 2
