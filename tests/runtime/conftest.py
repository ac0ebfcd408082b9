import copy
import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import pipeloom as pl
from pipeloom.runtime.distributed import TorchTransport

WIDTH = 6


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    """A stage with a nonlinearity, so that a wrong order or a lost stage shows."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x)) + 0.5 * x


def make_stages(number, seed=0, width=WIDTH):
    torch.manual_seed(seed)
    return [Block(width) for _ in range(number)]


def square_sum(output, target):
    return (output - target).square().sum()


def make_data(sizes, seed=1, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, width, generator=generator) for size in sizes]
    targets = [torch.randn(size, width, generator=generator) for size in sizes]
    return inputs, targets


def run_reference(stages, inputs, targets, loss_fn=square_sum):
    """One process, microbatches one after another, losses added by number."""
    scale = 1.0 / sum(target.numel() for target in targets)
    total = None
    for x, target in zip(inputs, targets, strict=True):
        for stage in stages:
            x = stage(x)
        loss = loss_fn(x, target)
        loss.backward(torch.full_like(loss, scale))
        scaled = loss.detach() * scale
        total = scaled if total is None else total + scaled
    return total


def assert_same_gradients(stages, reference, bound=1e-6):
    """Each stage's gradients within `bound` of the largest gradient of that parameter."""
    for mine, true in zip(stages, reference, strict=True):
        for (name, p), q in zip(mine.named_parameters(), true.parameters(), strict=True):
            assert p.grad is not None, name
            error = (p.grad - q.grad).abs().max() / q.grad.abs().max().clamp_min(1e-30)
            assert error <= bound, (name, float(error))


class Toolbox:
    make_stages = staticmethod(make_stages)
    make_data = staticmethod(make_data)
    run_reference = staticmethod(run_reference)
    assert_same_gradients = staticmethod(assert_same_gradients)
    square_sum = staticmethod(square_sum)
    width = WIDTH
    Block = Block

    @staticmethod
    def pair(number, seed=0):
        """The same stages twice."""
        stages = make_stages(number, seed)
        return stages, copy.deepcopy(stages)

    @staticmethod
    def plan(pp, vp, m, **optional):
        schedule = "interleaved_1f1b" if vp > 1 else "1f1b"
        return pl.plan(schedule, pp=pp, vp=vp, num_microbatches=m, **optional)


@pytest.fixture
def tools():
    return Toolbox


def child(rank, pp, folder, body, init_method, options):
    """Run `body(transport)` and leave what it gave, or how it failed, in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=pp,
        timeout=datetime.timedelta(seconds=30),
    )
    started = time.monotonic()
    try:
        outcome = body(TorchTransport(**options))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        torch.save({"error": text, "seconds": time.monotonic() - started}, f"{folder}/{rank}")
        os._exit(3)
    torch.save({"value": outcome}, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def _launch(tmp_path, pp, body, timeout_s=20.0, *, stopped=None, init_method=None, sockets=True):
    """Fork `pp` ranks; give (exit code, what it left) of each.

    Rank `stopped` stops itself and is killed once the others have ended.
    """
    init_method = init_method or f"file://{tmp_path}/store"
    options = {"timeout_s": timeout_s, "sockets": sockets}
    context = mp.get_context("fork")
    processes = [
        context.Process(target=child, args=(rank, pp, str(tmp_path), body, init_method, options))
        for rank in range(pp)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank != stopped:
            process.join(60)
    results = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            process.join()
        file = tmp_path / str(rank)
        left = torch.load(file, weights_only=False) if file.exists() else {}
        results.append((process.exitcode, left))
    return results


class Launcher:
    """Runs bodies in forked ranks, one process each."""

    def __init__(self, tmp_path):
        self._tmp_path = tmp_path

    def __call__(self, pp, body, **options):
        return _launch(self._tmp_path, pp, body, **options)

    @staticmethod
    def values(results):
        """What each rank's body gave; all must have ended well."""
        assert [code for code, _ in results] == [0] * len(results), results
        return [left["value"] for _, left in results]

    @staticmethod
    def errors(results):
        return [left.get("error", "") for _, left in results]


@pytest.fixture
def launch(tmp_path):
    return Launcher(tmp_path)
