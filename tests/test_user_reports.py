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
    """Simulated, and by the slow twin from the plan's own orders: both say the same."""
    found = plan.simulate(pl.Costs(backward=backward, latency=latency))
    twin = reference.simulate(reference.Schedule.of(plan), backward=backward, latency=latency)
    assert found.makespan == twin.makespan
    assert memory_peaks(found) == twin.peak_memory
    return found


def memory_peaks(found):
    return [found.peak_memory(rank) for rank in range(found.plan.pp)]


def peaks(plan):
    return memory_peaks(timeline(plan))


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
    assert (one.makespan, memory_peaks(one)) == (24, [1] * 8)


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


def test_a_legal_number_of_microbatches_at_least():
    """verl-project/verl PR#1617, vllm-project/vime PR#119, NVIDIA-NeMo/RL PR#1126."""
    assert pl.legal_num_microbatches("interleaved_1f1b", pp=4, vp=2, at_least=7) == 7
    by_four = {"pp": 4, "vp": 2, "microbatch_group_size": 4}
    legal = [pl.legal_num_microbatches("interleaved_1f1b", at_least=m, **by_four) for m in (7, 9)]
    assert legal == [7, 9], "a short last group is no obstacle"
    assert pl.legal_num_microbatches("interleaved_1f1b", at_least=3, **by_four) == 4
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
    layout = pl.Layout.even(8, pp=4, vp=2, placement="v")
    assert [layout.post_process(rank, 1) for rank in range(4)] == [True, False, False, False]


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


def test_a_saved_layout_is_not_cut_at_another_pp(refused):
    """NVIDIA-NeMo/Megatron-Bridge PR#4992, PR#5800: two chunks of pp=1, or an error; never half."""
    layout = pl.Layout.from_string("Et|tL", pp=1)
    assert (layout.vp, layout.layers(0, 0), layout.layers(0, 1)) == (2, [1], [2])
    refused(pl.LayoutError, lambda: pl.Layout.from_string("Et|tL", pp=4), "2 stages", "pp=4")
    two = pl.Layout.from_string("Et|tL", pp=2)
    refused(
        pl.PlanError, lambda: pl.plan("1f1b", pp=4, num_microbatches=4, layout=two), "pp=2", "pp=4"
    )


def test_the_slowest_stage_sets_the_pace():
    """ai-dynamo/aiconfigurator PR#1459: 6.65 times as fast as one rank, not 8 times."""
    times = [3.153, *[3.150] * 6, 3.901]
    costs = pl.Costs(forward=times, backward=0)
    cycle = [pl.plan("1f1b", pp=8, num_microbatches=m).simulate(costs).makespan for m in (100, 101)]
    assert cycle[1] - cycle[0] == pytest.approx(3.901, rel=1e-6)
    assert sum(times) / (cycle[1] - cycle[0]) == pytest.approx(6.65, abs=0.01)
    even = pl.Layout.even(64, pp=6)
    heaviest = max(even.num_layers(rank) for rank in range(6))
    assert heaviest / (64 / 6) == pytest.approx(1.031, abs=1e-3)


def test_memory_of_uneven_stages_is_each_rank_s_own():
    """NVIDIA-NeMo/Megatron-Bridge PR#5077, sail-sg/zero-bubble-pipeline-parallelism#36.

    The most loaded rank is no mean, and on a V the first rank has both ends of the model.
    """
    layers = [1, 2, 2, 3]
    uneven = pl.plan("1f1b", pp=4, num_microbatches=8)
    held = pl.Costs(memory_forward=0, memory_backward_weight=0, static_memory=layers)
    assert memory_peaks(uneven.simulate(held)) == layers
    live = pl.Costs(memory_forward=layers, memory_backward_weight=[-n for n in layers])
    assert memory_peaks(uneven.simulate(live)) == [4, 6, 4, 3]
    v = pl.Layout.even(8, pp=4, vp=2, placement="v")
    ends = [
        [v.pre_process(rank, c) + v.post_process(rank, c) for c in range(2)] for rank in range(4)
    ]
    assert [sum(of_rank) for of_rank in ends] == [2, 0, 0, 0]


def test_recompute_turns_the_ranking_of_memory_round():
    """sail-sg/zero-bubble-pipeline-parallelism#74: with little left of activations, the head."""
    head = {"static_memory": [0, 0, 0, 6]}
    plain = pl.plan("1f1b", pp=4, num_microbatches=8)
    full = memory_peaks(
        plain.simulate(pl.Costs(memory_forward=4, memory_backward_weight=-4, **head))
    )
    assert full[0] == max(full)
    recomputed = pl.plan(
        "1f1b",
        pp=4,
        num_microbatches=8,
        num_microbatches_with_partial_activation_checkpoints=0,
    )
    costs = pl.Costs(memory_forward=4, memory_backward_weight=-4, memory_recompute=0.5, **head)
    little = memory_peaks(recomputed.simulate(costs))
    assert little[3] == max(little)
    assert little[0] < full[0]


def counts(layout):
    return [layout.num_layers(rank) for rank in range(layout.pp)]


def test_no_stage_of_a_balanced_split_is_empty():
    """deepspeedai/DeepSpeed PR#4312: 2, 2, 1, 0 has the same slowest stage."""
    assert counts(pl.Layout.balanced([1] * 5, pp=4)) == [2, 1, 1, 1]


