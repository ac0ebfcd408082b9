"""Gradient and shape faults that users reported of other pipelines, each by its number.

A35-A38 and A54-A67: what went wrong elsewhere is in each test's first line.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pipeloom as pl
from pipeloom.runtime import Pipeline, TiedWeight, clip_grad_norm, reduce_tied_gradients
from pipeloom.runtime.distributed import TorchTransport
from pipeloom.runtime.local import LocalTransport


def step(tools, plan, sizes, *, seed=1, loss_scale=None):
    """Stages after one step of the plan, and the reference's."""
    stages, reference = tools.pair(plan.num_stages)
    inputs, targets = tools.make_data(sizes, seed)
    tools.run_reference(reference, inputs, targets)
    Pipeline(plan, stages, tools.square_sum).step(inputs, targets, loss_scale=loss_scale)
    return stages, reference


def test_a35_next_and_previous_rank_are_one_and_lengths_differ(tools):
    """Shapes of forward and backward were swapped between two ranks with two chunks each."""
    for schedule in ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zb_v", "hanayo"):
        plan = pl.plan(schedule, pp=2, vp=2, num_microbatches=4)
        tools.assert_same_gradients(*step(tools, plan, [7, 5, 3, 9]))


def test_a37_lengths_change_from_step_to_step(tools):
    """Buffers had the first batch's size: crash, or silent truncation."""
    plan = tools.plan(2, 2, 4)
    stages, reference = tools.pair(4)
    pipeline = Pipeline(plan, stages, tools.square_sum)
    for sizes in ([7, 5, 3, 9], [1, 12, 2, 2], [9, 9, 9, 9]):
        inputs, targets = tools.make_data(sizes)
        loss = pipeline.step(inputs, targets).loss
        assert torch.equal(loss, tools.run_reference(reference, inputs, targets))
    tools.assert_same_gradients(stages, reference)


@pytest.mark.dist
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
def test_a38_eight_samples_in_three_microbatches(tools, launch, sockets):
    """Stages behind the first assumed 3, 3, 3 for a batch cut into 3, 3, 2."""
    (batch,), (goal,) = tools.make_data([8])
    reference = tools.make_stages(3)
    parts = [torch.tensor_split(value, 3) for value in (batch, goal)]
    assert [len(part) for part in parts[0]] == [3, 3, 2]
    expected = tools.run_reference(reference, *parts)
    plan = tools.plan(3, 1, 3)

    def body(transport):
        pipeline = Pipeline(plan, tools.make_stages(3), tools.square_sum, transport=transport)
        loss = pipeline.step(batch, goal).loss
        return loss, [p.grad for p in pipeline.parameters()]

    outcomes = launch.values(launch(3, body, sockets=sockets))
    assert torch.equal(outcomes[2][0], expected)
    for (_, gradients), stage in zip(outcomes, reference, strict=True):
        for mine, p in zip(gradients, stage.parameters(), strict=True):
            bound = 1e-6 * float(p.grad.abs().max())
            torch.testing.assert_close(mine, p.grad, rtol=0, atol=bound)


def test_a55_each_microbatch_has_its_own_loss(tools):
    """All backwards used the last forward's loss where forwards come first."""
    plan = pl.plan("gpipe", pp=2, num_microbatches=4)
    stages, reference = step(tools, plan, [1, 2, 3, 4])
    tools.assert_same_gradients(stages, reference)
    last = copy.deepcopy(reference)
    for stage in last:
        stage.zero_grad()
    inputs, targets = tools.make_data([1, 2, 3, 4])
    tools.run_reference(last, inputs[3:] * 4, targets[3:] * 4)
    with pytest.raises(AssertionError):  # the fault would show here
        tools.assert_same_gradients(stages, last, bound=1e-3)


def test_a56_gradients_are_those_of_the_mean_whatever_the_sum(tools):
    """The loss was a sum, divided only where it was printed: gradients T times too large."""
    (batch,), (goal,) = tools.make_data([8])
    stages, reference = tools.pair(2)
    Pipeline(tools.plan(2, 1, 4), stages, tools.square_sum).step(batch, goal)
    nn.functional.mse_loss(reference[1](reference[0](batch)), goal).backward()
    tools.assert_same_gradients(stages, reference, bound=1e-5)


def test_a57_gradient_norm_does_not_depend_on_m(tools):
    """The schedule divided by m once more: the norm shrank with the number of microbatches."""
    (batch,), (goal,) = tools.make_data([8])
    norms = []
    for m in (1, 2, 4, 8):
        pipeline = Pipeline(tools.plan(2, 1, m), tools.make_stages(2), tools.square_sum)
        pipeline.step(batch, goal)
        norms.append(float(pipeline.clip_grad_norm(1e9)))
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-5)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
def test_a58_both_halves_are_scaled(tools, schedule):
    """Only the input half was scaled: weight gradients were off by the factor."""
    split, whole = (pl.plan(name, pp=3, num_microbatches=5) for name in (schedule, "1f1b"))
    halves, _ = step(tools, split, [2] * 5, loss_scale=128.0)
    full, _ = step(tools, whole, [2] * 5, loss_scale=128.0)
    tools.assert_same_gradients(halves, full)


