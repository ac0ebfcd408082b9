"""The paths that only NCCL takes, over a stand-in: gloo groups whose works must be polled.

NCCL itself has not been run with several ranks: that needs several GPUs (docs/runtime.md).
"""

import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from pipeloom.runtime import Pipeline
from pipeloom.runtime.distributed import TorchTransport
from pipeloom.runtime.reaper import Reaper

pytestmark = pytest.mark.dist


class PolledWork:
    """Knows when it is done without being waited for; its wait is only called then."""

    def __init__(self, work):
        self.error = None
        self._thread = threading.Thread(target=self._finish, args=(work,), daemon=True)
        self._thread.start()

    def _finish(self, work):
        try:
            work.wait()
        except RuntimeError as error:
            self.error = error

    def is_completed(self):
        return not self._thread.is_alive()

    def wait(self):
        assert self.is_completed(), "on NCCL a wait orders streams: the host must have polled"
        if self.error is not None:
            raise self.error


class PolledGroup:
    """Sends and receives of one two-rank communicator."""

    def __init__(self, group):
        self._group = group

    def send(self, tensors, peer, tag):
        assert tag == 0  # NCCL has no tags
        return PolledWork(self._group.send(tensors, peer, tag))

    def recv(self, tensors, peer, tag):
        assert tag == 0
        return PolledWork(self._group.recv(tensors, peer, tag))


class StandIn(TorchTransport):
    """As on NCCL: a communicator a channel, works that are polled."""

    def __init__(self, **options):
        super().__init__(device="cpu", sockets=False, **options)
        self.backend, self._polls = "nccl", True
        self._reaper = Reaper(polls=True)
        self.made = []

    def _communicator(self, channel, what):
        group, peer, tag = super()._communicator(channel, what)
        self.made.append((tuple(channel), what))
        return PolledGroup(group), peer, tag


@pytest.mark.parametrize("shape", [None, (3, 6)], ids=["announced", "known"])
@pytest.mark.parametrize(
    ("schedule", "pp", "vp"), [("1f1b", 3, 1), ("interleaved_1f1b", 2, 2), ("zb_v", 2, 2)]
)
def test_equal_to_one_process(tools, launch, schedule, pp, vp, shape):
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=5)
    sizes = [3] * 5 if shape else [7, 5, 3, 9, 1]
    inputs, targets = tools.make_data(sizes)
    reference = tools.make_stages(pp * vp)
    expected = tools.run_reference(reference, inputs, targets)

    def body(transport):
        own = StandIn(timeout_s=20.0)
        pipeline = Pipeline(
            plan, tools.make_stages(pp * vp), tools.square_sum, transport=own, boundary_shape=shape
        )
        loss = pipeline.step(inputs, targets).loss
        norm = float(pipeline.clip_grad_norm(1e9))
        gradients = [[p.grad for p in c.parameters()] for c in pipeline.chunks[transport.rank]]
        return loss, norm, gradients, own.made, own._reaper.drain(0.0)

    outcomes = launch.values(launch(pp, body))
    places = list(plan.stages)
    assert torch.equal(outcomes[places[-1][0]][0], expected)
    total = torch.stack([p.grad.norm() for s in reference for p in s.parameters()]).norm()
    for rank, (_, norm, gradients, made, left) in enumerate(outcomes):
        assert norm == pytest.approx(float(total), rel=1e-5)
        assert not left
        # Both ends make a channel's communicators, and all ranks go through them in one order.
        assert made == sorted(made, key=lambda entry: entry[0])
        for other in range(pp):
            both = [entry for entry in made if other in entry[0][:2]]
            assert both == [entry for entry in outcomes[other][3] if rank in entry[0][:2]] or (
                other == rank
            )
        for chunk, values in enumerate(gradients):
            true = reference[places.index((rank, chunk))].parameters()
            for value, p in zip(values, true, strict=True):
                bound = 1e-6 * float(p.grad.abs().max())
                torch.testing.assert_close(value, p.grad, rtol=0, atol=bound)


def test_a_receive_that_is_polled_has_its_limit(tools, launch):
    """The host can't run ahead of a receive, so that the op and the peer can be named."""
    inputs, targets = tools.make_data([2] * 4)

    def body(transport):
        stages = tools.make_stages(2)
        if transport.rank == 0:
            stages[0].register_forward_hook(
                lambda module, *_: time.sleep(1000 if module.calls == 2 else 0)
            )
        own = StandIn(timeout_s=2.0)
        Pipeline(tools.plan(2, 1, 4), stages, tools.square_sum, transport=own).step(inputs, targets)

    results = launch(2, body)
    assert [code for code, _ in results] == [70, 3]
    text = launch.errors(results)[1]
    assert re.match(r"PipelineTimeout: rank 1 stands at 1F1 .* from rank 0; it waited past", text)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    from pipeloom.training.session import _own_gpu

    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(pl.ConfigError, match=r"process 2 has no GPU: torch sees 2\nhint: several"):
        _own_gpu()
    chosen = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert _own_gpu() == torch.device("cuda", 1) == chosen[0]
    assert not dist.is_initialized()
