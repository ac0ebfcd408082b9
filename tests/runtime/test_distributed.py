"""The same steps with one process a rank, over sockets and gloo."""

import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from pipeloom.runtime import (
    Pipeline,
    TiedWeight,
    clip_grad_norm,
    reduce_data_parallel_gradients,
    reduce_tied_gradients,
)
from pipeloom.runtime.distributed import TorchTransport

pytestmark = pytest.mark.dist


def gradients_of(pipeline):
    return [p.grad for chunks in pipeline.chunks.values() for c in chunks for p in c.parameters()]


@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize(
    ("pp", "vp", "sizes", "shape"),
    [
        (2, 1, [2] * 5, (2, 6)),
        (2, 2, [7, 5, 3, 9], None),
        (2, 2, [7, 5, 3, 9], "each"),
        (4, 1, [3] * 2, None),
        (3, 2, [1] * 7, (1, 6)),
    ],
)
def test_equal_to_the_unpipelined_model(tools, launch, pp, vp, sizes, shape, sockets):
    inputs, targets = tools.make_data(sizes)
    if shape == "each":
        shape = [(size, tools.width) for size in sizes]
    plan = tools.plan(pp, vp, len(sizes))
    reference = tools.make_stages(pp * vp)
    expected = tools.run_reference(reference, inputs, targets)

    def body(transport):
        pipeline = Pipeline(
            plan,
            tools.make_stages(pp * vp),
            tools.square_sum,
            transport=transport,
            boundary_shape=shape,
        )
        results = []
        for _ in range(2):
            for p in pipeline.parameters():
                p.grad = None
            results.append(pipeline.step(inputs, targets).loss)
        evaluated = pipeline.evaluate(inputs, targets).loss
        return results, evaluated, gradients_of(pipeline)

    outcomes = launch.values(launch(pp, body, sockets=sockets))
    for rank, (losses, evaluated, gradients) in enumerate(outcomes):
        if rank == pp - 1:
            assert torch.equal(losses[0], expected)
            assert torch.equal(losses[1], expected)
            assert torch.equal(evaluated, expected)
        else:
            assert losses == [None, None]
        true = [p.grad for stage in reference[rank::pp] for p in stage.parameters()]
        for mine, truth in zip(gradients, true, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6 * float(truth.abs().max()))


@pytest.mark.parametrize(
    ("sockets", "m", "size"), [(False, 90, 1), (True, 90, 1), (True, 6, 50_000)]
)
def test_many_sends_in_flight_are_all_kept(tools, launch, sockets, m, size):
    """GPipe sends all outputs before it reads: more than the kernel's buffers or one batch hold."""
    inputs, targets = tools.make_data([size] * m)
    plan = pl.plan("gpipe", pp=2, num_microbatches=m)
    reference = tools.make_stages(2)
    expected = tools.run_reference(reference, inputs, targets)

    def body(transport):
        pipeline = Pipeline(plan, tools.make_stages(2), tools.square_sum, transport=transport)
        return [pipeline.step(inputs, targets).loss for _ in range(2)][-1]

    assert torch.equal(launch.values(launch(2, body, sockets=sockets))[1], expected)


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v", "interleaved_zb"])
def test_split_backwards_and_v_placement(tools, launch, schedule):
    plan = pl.plan(schedule, pp=2, vp=2, num_microbatches=6)
    inputs, targets = tools.make_data([2] * 6)
    reference = tools.make_stages(4)
    expected = tools.run_reference(reference, inputs, targets)

    def body(transport):
        pipeline = Pipeline(
            plan, tools.make_stages(4), tools.square_sum, transport=transport, boundary_shape=(2, 6)
        )
        loss = pipeline.step(inputs, targets).loss
        return loss, gradients_of(pipeline)

    outcomes = launch.values(launch(2, body))
    places = [tuple(place) for place in plan.stages]
    assert torch.equal(outcomes[places[-1][0]][0], expected)
    for rank, (_, gradients) in enumerate(outcomes):
        true = [
            p.grad
            for chunk in range(2)
            for p in reference[places.index((rank, chunk))].parameters()
        ]
        for mine, truth in zip(gradients, true, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6 * float(truth.abs().max()))


