"""All ranks in one process: equal to the unpipelined model, whatever the plan."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime import (
    BoundaryError,
    LocalTransport,
    Pipeline,
    PipelineError,
    place_chunks,
    split_batch,
)

MASK = "num_microbatches_with_partial_activation_checkpoints"


@pytest.mark.parametrize("kept", [None, 0, 1])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("vp", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_loss_is_bitwise_that_of_the_unpipelined_model(tools, pp, vp, m, kept):
    plan = tools.plan(pp, vp, m, **({} if kept is None else {MASK: kept}))
    stages, reference = tools.pair(pp * vp)
    inputs, targets = tools.make_data([3] * m)
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, reference)


@pytest.mark.parametrize("schedule", ["gpipe", "eager_1f1b", "looped_bfs"])
def test_other_schedules(tools, schedule):
    vp = 2 if schedule == "looped_bfs" else 1
    plan = pl.plan(schedule, pp=3, vp=vp, num_microbatches=4)
    stages, reference = tools.pair(3 * vp)
    inputs, targets = tools.make_data([2, 2, 2, 2])
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, reference)


@pytest.mark.parametrize("m", [4, 7])
@pytest.mark.parametrize(
    ("schedule", "pp", "vp"),
    [
        ("zb_h1", 3, 1),
        ("zb_h2", 2, 1),
        ("interleaved_zb", 2, 2),
        ("zb_v", 2, 2),
        ("dualpipe_v", 2, 2),
    ],
)
def test_schedules_with_split_backwards(tools, schedule, pp, vp, m):
    plan = pl.plan(schedule, pp=pp, num_microbatches=m, vp=vp)
    assert any("W" in op for op in plan.ops(0))
    stages, reference = tools.pair(pp * vp)
    inputs, targets = tools.make_data([2] * m)
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, reference)


def test_two_replicas_in_opposite_directions(tools):
    """In one process both replicas may be the same modules: gradients add up by themselves."""
    plan = pl.plan("dualpipe", pp=2, num_microbatches=8)
    stages, reference = tools.pair(plan.num_stages // 2)
    inputs, targets = tools.make_data([2] * 8)
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(plan, [*stages, *stages], tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, reference)


@pytest.mark.parametrize("seed", range(5))
def test_delivery_order_changes_nothing(tools, seed):
    plan = tools.plan(2, 2, 5)
    stages, shuffled = tools.pair(4)
    inputs, targets = tools.make_data([3] * 5)
    plain = Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    transport = LocalTransport(2, seed=seed)
    other = Pipeline(plan, shuffled, tools.square_sum, transport=transport).step(inputs, targets)
    assert torch.equal(plain.loss, other.loss)
    for mine, theirs in zip(stages, shuffled, strict=True):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_microbatches_of_different_sizes_are_weighted_by_size(tools):
    plan = tools.plan(2, 2, 4)
    stages, reference = tools.pair(4)
    inputs, targets = tools.make_data([7, 5, 3, 9])
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, reference)
    whole = copy.deepcopy(reference)
    for stage in whole:
        stage.zero_grad()
    tools.run_reference(whole, [torch.cat(inputs)], [torch.cat(targets)])
    tools.assert_same_gradients(stages, whole, bound=1e-5)


def test_batch_of_eight_in_three_microbatches(tools):
    (batch,), (goal,) = tools.make_data([8])
    stages, reference = tools.pair(3)
    expected = tools.run_reference(
        reference, torch.tensor_split(batch, 3), torch.tensor_split(goal, 3)
    )
    pipeline = Pipeline(tools.plan(3, 1, 3), stages, tools.square_sum)
    assert torch.equal(pipeline.step(batch, goal).loss, expected)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_gradient_does_not_depend_on_the_number_of_microbatches(tools, m):
    (batch,), (goal,) = tools.make_data([8])
    stages, reference = tools.pair(2)
    tools.run_reference(reference, [batch], [goal])
    Pipeline(tools.plan(2, 1, m), stages, tools.square_sum).step(batch, goal)
    tools.assert_same_gradients(stages, reference, bound=1e-5)


def test_steps_accumulate(tools):
    plan = tools.plan(2, 1, 3)
    stages, reference = tools.pair(2)
    pipeline = Pipeline(plan, stages, tools.square_sum)
    for seed in range(3):
        inputs, targets = tools.make_data([2, 2 + seed, 2], seed)
        tools.run_reference(reference, inputs, targets)
        pipeline.step(inputs, targets)
    tools.assert_same_gradients(stages, reference)


def test_recompute_runs_exactly_the_masked_forwards_again(tools):
    plan = tools.plan(2, 2, 4, **{MASK: 2})
    stages = tools.make_stages(4)
    inputs, targets = tools.make_data([2] * 4)
    Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    for rank in range(2):
        masked = int(plan.recompute_mask(rank).sum())
        assert 0 < masked < 8
        assert stages[rank].calls + stages[rank + 2].calls == 8 + masked


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_recompute_with_split_backwards_runs_each_forward_once_more(tools, schedule):
    vp = 1 if schedule == "zb_h1" else 2
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4, **{MASK: 1})
    stages, reference = tools.pair(2 * vp)
    inputs, targets = tools.make_data([2] * 4)
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, reference)
    masked = sum(int(plan.recompute_mask(rank).sum()) for rank in range(2))
    assert 0 < masked < 8 * vp
    assert sum(stage.calls for stage in stages) == 8 * vp + masked


def test_evaluation_leaves_training_alone(tools):
    plan = tools.plan(2, 2, 4)
    stages, reference = tools.pair(4)
    pipeline = Pipeline(plan, stages, tools.square_sum)
    inputs, targets = tools.make_data([2] * 4)
    more_inputs, more_targets = tools.make_data([3] * 6, seed=5)
    same = pipeline.evaluate(inputs, targets)
    other = pipeline.evaluate(more_inputs, more_targets, num_microbatches=6)
    assert all(p.grad is None for stage in stages for p in stage.parameters())
    first = pipeline.step(inputs, targets)
    assert torch.equal(first.loss, same.loss)
    assert torch.equal(first.loss, tools.run_reference(reference, inputs, targets))
    tools.assert_same_gradients(stages, reference)
    assert torch.equal(other.loss, tools.run_reference(reference, more_inputs, more_targets))


def test_outputs_of_an_evaluation_without_targets(tools):
    stages = tools.make_stages(2)
    inputs, _ = tools.make_data([2, 3])
    result = Pipeline(tools.plan(2, 1, 2), stages, tools.square_sum).evaluate(
        inputs, keep_outputs=True
    )
    assert result.loss is None
    for x, output in zip(inputs, result.outputs, strict=True):
        assert torch.equal(stages[1](stages[0](x)), output)


def test_stages_of_different_widths():
    torch.manual_seed(0)
    stages = [nn.Linear(4, 9), nn.Sequential(nn.ReLU(), nn.Linear(9, 2))]
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    plan = pl.plan("1f1b", pp=2, num_microbatches=3)
    pipeline = Pipeline(plan, stages, lambda o, t: (o - t).square().sum())
    result = pipeline.step(x, y)
    truth = copy.deepcopy(stages)
    for stage in truth:
        stage.zero_grad()
    loss = (truth[1](truth[0](x)) - y).square().mean()
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(stages[0].weight.grad, truth[0].weight.grad)


def test_frozen_first_stage_and_unused_input(tools):
    class Deaf(tools.Block):
        def forward(self, x):
            return super().forward(torch.ones_like(x))

    stages = [tools.Block(), Deaf(), tools.Block()]
    stages[0].requires_grad_(False)
    inputs, targets = tools.make_data([2, 2])
    Pipeline(tools.plan(3, 1, 2), stages, tools.square_sum).step(inputs, targets)
    assert stages[0].linear.weight.grad is None
    assert stages[1].linear.weight.grad is not None


def test_identity_stage(tools):
    stages, reference = [tools.Block(), nn.Identity(), tools.Block()], None
    reference = copy.deepcopy(stages)
    inputs, targets = tools.make_data([2, 2])
    expected = tools.run_reference(reference, inputs, targets)
    result = Pipeline(tools.plan(3, 1, 2), stages, tools.square_sum).step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients([stages[0], stages[2]], [reference[0], reference[2]])


def test_chunk_gradients_are_ready_after_the_last_scheduled_backward(tools):
    plan = tools.plan(2, 2, 4)
    stages = tools.make_stages(4)
    inputs, targets = tools.make_data([2] * 4)
    seen = {}
    places = [tuple(place) for place in plan.stages]

    def ready(rank, chunk):
        weight = stages[places.index((rank, chunk))].linear.weight
        seen[rank, chunk] = weight.grad.clone()

    Pipeline(plan, stages, tools.square_sum).step(inputs, targets, on_gradients_ready=ready)
    assert sorted(seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for place, gradient in seen.items():
        assert torch.equal(gradient, stages[places.index(place)].linear.weight.grad)


def test_activations_are_freed_at_their_backward(tools):
    """1F1B holds pp - r microbatches on rank r, whatever m is."""
    live = {0: [0, 0], 1: [0, 0], 2: [0, 0]}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            ctx.rank = rank
            live[rank][0] += 1
            live[rank][1] = max(live[rank])
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            live[ctx.rank][0] -= 1
            return gradient, None

    class Counting(tools.Block):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def forward(self, x):
            return Counted.apply(super().forward(x), self.rank)

    inputs, targets = tools.make_data([1] * 9)
    Pipeline(tools.plan(3, 1, 9), [Counting(r) for r in range(3)], tools.square_sum).step(
        inputs, targets
    )
    assert {rank: peak for rank, (_, peak) in live.items()} == {0: 3, 1: 2, 2: 1}


def test_events_are_the_plans_compute_ops(tools):
    plan = tools.plan(2, 2, 4)
    inputs, targets = tools.make_data([2] * 4)
    pipeline = Pipeline(plan, tools.make_stages(4), tools.square_sum)
    result = pipeline.step(inputs, targets, record=True)
    for rank in range(2):
        mine = [event for event in result.events if event.rank == rank]
        assert [event.op for event in mine] == plan.ops(rank)
        assert all(event.start <= event.end for event in mine)
    assert 0.0 <= result.bubble_ratio() < 1.0
    assert pipeline.step(inputs, targets).events == []


def test_wrong_boundary_is_named(tools):
    inputs, targets = tools.make_data([2, 3])
    pipeline = Pipeline(
        tools.plan(2, 1, 2), tools.make_stages(2), tools.square_sum, boundary_shape=(2, tools.width)
    )
    with pytest.raises(BoundaryError, match=r"rank 0, 0F1: .*\(3, 6\).*\(2, 6\)(.|\n)*hint:"):
        pipeline.step(inputs, targets)
    ragged = Pipeline(
        tools.plan(2, 1, 2),
        tools.make_stages(2),
        tools.square_sum,
        boundary_shape=[(2, tools.width), (3, tools.width)],
    )
    assert ragged.step(inputs, targets).loss is not None
    with pytest.raises(BoundaryError, match="1 entries for 2 microbatches"):
        Pipeline(
            tools.plan(2, 1, 2), tools.make_stages(2), tools.square_sum, boundary_shape=[(2, 6)]
        ).step(inputs, targets)


def test_integer_boundary_is_refused(tools):
    class Ints(nn.Module):
        def forward(self, x):
            return x.long()

    inputs, targets = tools.make_data([2, 2])
    pipeline = Pipeline(tools.plan(2, 1, 2), [Ints(), tools.Block()], tools.square_sum)
    with pytest.raises(BoundaryError, match=r"0F0.*torch.int64.*floating-point"):
        pipeline.step(inputs, targets)


def test_bad_arguments_are_named(tools):
    plan = tools.plan(2, 1, 2)
    inputs, targets = tools.make_data([2, 2])
    with pytest.raises(PipelineError, match="3 modules, but the plan has 2 stages"):
        Pipeline(plan, tools.make_stages(3), tools.square_sum)
    with pytest.raises(PipelineError, match="rank 1 has 0 chunks, but the plan gives it 1"):
        place_chunks(plan, [0, 1], {0: tools.make_stages(1)})
    with pytest.raises(PipelineError, match="the transport has 3 ranks"):
        Pipeline(plan, tools.make_stages(2), tools.square_sum, transport=LocalTransport(3))
    pipeline = Pipeline(plan, tools.make_stages(2), tools.square_sum)
    with pytest.raises(PipelineError, match="targets is missing"):
        pipeline.step(inputs)
    with pytest.raises(PipelineError, match="batch is missing"):
        pipeline.step(targets=targets)
    with pytest.raises(PipelineError, match="3 microbatches, but the plan has 2"):
        pipeline.step([*inputs, inputs[0]], targets)
    with pytest.raises(PipelineError, match="1 samples for 2 microbatches"):
        split_batch(torch.ones(1, 3), 2)
    with torch.no_grad(), pytest.raises(PipelineError, match="needs gradients"):
        pipeline.step(inputs, targets)


def test_a_step_that_failed_does_not_spoil_the_next(tools):
    class Fragile(tools.Block):
        broken = True

        def forward(self, x):
            if self.broken and self.calls == 2:
                raise ZeroDivisionError("chunk failed")
            return super().forward(x)

    torch.manual_seed(0)
    stages = [tools.Block(), Fragile()]
    inputs, targets = tools.make_data([2] * 3)
    pipeline = Pipeline(tools.plan(2, 1, 3), stages, tools.square_sum)
    with pytest.raises(ZeroDivisionError):
        pipeline.step(inputs, targets)
    Fragile.broken = False
    reference = copy.deepcopy(stages)
    for stage in [*stages, *reference]:
        stage.zero_grad()
    expected = tools.run_reference(reference, inputs, targets)
    assert torch.equal(pipeline.step(inputs, targets).loss, expected)
    tools.assert_same_gradients(stages, reference)
