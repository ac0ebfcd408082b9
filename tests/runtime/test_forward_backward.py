"""The classic entry points: dispatch, forward_step_func, iterators, the loss rule."""

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom import dispatch
from pipeloom.runtime import LocalTransport, PipelineError
from pipeloom.runtime.forward_backward import backward_step, forward_step

SEQUENCE, BATCH, HIDDEN = 3, 2, 4


class Chunk(nn.Module):
    """A chunk in the classic style: its input is set before the call."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.input_tensor = None
        self.flags = []

    def set_input_tensor(self, tensor):
        self.input_tensor = tensor

    def forward(self, tokens):
        x = tokens if self.first else self.input_tensor
        return torch.tanh(self.linear(x)) + 0.3 * x


def make_model(pp, vp, seed=0):
    torch.manual_seed(seed)
    stages = [Chunk(s == 0, s == pp * vp - 1) for s in range(pp * vp)]
    return stages, {rank: stages[rank::pp] for rank in range(pp)}


def make_batches(m, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (SEQUENCE, BATCH, HIDDEN)
    return [
        (
            torch.randn(shape, generator=generator),
            torch.randn(shape, generator=generator),
            (torch.rand(SEQUENCE, BATCH, generator=generator) < 0.7).float(),
        )
        for _ in range(m)
    ]


def loss_of(labels, mask, output):
    loss_sum = ((output - labels).square().sum(-1) * mask).sum()
    num_tokens = int(mask.sum())
    return loss_sum, num_tokens, {"lm loss": float(loss_sum.detach())}


def forward_step_func(data_iterator, model, checkpoint_activations_microbatch=None):
    tokens, labels, mask = next(data_iterator)
    model.flags.append(checkpoint_activations_microbatch)
    return model(tokens), lambda output: loss_of(labels, mask, output)


def iterators(batches, pp, vp):
    return {rank: [iter(batches) for _ in range(vp or 1)] for rank in range(pp)}


def reference(stages, batches, scale):
    total = 0.0
    for tokens, labels, mask in batches:
        x = tokens
        for stage in stages:
            if not stage.first:
                stage.set_input_tensor(x)
            x = stage(tokens)
        loss, _, _ = loss_of(labels, mask, x)
        loss.backward(torch.tensor(scale))
        total = total + loss.detach() * scale
    return total


def run(pp, vp, m, model, batches, **more):
    return pl.get_forward_backward_func(pp, vp)(
        forward_step_func=forward_step_func,
        data_iterator=iterators(batches, pp, vp),
        model=model,
        num_microbatches=m,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        hidden_size=HIDDEN,
        **more,
    )


def test_dispatch():
    assert pl.get_forward_backward_func() is pl.forward_backward_no_pipelining
    assert pl.get_forward_backward_func(1, 2) is pl.forward_backward_no_pipelining
    assert pl.get_forward_backward_func(2) is pl.forward_backward_pipelining_without_interleaving
    assert pl.get_forward_backward_func(2, 3) is pl.forward_backward_pipelining_with_interleaving
    assert pl.get_forward_backward_func(2, 1) is pl.forward_backward_pipelining_with_interleaving
    assert pl.get_forward_backward_func is dispatch.get_forward_backward_func


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("pp", "vp", "m"), [(1, 1, 3), (2, None, 3), (2, 1, 1), (2, 2, 5), (3, 2, 2)]
)
def test_loss_and_gradients(tools, pp, vp, m, counted):
    stages, model = make_model(pp, vp or 1)
    truth = copy.deepcopy(stages)
    batches = make_batches(m)
    tokens = int(sum(mask.sum() for _, _, mask in batches))
    expected = reference(truth, batches, 1.0 / tokens)
    batches_by_rank = {r: [iter(batches) for _ in range(vp or 1)] for r in range(pp)}
    result = pl.get_forward_backward_func(pp, vp)(
        forward_step_func=forward_step_func,
        data_iterator=batches_by_rank,
        model=model,
        num_microbatches=m,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        hidden_size=HIDDEN,
        total_num_tokens=None if counted else tokens,
    )
    assert torch.equal(result.loss, expected)
    assert result.num_tokens == [int(mask.sum()) for _, _, mask in batches]
    assert [report["lm loss"] for report in result.reports] == [float(x) for x in result.losses]
    tools.assert_same_gradients(stages, truth)


def test_counted_steps_accumulate(tools):
    stages, model = make_model(2, 2)
    truth = copy.deepcopy(stages)
    for seed in range(2):
        batches = make_batches(4, seed)
        tokens = int(sum(mask.sum() for _, _, mask in batches))
        reference(truth, batches, 1.0 / tokens)
        run(2, 2, 4, model, batches)
    tools.assert_same_gradients(stages, truth)


def test_forward_only_has_loss_and_no_gradients():
    stages, model = make_model(2, 2)
    batches = make_batches(4)
    evaluated = run(2, 2, 4, model, batches, forward_only=True)
    assert all(p.grad is None for stage in stages for p in stage.parameters())
    trained = run(2, 2, 4, model, batches)
    assert torch.equal(evaluated.loss, trained.loss)


def test_mask_is_handed_to_forward_step_func():
    stages, model = make_model(2, 2)
    kept = {"num_microbatches_with_partial_activation_checkpoints": 2}
    run(2, 2, 4, model, make_batches(4), **kept)
    plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4, **kept)
    for rank in range(2):
        mask = plan.recompute_mask(rank).tolist()
        seen = {chunk: iter(model[rank][chunk].flags) for chunk in range(2)}
        assert [next(seen[plan.chunk_id(k)]) for k in range(8)] == mask
    assert {flag for stage in stages for flag in stage.flags} == {True, False}
    run(2, 2, 4, model, make_batches(4))
    assert stages[0].flags[-1] is None


def test_any_plan_can_be_given():
    stages, model = make_model(2, 1)
    truth = copy.deepcopy(stages)
    batches = make_batches(3)
    plan = pl.plan("gpipe", pp=2, num_microbatches=3)
    result = run(2, None, 3, model, batches, plan=plan, loss_scale=0.5)
    assert torch.equal(result.loss, reference(truth, batches, 0.5))
    with pytest.raises(PipelineError, match="num_microbatches=3, but the call has pp=2, num_mic"):
        run(2, None, 4, model, batches, plan=plan)


def test_iterators_follow_a_plan_that_runs_microbatches_in_another_order():
    class Backwards:
        """A plan of one rank whose forwards run from the last microbatch to the first."""

        def __init__(self, plan):
            self.plan = plan

        def __getattr__(self, name):
            return getattr(self.plan, name)

        def columns(self, rank):
            columns = self.plan.columns(rank)
            return columns | {"microbatch": 2 - columns["microbatch"]}

    stages, model = make_model(1, 1)
    truth = copy.deepcopy(stages)
    batches = make_batches(3)
    plan = Backwards(pl.plan("no_pipelining", pp=1, num_microbatches=3))
    result = run(1, None, 3, model, batches, plan=plan, loss_scale=1.0)
    assert torch.equal(result.loss, reference(truth, batches, 1.0))


def test_shuffled_transport_gives_the_same_loss():
    _, model = make_model(2, 2)
    _, other = make_model(2, 2)
    batches = make_batches(4)
    plain = run(2, 2, 4, model, batches)
    shuffled = run(2, 2, 4, other, batches, transport=LocalTransport(2, seed=3))
    assert torch.equal(plain.loss, shuffled.loss)


def test_mistakes_are_named():
    _, model = make_model(2, 2)
    batches = make_batches(4)
    call = pl.get_forward_backward_func(2, 2)
    base = {
        "forward_step_func": forward_step_func,
        "data_iterator": iterators(batches, 2, 2),
        "model": model,
        "num_microbatches": 4,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "hidden_size": HIDDEN,
    }
    with pytest.raises(PipelineError, match=r"\['hidden_size'\] missing"):
        call(**base | {"hidden_size": None})
    with pytest.raises(PipelineError, match="data_iterator has 1 entries for 2 chunks"):
        call(**base | {"data_iterator": {0: [iter(batches)], 1: [iter(batches)]}})
    with pytest.raises(PipelineError, match="each chunk reads its own"):
        call(**base | {"data_iterator": {0: iter(batches), 1: iter(batches)}})
    with pytest.raises(TypeError, match="forward_step_func gave Tensor, not a pair"):
        call(**base | {"forward_step_func": lambda data, chunk: chunk(next(data)[0])})
    plain = {rank: [nn.Linear(HIDDEN, HIDDEN) for _ in range(2)] for rank in range(2)}

    def step(*_):
        return torch.ones(SEQUENCE, BATCH, HIDDEN), None

    with pytest.raises(PipelineError, match="Linear has no set_input_tensor"):
        call(**base | {"model": plain, "forward_step_func": step})


def test_steps_by_hand():
    stages, _ = make_model(2, 1)
    tokens, labels, mask = make_batches(1)[0]
    out, _ = forward_step(forward_step_func, iter([(tokens, labels, mask)]), stages[0], None)
    x = out.detach().requires_grad_()
    end, loss_func = forward_step(forward_step_func, iter([(tokens, labels, mask)]), stages[1], x)
    loss = loss_func(end)[0]
    gradient = backward_step(x, loss, torch.ones(()))
    assert backward_step(None, out, gradient) is None
    truth, _ = make_model(2, 1)
    reference(truth, [(tokens, labels, mask)], 1.0)
    assert torch.equal(stages[0].linear.weight.grad, truth[0].linear.weight.grad)


def test_an_iterator_that_runs_out_is_named():
    _, model = make_model(2, 2)
    batches = make_batches(4)
    short = iterators(batches, 2, 2)
    short[1][1] = iter(batches[:3])
    step = pl.get_forward_backward_func(2, 2)
    with pytest.raises(PipelineError, match="data_iterator of chunk 1 ran out before microbatch 3"):
        step(
            forward_step_func=forward_step_func,
            data_iterator=short,
            model=model,
            num_microbatches=4,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            hidden_size=HIDDEN,
        )


def test_a_plan_without_backwards_trains_nothing():
    _, model = make_model(2, 2)
    plan = pl.plan("forward_only", pp=2, vp=2, num_microbatches=4)
    with pytest.raises(PipelineError, match="forward_only has no backward, so this call trains"):
        run(2, 2, 4, model, make_batches(4), plan=plan)
