"""Split backward: the same gradients, no product twice, and its fall-backs."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeloom.runtime.backward import SplitBackward, full_backward, gradient_edges

WIDTH = 8


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.bmm,
        )
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """A transformer block, by hand."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Shared(nn.Module):
    """One weight used twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class Forked(nn.Module):
    """A weight that is computed before it is used, and a branch without the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x):
        return (x @ torch.tanh(self.a) + torch.sin(self.b)) * self.frozen


def make(kind):
    torch.manual_seed(0)
    modules = {
        "attention": lambda: nn.Sequential(Attention(), Attention()),
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "shared": Shared,
        "forked": Forked,
        "none": nn.Tanh,
    }
    module = modules[kind]()
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    return module, x, torch.randn(2, 3, WIDTH)


def halves_of(module, x, gradient, **options):
    """Gradients after I and after W, and the products of each."""
    halves = SplitBackward(gradient_edges([module(x)]), [x], **options)
    with Products() as first:
        halves.input_half([gradient])
    between = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    with Products() as second:
        halves.weight_half()
    return between, first.count, second.count


@pytest.mark.parametrize("kind", ["attention", "linear", "shared", "forked", "none"])
def test_halves_equal_the_whole(kind):
    module, x, gradient = make(kind)
    whole, y = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with Products() as products:
        full_backward(gradient_edges([whole(y)]), [gradient])
        forward = products.count
    with Products() as products:
        whole(y)
    expected = forward - products.count
    between, first, second = halves_of(module, x, gradient)
    assert torch.equal(x.grad, y.grad)
    for mine, true in zip(module.parameters(), whole.parameters(), strict=True):
        if true.grad is None:
            assert mine.grad is None
        else:
            assert torch.equal(mine.grad, true.grad)
    assert first + second == expected
    if kind in ("attention", "linear", "forked"):
        assert all(gradient is None for gradient in between)
        assert second > 0
    if kind == "shared":
        assert second == 0


def test_weight_half_adds_to_what_is_there():
    module, x, gradient = make("attention")
    halves_of(module, x, gradient)
    once = [p.grad.clone() for p in module.parameters()]
    halves_of(module, x, gradient)
    for before, p in zip(once, module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * before)


def test_first_stage_does_everything_in_the_weight_half():
    module, x, gradient = make("linear")
    halves = SplitBackward(gradient_edges([module(x.detach())]), [])
    halves.input_half([gradient])
    assert module.weight.grad is None
    halves.weight_half()
    assert module.weight.grad is not None


def test_stage_that_ignores_its_input():
    module, x, gradient = make("linear")
    halves = SplitBackward(gradient_edges([module(torch.ones_like(x.detach()))]), [x])
    halves.input_half([gradient])
    assert x.grad is None
    assert module.weight.grad is None
    halves.weight_half()
    assert module.weight.grad is not None


def test_nothing_to_train():
    halves = SplitBackward([], [torch.ones(1)])
    halves.input_half([torch.ones(1)])
    halves.weight_half()


def test_recomputed_forward_runs_once():
    module, x, gradient = make("attention")
    runs = []
    module.register_forward_pre_hook(lambda *_: runs.append(1))  # a recompute stops early

    def recomputed(value):
        return checkpoint(module, value, use_reentrant=False)

    recomputed.parameters = module.parameters
    halves_of(recomputed, x, gradient, whole_first=True)
    assert len(runs) == 2
    assert all(p.grad is not None for p in module.parameters())


def test_graph_is_let_go_after_the_weight_half():
    module, x, gradient = make("attention")
    output = module(x)
    halves = SplitBackward(gradient_edges([output]), [x])
    halves.input_half([gradient])
    halves.weight_half()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward(gradient)


class Hooked(nn.Module):
    """Changes gradients on their way, by hooks of every kind that autograd has."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "module":
            self.first.register_full_backward_hook(lambda _, given, __: (3 * given[0],))
            self.first.register_full_backward_pre_hook(lambda _, given: (2 * given[0],))
        if kind == "parameter":
            self.first.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x):
        hidden = self.first(x)
        if self.kind == "tensor":
            hidden.register_hook(lambda gradient: 2 * gradient)
        if self.kind == "node before":
            hidden.grad_fn.register_prehook(lambda given: (2 * given[0],))
        if self.kind == "node after":
            hidden.grad_fn.register_hook(
                lambda made, _: tuple(None if part is None else 3 * part for part in made)
            )
        return self.second(hidden.tanh())


@pytest.mark.parametrize("kind", ["tensor", "node before", "node after", "module", "parameter"])
def test_what_a_hook_makes_of_a_gradient_counts_once(kind):
    """A node that feeds a parameter is run in both halves, with its hooks."""
    torch.manual_seed(0)
    whole = Hooked(kind)
    split = Hooked(kind)  # a copy would lose hooks
    split.load_state_dict(whole.state_dict())
    x = torch.randn(3, WIDTH)
    given, seed = x.clone().requires_grad_(), torch.randn(3, WIDTH)
    whole(given).backward(seed)
    mine = x.clone().requires_grad_()
    halves = SplitBackward(gradient_edges([split(mine)]), [mine])
    halves.input_half([seed])
    halves.weight_half()
    assert torch.equal(mine.grad, given.grad)
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


class Several(torch.autograd.Function):
    """Three outputs; those that nobody uses have no gradient, not one of zeros."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x @ weight, weight.sin() @ weight, x + 1

    @staticmethod
    def backward(ctx, first, second, third):
        x, weight = ctx.saved_tensors
        to_x = [] if first is None else [first @ weight.T]
        to_weight = [] if first is None else [x.T @ first]
        if second is not None:
            to_weight.append(second * 2)
        if third is not None:
            to_x.append(third)
        return sum(to_x) if to_x else None, sum(to_weight) if to_weight else None


@pytest.mark.parametrize("used", [(0,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_outputs_that_nobody_uses(used):
    torch.manual_seed(0)
    x, seed = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    results = []
    for split in (False, True):
        given = x.clone().requires_grad_()
        weight = nn.Parameter(x.cos())
        outputs = Several.apply(given.tanh(), weight)
        output = sum((n + 1) * outputs[n] for n in used)
        if split:
            halves = SplitBackward(gradient_edges([output]), [given])
            halves.input_half([seed])
            halves.weight_half()
        else:
            output.backward(seed)
        results.append((given.grad, weight.grad))
    for mine, true in zip(*results, strict=True):
        assert (mine is None) == (true is None)
        assert mine is None or torch.equal(mine, true)