def test_the_remainder_is_spread():
    """deepspeedai/DeepSpeed PR#4053: the last stage got 10 of 38.

    Oneflow-Inc/libai PR#225: 12 layers on 5 stages.
    """
    for layout in (pl.Layout.balanced([1] * 38, pp=8), pl.Layout.even(38, pp=8)):
        assert sorted(counts(layout)) == [4] * 2 + [5] * 6
    for layout in (pl.Layout.balanced([1] * 12, pp=5), pl.Layout.even(12, pp=5)):
        assert counts(layout) == [3, 3, 2, 2, 2]
    ends = {"embedding_cost": 1, "loss_cost": 1}
    assert counts(pl.Layout.balanced([1] * 6, pp=4, **ends)) == [1, 2, 2, 1]


def test_embedding_and_output_layer_weigh():
    """pytorch/torchtitan PR#1041, PR#1103, PR#1416; bigscience-workshop/Megatron-DeepSpeed#186.

    InfiniTensor/InfiniTrain PR#209: a layer of 10 stands alone, and is what limits the split.
    """
    layout = pl.Layout.balanced([1] * 3, pp=2, embedding_cost=2, loss_cost=2)
    assert (counts(layout), layout.load([1] * 3, embedding_cost=2, loss_cost=2).bottleneck) == (
        [2, 1],
        4,
    )
    weights = [0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0]
    assert pl.Layout.balanced(weights, pp=4).load(weights).stages == [2.0] * 4
    costs = [10, 1, 1, 1, 1, 1]
    layout = pl.Layout.balanced(costs, pp=3)
    load = layout.load(costs)
    assert (layout.layers(0), load.bottleneck, load.proved) == ([1], 10, True)
    assert "layer 1 alone is 10; no split does better" in load.why


def test_layers_that_share_are_not_parted(refused):
    """radixark/miles PR#1376: layers 1, 4, 7, 10 are sources of the two behind each."""
    shared = {layer: layer - (layer - 1) % 3 for layer in range(1, 13)}
    assert pl.Layout.even(12, pp=2).check(shared_layers=shared) == pl.Layout.even(12, pp=2)
    explicit = [
        pl.Layout.from_counts([4, 8]),
        pl.Layout.from_string("Et*4|t*8L", pp=2),
        pl.Layout.from_names([["E", *"tttt"], [*"tttttttt", "L"]], pp=2),
        pl.Layout.megatron(12, pp=2, num_layers_in_first_pipeline_stage=4),
    ]
    for layout in explicit:
        refused(
            pl.LayoutError,
            lambda layout=layout: layout.check(shared_layers=shared),
            "layer 5 shares with layer 4, but is on stage 1 (rank 1)",
            "its source on stage 0 (rank 0)",
        )
        refused(
            pl.LayoutError,
            lambda layout=layout: layout.check(no_cut_after=[1, 4]),
            "cuts after layer 4",
            "no_cut_after",
        )
    refused(pl.LayoutError, lambda: explicit[0].check(shared_layers={13: 1}), "13", "1 to 12")
    with pytest.raises(TypeError, match=r"shared_layers must be a dict(.|\n)*hint: "):
        explicit[0].check(shared_layers=[5])
    costs = [3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    for pp in (2, 3, 4):
        layout = pl.Layout.balanced(costs, pp=pp, shared_layers=shared)
        assert layout.check(shared_layers=shared) is layout
    refused(
        pl.LayoutError,
        lambda: pl.Layout.balanced(costs, pp=5, shared_layers=shared),
        "shared_layers leaves 4 blocks",
        "5 stages",
    )
    fifth = pl.Layout.balanced(costs, pp=5, shared_layers=shared, allow_empty=True)
    assert fifth.check(shared_layers=shared).num_layers_total == 12
    assert counts(pl.Layout.balanced(costs, pp=3, shared_layers=shared, loss_cost=1)) == [
        3,
        6,
        3,
    ]


def test_a_prime_number_of_layers():
    """AI-Hypercomputer/maxtext PR#1616."""
    layout = pl.Layout.even(58, pp=8)
    assert [layout.num_layers(rank) for rank in range(8)] == [8, 8, 7, 7, 7, 7, 7, 7]


def test_larger_microbatches_of_the_same_batch_make_a_larger_bubble():
    """ISEEKYAN/verl_megatron_practice#9: the number of microbatches falls."""
    bubbles = [
        pl.plan("1f1b", pp=4, num_microbatches=16 // size)
        .simulate(pl.Costs(forward=size, backward=2 * size))
        .bubble_ratio
        for size in (1, 2, 4)
    ]
    assert bubbles == sorted(bubbles)
    assert bubbles[0] == pytest.approx(3 / 19)


def test_embedding_ranks():
    """A63, Megatron-Bridge PR#5380, PR#4208: first, those with MTP, last only if tied."""
    layout = pl.Layout.from_string("E|(t|)*11m|m|m|L", pp=8)
    assert layout.embedding_ranks() == [0, 4, 5, 6]
    assert layout.embedding_ranks(tied=True) == [0, 4, 5, 6, 7]