def test_counted_tokens_reach_every_rank(tools, launch):
    from torch import nn

    class Chunk(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.x = block, None

        def set_input_tensor(self, x):
            self.x = x

        def forward(self, x):
            return self.block(x if self.x is None else self.x)

    inputs, targets = tools.make_data([2, 2, 2])
    reference = tools.make_stages(2)
    expected = tools.run_reference(reference, inputs, targets)

    def step(data, chunk):
        x, y = next(data)
        return chunk(x), lambda out: (tools.square_sum(out, y), y.numel())

    def body(transport):
        chunk = Chunk(tools.make_stages(2)[transport.rank])
        result = pl.get_forward_backward_func(2)(
            forward_step_func=step,
            data_iterator=iter(list(zip(inputs, targets, strict=True))),
            model=chunk,
            num_microbatches=3,
            seq_length=2,
            micro_batch_size=6,
            variable_shapes=True,
            transport=transport,
        )
        return result.loss, [p.grad for p in chunk.parameters()]

    outcomes = launch.values(launch(2, body))
    assert torch.equal(outcomes[1][0], expected)
    for (_, gradients), stage in zip(outcomes, reference, strict=True):
        for mine, p in zip(gradients, stage.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad, rtol=1e-5, atol=1e-7)


def test_norm_and_tied_weights_over_ranks(launch):
    def body(transport):
        rank = transport.rank
        tied = torch.nn.Parameter(torch.zeros(2))
        own = torch.nn.Parameter(torch.zeros(1))
        own.grad = torch.tensor([[3.0], [4.0], [0.0]][rank])
        weights = []
        if rank in (0, 2):
            tied.grad = torch.tensor([6.0, 0.0]) if rank == 0 else None  # the other got none
            weights = [TiedWeight({rank: tied}, [0, 2])]
        reduce_tied_gradients(weights, transport)
        norm = clip_grad_norm(
            {rank: [own, tied] if weights else [own]}, 1.0, transport, tied=weights
        )
        return float(norm), tied.grad, own.grad

    norm = 61.0**0.5
    outcomes = launch.values(launch(3, body))
    assert [outcome[0] for outcome in outcomes] == [pytest.approx(norm)] * 3
    torch.testing.assert_close(outcomes[0][1], torch.tensor([6.0, 0.0]) / norm)
    assert torch.equal(outcomes[0][1], outcomes[2][1])
    torch.testing.assert_close(outcomes[1][2], torch.tensor([4.0]) / norm)


def grid(rank):
    """Two pipelines of two ranks: (pipeline group, data-parallel group) of a rank."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pipelines[rank // 2], copies[rank % 2]


def test_two_pipelines_on_halves_of_the_data(tools, launch):
    """Shapes travel inside each pipeline's group; gradients are those of all the data."""
    sizes = [[7, 5, 3, 9], [2, 8, 4, 1]]
    plan = tools.plan(2, 2, 4)
    reference = tools.make_stages(4)
    data = [tools.make_data(part, seed) for seed, part in enumerate(sizes)]
    tools.run_reference(
        reference, [x for inputs, _ in data for x in inputs], [y for _, ys in data for y in ys]
    )

    def body(_):
        pipeline_group, copies = grid(dist.get_rank())
        transport = TorchTransport(pipeline_group, timeout_s=20.0)
        pipeline = Pipeline(
            plan,
            tools.make_stages(4),
            tools.square_sum,
            transport=transport,
            data_parallel_group=copies,
        )
        result = pipeline.step(*data[dist.get_rank() // 2])
        reduce_data_parallel_gradients(pipeline.parameters(), copies)
        if result.loss is not None:
            dist.all_reduce(result.loss, group=copies)
        return result.loss, gradients_of(pipeline)

    outcomes = launch.values(launch(4, body))
    for rank, (_, gradients) in enumerate(outcomes):
        true = [p.grad for stage in reference[rank % 2 :: 2] for p in stage.parameters()]
        for mine, truth in zip(gradients, true, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6 * float(truth.abs().max()))
    assert torch.equal(outcomes[1][0], outcomes[3][0])


def test_tied_weights_of_different_owners(launch):
    """Rank 1 shares one with rank 0 and then one with rank 2, who has made no group before."""

    def body(transport):
        rank = transport.rank
        weights = {}
        for number, owners in enumerate([(0, 1), (1, 2), (0, 2)]):
            if rank in owners:
                weights[owners] = torch.nn.Parameter(torch.zeros(2))
                weights[owners].grad = torch.full((2,), 10.0**number * (rank + 1))
        tied = [TiedWeight({rank: weight}, owners) for owners, weight in weights.items()]
        reduce_tied_gradients(tied, transport)
        return {owners: weight.grad[0].item() for owners, weight in weights.items()}

    first, second, third = launch.values(launch(3, body))
    assert first == {(0, 1): 3.0, (0, 2): 400.0}
    assert second == {(0, 1): 3.0, (1, 2): 50.0}
    assert third == {(1, 2): 50.0, (0, 2): 400.0}
