"""Pipelines side by side on a DeviceMesh: gradients are those of all the data in one process."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pipeloom as pl
from pipeloom.runtime import Pipeline, reduce_data_parallel_gradients
from pipeloom.runtime.distributed import TorchTransport

pytestmark = pytest.mark.dist

SIZES = [[7, 5, 3, 9], [2, 8, 4, 1]]


class Chunk(nn.Module):
    """Two blocks, each sharded by itself below the chunk."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def wrap(kind, chunk, mesh):
    if kind == "ddp":
        return DistributedDataParallel(chunk, process_group=mesh.get_group())
    if kind == "fsdp":
        for block in chunk.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(chunk, mesh=mesh)
    return chunk


@pytest.mark.parametrize(
    ("schedule", "vp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)]
)
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
def test_pp_2_by_dp_2_equals_one_process(tools, launch, kind, schedule, vp):
    """Two steps that add up, then the norm over all stages and shards (A59, A60, A64, A65)."""
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4)
    blocks = tools.make_stages(4 * vp)
    data = [tools.make_data(part, seed) for seed, part in enumerate(SIZES)]
    inputs = [x for part, _ in data for x in part]
    targets = [y for _, part in data for y in part]
    expected = tools.run_reference(blocks, inputs, targets)
    tools.run_reference(blocks, inputs, targets)
    norm = torch.stack([p.grad.norm() for block in blocks for p in block.parameters()]).norm()
    places = list(plan.stages)

    def body(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        own = tools.make_stages(4 * vp)
        chunks = [Chunk(own[2 * n : 2 * n + 2]) for n in range(2 * vp)]
        transport = TorchTransport(mesh["pp"].get_group(), timeout_s=20.0)
        mine = [
            wrap(kind, chunks[places.index((transport.rank, chunk))], mesh["dp"])
            for chunk in range(vp)
        ]
        group = mesh["dp"].get_group()
        pipeline = Pipeline(
            plan, mine, tools.square_sum, transport=transport, data_parallel_group=group
        )
        ready = []
        part = data[mesh["dp"].get_local_rank()]
        for _ in range(2):
            result = pipeline.step(*part, on_gradients_ready=lambda *place: ready.append(place))
        assert sorted(ready) == sorted([(transport.rank, chunk) for chunk in range(vp)] * 2)
        if kind == "plain":
            reduce_data_parallel_gradients(pipeline.parameters(), group)
        if result.loss is not None:
            dist.all_reduce(result.loss, group=group)
        norm = float(pipeline.clip_grad_norm(1e9))
        gradients = [
            [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in chunk.parameters()]
            for chunk in mine
        ]
        return transport.rank, result.loss, norm, gradients

    for rank, loss, mine, gradients in launch.values(launch(4, body)):
        assert mine == pytest.approx(float(norm), rel=1e-5)
        if places[-1][0] == rank:
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for chunk, values in enumerate(gradients):
            stage = places.index((rank, chunk))
            true = [p.grad for b in blocks[2 * stage : 2 * stage + 2] for p in b.parameters()]
            for value, truth in zip(values, true, strict=True):
                bound = 1e-6 * float(truth.abs().max())
                torch.testing.assert_close(value, truth, rtol=0, atol=bound)


def test_a_pipeline_that_does_not_come_is_an_error_within_the_limit(tools, launch):
    """Tokens are counted over pipelines: none waits longer for the others than for its own."""

    def body(_):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
        pipeline = Pipeline(
            pl.plan("1f1b", pp=1, num_microbatches=2),
            tools.make_stages(1),
            tools.square_sum,
            transport=TorchTransport(mesh["pp"].get_group(), timeout_s=1.0),
            data_parallel_group=mesh["dp"].get_group(),
        )
        if dist.get_rank() == 1:
            time.sleep(4.0)  # alive, but elsewhere
            return
        pipeline.step(*tools.make_data([2, 2]))

    results = launch(2, body)
    assert results[0][0] == 3
    error = launch.errors(results)[0]
    assert error.startswith("PipelineTimeout: summing the tokens of the step over the data-par")
    assert results[0][1]["seconds"] < 4.0