def test_a59_accumulation_over_steps_with_changing_lengths(tools):
    """A new shape made the stages anew, which cleared gradients: only the last step trained."""
    stages, reference = tools.pair(4)
    pipeline = Pipeline(
        pl.plan("interleaved_zb", pp=2, vp=2, num_microbatches=3), stages, tools.square_sum
    )
    for seed, sizes in enumerate(([2, 3, 2], [5, 5, 5], [1, 9, 4])):
        inputs, targets = tools.make_data(sizes, seed)
        pipeline.step(inputs, targets)
        tools.run_reference(reference, inputs, targets)
    tools.assert_same_gradients(stages, reference)


def test_a60_norms_of_3_and_4_clip_by_5():
    """Each stage clipped by its own norm."""
    a, b, tied = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    a.grad, b.grad, tied.grad = torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([12.0])
    transport = LocalTransport(2)
    assert float(clip_grad_norm({0: [a], 1: [b]}, 10.0, transport)) == 5.0
    shared = [TiedWeight({0: tied, 1: tied}, [0, 1])]
    norm = clip_grad_norm({0: [a, tied], 1: [b, tied]}, 1.0, transport, tied=shared)
    assert float(norm) == 13.0
    torch.testing.assert_close(tied.grad, torch.tensor([12.0 / 13.0]))


@pytest.mark.dist
def test_a61_a_stage_without_parameters_joins_reductions(tools, launch):
    """A stage with nothing to optimise did not call the reduction: the others hung."""
    plan = tools.plan(3, 1, 3)
    reference = [tools.Block(), nn.Tanh(), tools.Block()]
    inputs, targets = tools.make_data([2] * 3)

    def body(transport):
        stages = copy.deepcopy(reference)
        pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
        loss = pipeline.step(inputs, targets).loss
        return loss, float(pipeline.clip_grad_norm(1e9))

    outcomes = launch.values(launch(3, body))
    expected = tools.run_reference(reference, inputs, targets)
    norm = torch.stack([p.grad.norm() for stage in reference for p in stage.parameters()]).norm()
    assert torch.equal(outcomes[2][0], expected)
    assert [mine for _, mine in outcomes] == pytest.approx([float(norm)] * 3, rel=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a62_frozen_parameters_and_a_frozen_tied_weight(tools, schedule):
    """A tied layer that was frozen had no gradient: the reduction failed."""
    stages, reference = tools.pair(3)
    for model in (stages, reference):
        model[0].requires_grad_(False)
        model[1].linear.weight.requires_grad_(False)
    inputs, targets = tools.make_data([2] * 4)
    expected = tools.run_reference(reference, inputs, targets)
    plan = pl.plan(schedule, pp=3, num_microbatches=4)
    pipeline = Pipeline(plan, stages, tools.square_sum)
    assert torch.equal(pipeline.step(inputs, targets).loss, expected)
    assert stages[0].linear.weight.grad is None
    assert stages[1].linear.weight.grad is None
    assert torch.equal(stages[1].linear.bias.grad, reference[1].linear.bias.grad)
    tools.assert_same_gradients(stages[2:], reference[2:])
    tied = TiedWeight({0: stages[0].linear.weight, 2: stages[2].linear.weight}, [0, 2])
    before = stages[2].linear.weight.grad.clone()
    reduce_tied_gradients([tied], pipeline.transport)
    assert torch.equal(stages[2].linear.weight.grad, before)
    assert stages[0].linear.weight.grad is None


@pytest.mark.parametrize(
    ("schedule", "vp"),
    [("zb_h1", 1), ("interleaved_zb", 2), ("zb_v", 2), ("looped_bfs", 2), ("dualpipe_v", 2)],
)
def test_a64_a65_reduction_starts_after_the_last_scheduled_backward(tools, schedule, vp):
    """It started at the last microbatch's number, or before a deferred weight half: gradients
    were lost."""
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4)
    stages = tools.make_stages(2 * vp)
    places = list(plan.stages)
    seen = {}

    def ready(rank, chunk):
        stage = stages[places.index((rank, chunk))]
        seen[rank, chunk] = [p.grad.clone() for p in stage.parameters()]

    inputs, targets = tools.make_data([2] * 4)
    Pipeline(plan, stages, tools.square_sum).step(inputs, targets, on_gradients_ready=ready)
    assert sorted(seen) == sorted(places)
    for place, gradients in seen.items():
        for early, p in zip(gradients, stages[places.index(place)].parameters(), strict=True):
            assert torch.equal(early, p.grad)


