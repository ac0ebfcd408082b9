"""What steps and transports leave behind: nothing, without waiting for a collection of cycles."""

import copy
import gc
import pickle
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime import Pipeline, PipelineError, ThreadedTransport
from pipeloom.runtime.distributed import TorchTransport

OPEN = Path("/proc/self/fd")


def num_live_tensors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that warn when they are looked at
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("order", ["plan", "ready"])
@pytest.mark.parametrize("threads", [False, True], ids=["local", "threads"])
@pytest.mark.parametrize(
    ("schedule", "optional"),
    [
        ("1f1b", {"num_microbatches_with_partial_activation_checkpoints": 1}),
        ("zb_v", {}),
        ("seq1f1b", {"num_seq_pieces": 2}),
        ("chimera", {}),
    ],
)
def test_a_step_leaves_no_tensor(tools, schedule, optional, threads, order):
    """A cycle would hold the caller's batch until Python looks for cycles."""
    plan = pl.plan(schedule, pp=2, num_microbatches=4, **optional)
    stages = tools.make_stages(plan.num_stages)
    x = torch.randn(8, 2, tools.width)
    transport = ThreadedTransport(2) if threads else None
    pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport, order=order)
    counts = []
    for _ in range(4):
        pipeline.step(x, x, record=True)
        pipeline.evaluate(x, x)
        counts.append(num_live_tensors())
    assert counts[1:] == counts[:1] * 3


@pytest.mark.parametrize("transport", [None, ThreadedTransport(2)], ids=["local", "threads"])
def test_pipelines_of_one_process_are_copied_and_pickled(tools, transport):
    plan = pl.plan("1f1b", pp=2, num_microbatches=4)
    inputs, targets = tools.make_data([2] * 4)
    stages = [nn.Linear(6, 6), nn.Linear(6, 6)]
    pipeline = Pipeline(plan, stages, nn.MSELoss(reduction="sum"), transport=transport)
    loss = pipeline.step(inputs, targets).loss
    for twin in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        assert twin.chunks[0][0] is not pipeline.chunks[0][0]
        assert torch.equal(twin.step(inputs, targets).loss, loss)


class Wide(nn.Module):
    """Gives more than a socket takes at once, so that threads send the rest."""

    def __init__(self, repeat):
        super().__init__()
        self.linear, self.repeat = nn.Linear(6, 6), repeat

    def forward(self, x):
        return self.linear(x[:, :6]).repeat(1, self.repeat)


def num_open():
    return sum(1 for _ in OPEN.iterdir()), threading.active_count()


def settled(before):
    """What is open, once threads have had the time to end."""
    deadline = time.monotonic() + 10.0
    while num_open() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return num_open()


@pytest.mark.dist
@pytest.mark.skipif(not OPEN.is_dir(), reason="counts files through /proc")
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_transport_takes_its_files_and_threads_along(tools, launch, sockets, how):
    m = 4 if sockets else 40  # gloo's sends are waited for by a thread, 32 at a time
    plan = pl.plan("gpipe", pp=2, num_microbatches=m)
    inputs, targets = tools.make_data([2] * m)

    def body(_):
        warnings.simplefilter("error")  # an unclosed socket is one
        before = num_open()
        seen = []
        for _ in range(2):
            stages = [Wide(300_000 if sockets else 1), Wide(1)]
            transport = TorchTransport(timeout_s=20.0, sockets=sockets)
            pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
            pipeline.step(inputs, targets)
            seen.append(threading.active_count() - before[1])
            if how == "closed":
                transport.close()
                transport.close()
                with pytest.raises(PipelineError, match="the transport is closed"):
                    pipeline.step(inputs, targets)
            del pipeline, transport
            if how == "dropped":
                gc.collect()
            assert settled(before) == before
        for copied in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError, match="TorchTransport can't be copied or pickled"):
                copied(TorchTransport(timeout_s=20.0, sockets=sockets))
        return seen

    first, second = launch.values(launch(2, body))
    assert min(first + second) >= 1  # the watchdog
    assert min(first) >= 2  # and what sends
