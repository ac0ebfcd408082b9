"""What may cross a boundary, and what may stand in a chunk."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime import BoundaryError, Pipeline, PipelineError
from pipeloom.runtime.structure import from_message, leaves_of, to_message

MASK = "num_microbatches_with_partial_activation_checkpoints"


class Front(nn.Module):
    """Tokens to a dict: states, a mask without gradient, a nested pair, a number and None."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.side = nn.Linear(width, 3)

    def forward(self, tokens, *, scale=1.0):
        x = self.embedding(tokens) * scale
        return {"x": x, "mask": tokens % 3 != 0, "rest": [(self.side(x), tokens), 0.5, None]}


class Middle(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen = []

    def forward(self, x, mask, rest):
        (side, tokens), half, nothing = rest
        assert (mask.dtype, tokens.dtype, half, nothing) == (torch.bool, torch.int64, 0.5, None)
        self.seen.append((x.requires_grad, mask.requires_grad, side.requires_grad))
        y = torch.tanh(self.linear(x)) * mask.unsqueeze(-1) + half * x
        return {"x": y, "mask": mask, "rest": [(side * 2, tokens), half, nothing]}


class Pair(nn.Module):
    """A dict to a tuple, of which one output leads to no input."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.free = nn.Linear(width, width), nn.Parameter(torch.ones(3))

    def forward(self, x, mask, rest):
        return torch.sin(self.linear(x)), rest[0][0], self.free * 1.5, mask


class Back(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width + 3, 2)

    def forward(self, x, side, free, mask):
        return self.head(torch.cat([x, side * free], -1)) * mask.unsqueeze(-1)


def model(width=6):
    torch.manual_seed(0)
    return [Front(width), Middle(width), Pair(width), Back(width)]


def whole(stages, tokens):
    return stages[3](*stages[2](**stages[1](**stages[0](tokens))))


def data(sizes):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 11, (2, size), generator=generator) for size in sizes]
    return tokens, [torch.randn(*part.shape, 2, generator=generator) for part in tokens]


def reference(tools, tokens, targets):
    stages = model()

    class Whole(nn.Module):
        def forward(self, x):
            return whole(stages, x)

    return stages, tools.run_reference([Whole()], tokens, targets)


PLANS = [
    ("1f1b", 4, 1, {}),
    ("zb_h1", 4, 1, {}),
    ("zb_v", 2, 2, {}),
    ("interleaved_1f1b", 2, 2, {MASK: 0}),
    ("interleaved_zb", 2, 2, {MASK: 1}),
    ("interleaved_1f1b", 1, 4, {}),
]


@pytest.mark.parametrize(("schedule", "pp", "vp", "optional"), PLANS)
def test_structures_cross_boundaries(tools, schedule, pp, vp, optional):
    """A67: masks and token numbers go along, and only what wants a gradient gets one."""
    tokens, targets = data([7, 5, 3, 9])
    true, expected = reference(tools, tokens, targets)
    stages = model()
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=4, **optional)
    result = Pipeline(plan, stages, tools.square_sum).step(tokens, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, true)
    assert set(stages[1].seen) == {(True, False, True)}


@pytest.mark.dist
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize(("schedule", "pp", "vp"), [("zb_v", 2, 2), ("1f1b", 4, 1)])
def test_structures_between_processes(tools, launch, schedule, pp, vp, sockets):
    tokens, targets = data([7, 5, 3, 9])
    true, expected = reference(tools, tokens, targets)
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=4)

    def body(transport):
        pipeline = Pipeline(plan, model(), tools.square_sum, transport=transport)
        evaluated = pipeline.evaluate(tokens, targets).loss
        loss = pipeline.step(tokens, targets).loss
        chunks = pipeline.chunks[transport.rank]
        return evaluated, loss, [[p.grad for p in chunk.parameters()] for chunk in chunks]

    outcomes = launch.values(launch(pp, body, sockets=sockets))
    places = list(plan.stages)
    evaluated, loss, _ = outcomes[places[-1][0]]
    assert torch.equal(loss, expected)
    assert torch.equal(evaluated, expected)
    for rank, (_, _, gradients) in enumerate(outcomes):
        for chunk, mine in enumerate(gradients):
            for value, p in zip(mine, true[places.index((rank, chunk))].parameters(), strict=True):
                bound = 1e-6 * float(p.grad.abs().max())
                torch.testing.assert_close(value, p.grad, rtol=0, atol=bound)


def test_messages_come_out_as_they_went_in():
    parts = {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3),
        "half": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        "complex": torch.ones(2, dtype=torch.complex128) * 1j,
        "empty": torch.zeros(0, 4),
        "strided": torch.arange(6.0).reshape(2, 3).T,
        "nested": ([], (), {}, None, True, 2, 0.25, "text"),
        3: [torch.tensor(1.0)],
    }
    back = from_message(to_message(parts))
    assert list(back) == list(parts)
    assert back["nested"] == parts["nested"]
    for mine, true in zip(leaves_of(back), leaves_of(parts), strict=True):
        assert torch.equal(mine, true)
        assert (mine.dtype, mine.requires_grad) == (true.dtype, true.requires_grad)


def test_what_can_not_cross_is_named(tools):
    class Bad(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, _):
            return self.value

    inputs, targets = tools.make_data([2, 2])
    plan = tools.plan(2, 1, 2)
    for value, message in [
        ((object(),), r"object can't cross a stage boundary\n+hint:"),
        (None, r"rank 0, 0F0: the output is a NoneType(.|\n)*hint:"),
    ]:
        with pytest.raises(BoundaryError, match=message):
            Pipeline(plan, [Bad(value), tools.Block()], tools.square_sum).step(inputs, targets)
    with pytest.raises(BoundaryError, match="the output is a tuple, but the agreed boundary is"):
        Pipeline(
            plan, [Bad((inputs[0],)), tools.Block()], tools.square_sum, boundary_shape=(2, 6)
        ).step(inputs, targets)


class Masked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, *, mask, gain=1.0):
        return torch.tanh(self.linear(x)) * mask * gain


@pytest.mark.parametrize("kept", [None, 0])
def test_inputs_of_single_stages(tools, kept):
    """Masks go to the stages that want them, from the rank that has them."""
    torch.manual_seed(0)
    stages = [tools.Block(), Masked(6), tools.Block(), Masked(6)]
    true = copy.deepcopy(stages)
    (x,), (y,) = tools.make_data([8])
    masks = torch.rand(8, 1).round()
    gains = [1.0, 2.0, 3.0]
    extra = {1: {"mask": masks}, 3: {"mask": masks, "gain": gains}}
    plan = tools.plan(2, 2, 3, **({} if kept is None else {MASK: kept}))
    pipeline = Pipeline(plan, stages, tools.square_sum)
    result = pipeline.step(x, y, stage_inputs=extra)
    parts = [torch.tensor_split(value, 3) for value in (x, y, masks)]
    total = None
    for part, target, mask, gain in zip(*parts, gains, strict=True):
        hidden = true[2](true[1](true[0](part), mask=mask))
        loss = tools.square_sum(true[3](hidden, mask=mask, gain=gain), target)
        loss.backward(torch.full_like(loss, 1 / y.numel()))
        scaled = loss.detach() * (1 / y.numel())
        total = scaled if total is None else total + scaled
    assert torch.equal(result.loss, total)
    tools.assert_same_gradients(stages, true)
    assert torch.equal(pipeline.evaluate(x, y, stage_inputs=extra).loss, total)
    with pytest.raises(PipelineError, match=r"stage_inputs\[1\]\['mask'\] has 2 samples for 3"):
        pipeline.step(x, y, stage_inputs={1: {"mask": masks[:2]}})


def test_batches_of_named_tensors(tools):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, left, right):
            return self.linear(left) + right

    torch.manual_seed(0)
    stages = [Named(), tools.Block()]
    true = copy.deepcopy(stages)
    (x, z), (y, _) = tools.make_data([8, 8])
    loss = Pipeline(tools.plan(2, 1, 3), stages, tools.square_sum).step({"left": x, "right": z}, y)
    whole_loss = tools.square_sum(true[1](true[0](x, z)), y) / y.numel()
    whole_loss.backward()
    torch.testing.assert_close(loss.loss, whole_loss.detach())
    tools.assert_same_gradients(stages, true, bound=1e-5)
    with pytest.raises(PipelineError, match=r"first dimensions \[4, 8\]"):
        Pipeline(tools.plan(2, 1, 3), stages, tools.square_sum).step({"a": x, "b": z[:4]}, y)


class Doubled(torch.autograd.Function):
    """y = x @ w, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        return torch.tanh(Doubled.apply(x, self.weight)) + x


class Shared(nn.Module):
    """One weight used twice in a chunk."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("kind", ["custom", "shared", "bare", "compiled"])
def test_any_module_is_a_chunk(tools, schedule, kind):
    """Custom functions, weights shared in a chunk, stages without parameters, compiled chunks."""
    torch.manual_seed(0)
    make = {"custom": Custom, "shared": Shared, "bare": nn.Tanh, "compiled": tools.Block}[kind]
    true = [tools.Block(), make(), make(), tools.Block()]
    stages = copy.deepcopy(true)
    run = stages
    if kind == "compiled":
        run = [torch.compile(stage.linear, backend="aot_eager") for stage in stages]
        true = [stage.linear for stage in true]
        stages = [stage.linear for stage in stages]
    inputs, targets = tools.make_data([3] * 5)
    expected = tools.run_reference(true, inputs, targets)
    plan = pl.plan(schedule, pp=4, num_microbatches=5)
    pipeline = Pipeline(plan, run, tools.square_sum)
    result = pipeline.step(inputs, targets)
    assert torch.equal(result.loss, expected)
    tools.assert_same_gradients(stages, true)
    squares = sum(p.grad.square().sum() for stage in true for p in stage.parameters())
    assert float(pipeline.clip_grad_norm(1e9)) == pytest.approx(float(squares.sqrt()), rel=1e-5)


def test_conjugates_and_negatives_are_sent_as_they_read():
    """Both may be a mark on memory that holds something else."""
    z = torch.randn(1, 1, dtype=torch.complex64)
    (out,) = from_message(to_message((z.conj(),)))
    assert torch.equal(out, z.conj())
    negative = z.conj().imag  # contiguous, as it has one element
    assert negative.is_neg()
    assert torch.equal(from_message(to_message([negative]))[0], negative)
    odd = torch.arange(6.0).view(2, 3).t()[:1, :1]  # one element, strides 1 and 3
    assert torch.equal(from_message(to_message([odd]))[0], odd)
    assert not to_message(negative).is_neg()
    assert torch.equal(to_message(negative), negative)