class Tokens(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.embedding(x, self.weight)


class Logits(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.T


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_tied_embedding_over_processes(tools, launch, schedule):
    """The first and the last rank end with the gradient of the one weight."""
    torch.manual_seed(0)
    true = nn.Parameter(torch.randn(11, 6))
    middle = tools.Block()
    tokens = [torch.randint(0, 11, (2, 4)) for _ in range(4)]
    goals = [torch.randn(2, 4, 11) for _ in range(4)]
    plan = pl.plan(schedule, pp=3, num_microbatches=4)

    def body(transport):
        own = nn.Parameter(true.detach().clone())
        stages = [Tokens(own), copy.deepcopy(middle), Logits(own)]
        pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
        pipeline.step(tokens, goals)
        tied = [TiedWeight({transport.rank: own}, [0, 2])] if transport.rank != 1 else []
        reduce_tied_gradients(tied, transport)
        return own.grad, float(pipeline.clip_grad_norm(1e9, tied=tied))

    outcomes = launch.values(launch(3, body))
    tools.run_reference([Tokens(true), middle, Logits(true)], tokens, goals)
    bound = 1e-6 * float(true.grad.abs().max())
    for rank in (0, 2):
        torch.testing.assert_close(outcomes[rank][0], true.grad, rtol=0, atol=bound)
    norm = torch.stack([p.grad.norm() for p in (true, *middle.parameters())]).norm()
    assert [mine for _, mine in outcomes] == pytest.approx([float(norm)] * 3, rel=1e-5)


class Autocast(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.block.linear(x).tanh()


@pytest.mark.parametrize(("schedule", "vp"), [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)])
def test_autocast_to_bfloat16_keeps_gradients_in_float32(tools, schedule, vp):
    blocks, others = tools.pair(2 * vp)
    stages = [Autocast(block) for block in blocks]
    reference = [Autocast(block) for block in others]
    loss_fn = lambda output, target: tools.square_sum(output.float(), target)  # noqa: E731
    inputs, targets = tools.make_data([3] * 4)
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4)
    result = Pipeline(plan, stages, loss_fn).step(inputs, targets)
    assert torch.equal(result.loss, tools.run_reference(reference, inputs, targets, loss_fn))
    assert {p.grad.dtype for stage in stages for p in stage.parameters()} == {torch.float32}
    tools.assert_same_gradients(stages, reference)


def test_scaled_gradients_are_unscaled_exactly(tools):
    """Gradient scaling: the seed is multiplied, a power of two is divided out without a trace."""
    scale = 2.0**16
    plan = pl.plan("zb_h1", pp=2, num_microbatches=4)
    _, targets = tools.make_data([2] * 4)
    mean = 1.0 / sum(target.numel() for target in targets)
    plain, _ = step(tools, plan, [2] * 4)
    scaled, _ = step(tools, plan, [2] * 4, loss_scale=mean * scale)
    for mine, true in zip(scaled, plain, strict=True):
        for p, q in zip(mine.parameters(), true.parameters(), strict=True):
            assert torch.equal(p.grad / scale, q.grad)


class SplitOverRanks(nn.Module):
    """Half of a block's inner width, as tensor parallelism has it; outputs are summed."""

    def __init__(self, whole, part, group):
        super().__init__()
        rows = slice(3 * part, 3 * part + 3)
        self.first = nn.Parameter(whole.first.detach()[rows].clone())
        self.second = nn.Parameter(whole.second.detach()[:, rows].clone())
        self.group = group

    def forward(self, x):
        copied = SummedGradient.apply(x, self.group)
        return SummedOutput.apply(torch.tanh(copied @ self.first.T) @ self.second.T, self.group)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x @ self.first.T) @ self.second.T


class SummedOutput(torch.autograd.Function):
    @staticmethod
    def forward(_, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_, gradient):
        return gradient, None


class SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@pytest.mark.dist
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a36_shapes_go_on_the_pipelines_group(tools, launch, schedule, sockets):
    """Beside tensor parallelism shapes were exchanged in the wrong group: rank 1 waited for 3."""
    torch.manual_seed(0)
    true = [Whole(), Whole()]
    inputs, targets = tools.make_data([7, 5, 3, 9])
    plan = pl.plan(schedule, pp=2, num_microbatches=4)
    stages = copy.deepcopy(true)
    expected = tools.run_reference(true, inputs, targets)

    def body(_):
        # tp is the inner axis: pipelines are ranks 0, 2 and 1, 3.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        transport = TorchTransport(mesh["pp"].get_group(), timeout_s=20.0, sockets=sockets)
        part = mesh["tp"].get_local_rank()
        own = SplitOverRanks(stages[transport.rank], part, mesh["tp"].get_group())
        pipeline = Pipeline(plan, [own], tools.square_sum, transport=transport)
        loss = pipeline.step(inputs, targets).loss
        return transport.rank, part, loss, own.first.grad, own.second.grad

    for rank, part, loss, first, second in launch.values(launch(4, body, sockets=sockets)):
        rows = slice(3 * part, 3 * part + 3)
        if rank == 1:
            torch.testing.assert_close(loss, expected)
        for mine, whole in ((first, true[rank].first.grad[rows]), (second, true[rank].second.grad)):
            whole = whole if mine.shape == whole.shape else whole[:, rows]
            bound = 1e-5 * float(whole.abs().max())
            torch.testing.assert_close(mine, whole, rtol=0, atol=bound)
