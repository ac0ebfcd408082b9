"""A recomputed forward: run again once, also where the backward comes in halves."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.runtime import Pipeline, PipelineError
from pipeloom.runtime.backward import SplitBackward, gradient_edges
from pipeloom.runtime.recompute import recomputed

MASK = "num_microbatches_with_partial_activation_checkpoints"


class Busy(nn.Module):
    """Dropout, autocast, a nested checkpoint, an extra argument: each must be as at first."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(6, 6) for _ in range(3))
        self.calls = 0

    def forward(self, x, *, pair=None, scale=1.0):
        self.calls += 1
        y = nn.functional.dropout(torch.tanh(self.one(x)), 0.5)
        if pair is not None:
            y = y * pair[0] + pair[1]["shift"]
        y = checkpoint(lambda v: torch.sin(self.two(v)).exp(), y, use_reentrant=False)
        return (self.three(y) * scale).sigmoid() + x


def halves(module, x, gradient, *, named=None, autocast=False):
    """Output and gradients of a recomputed call whose backward comes in halves."""
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = recomputed(module, x, **(named or {}))
    torch.rand(5)  # the backward is elsewhere in the stream of random numbers
    split = SplitBackward(gradient_edges([output]), [x])
    before = torch.get_rng_state()
    split.input_half([gradient.to(output.dtype)])
    assert all(p.grad is None for p in module.parameters())
    split.weight_half()
    assert torch.equal(before, torch.get_rng_state())
    return output.detach(), [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "named",
    [None, {"pair": (torch.full((6,), 2.0), {"shift": torch.ones(6)}), "scale": 0.5}],
    ids=["plain", "structures"],
)
def test_halves_are_bitwise_those_of_a_forward_that_kept_all(named, autocast):
    torch.manual_seed(0)
    module = Busy()
    true = copy.deepcopy(module)
    x = torch.randn(4, 6, requires_grad=True)
    gradient = torch.randn(4, 6)
    output, mine = halves(module, x, gradient, named=named, autocast=autocast)
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = true(y, **(named or {}))
    expected.backward(gradient.to(expected.dtype))
    assert torch.equal(output, expected)
    assert all(map(torch.equal, mine, [y.grad, *(p.grad for p in true.parameters())]))
    assert module.calls == 2


def test_nothing_but_the_arguments_is_kept_until_the_backward_and_nothing_after():
    saved = []
    module = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))

    def call(x):
        y = module(x)
        saved.extend(torch._C._autograd._saved_tensors_hooks_is_enabled() * [1])
        return y

    x = torch.randn(4, 6, requires_grad=True)
    output = recomputed(call, x)
    node = output.grad_fn
    output.sum().backward()
    assert len(saved) == 1  # the second run stopped when all was back
    with pytest.raises(RuntimeError, match="second time"):
        node(torch.ones(4, 6))


def test_a_forward_that_does_something_else_is_refused():
    layers = [nn.Linear(6, 6) for _ in range(3)]
    left = [3, 2]

    def call(x):
        for layer in layers[: left.pop(0)]:
            x = torch.tanh(layer(x))
        return x

    output = recomputed(call, torch.randn(2, 6, requires_grad=True))
    with pytest.raises(PipelineError, match=r"saved \d tensors, but \d the first time\nhint: a"):
        output.sum().backward()


def test_without_gradients_it_is_a_call():
    x = torch.ones(2)
    with torch.no_grad():
        assert torch.equal(recomputed(torch.exp, x), x.exp())


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize(
    ("schedule", "pp", "vp"),
    [("zb_h1", 3, 1), ("zb_h2", 3, 1), ("interleaved_zb", 2, 2), ("zb_v", 2, 2), ("v_min", 2, 2)],
)
def test_weight_halves_wait_for_their_turn(tools, schedule, pp, vp, kept):
    """Recomputed or not, I leaves the parameters to W: else a zero-bubble plan has a bubble."""
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=6, **{MASK: kept})
    stages, reference = tools.pair(pp * vp)
    inputs, targets = tools.make_data([2] * 6)
    added = []
    for number, stage in enumerate(stages):
        stage.linear.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: added.append(number)
        )
    pipeline = Pipeline(plan, stages, tools.square_sum)
    from pipeloom.runtime.executor import RankExecutor

    by_kind = {}

    def counting(name):
        method = getattr(RankExecutor, name)

        def run(self, op, *given):
            before = len(added)
            method(self, op, *given)
            if op.stage > 0:
                kind = op.text.strip("0123456789")
                by_kind[kind] = by_kind.get(kind, 0) + len(added) - before

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_backward", "_weight_half"):
            patch.setattr(RankExecutor, name, counting(name))
        loss = pipeline.step(inputs, targets).loss
    assert torch.equal(loss, tools.run_reference(reference, inputs, targets))
    tools.assert_same_gradients(stages, reference)
    assert by_kind["I"] == 0
    assert by_kind["W"] + by_kind.get("B", 0) == 6 * (pp * vp - 1)
    masked = sum(int(plan.recompute_mask(rank).sum()) for rank in range(pp))
    assert masked > 0
    assert sum(stage.calls for stage in stages) == 6 * pp * vp + masked


def test_a_forward_with_a_backward_of_its_own_is_refused():
    def slope(x):
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
        return gradient

    with pytest.raises(PipelineError, match="a recomputed forward runs a backward of its own"):
        recomputed(slope, torch.ones(2, requires_grad=True))
