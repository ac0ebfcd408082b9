import copy

import pytest
import torch
from torch import nn

import pipeloom as pl

WIDTH = 6


if not hasattr(pl.Plan, "lower"):  # until it lands
    import importlib.util
    from functools import lru_cache
    from pathlib import Path

    from pipeloom.runtime import program

    _spec = importlib.util.spec_from_file_location(
        "standin", Path(__file__).with_name("standin.py")
    )
    _standin = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_standin)
    _real = program.compile_plan.__wrapped__

    @lru_cache(maxsize=64)
    def _compile(plan, ranks, **options):
        if plan.pp > 1 and plan.style is None:
            plan = _standin.Lowered(plan)
        return _real(plan, ranks, **options)

    for _module in ("pipeline", "forward_backward", "program"):
        importlib.import_module(f"pipeloom.runtime.{_module}").compile_plan = _compile


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
