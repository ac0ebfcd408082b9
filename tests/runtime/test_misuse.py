"""Wrong calls: each is one clear error, on every rank, before anybody waits for a limit."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime import AgreementError, BoundaryError, Pipeline, PipelineError
from pipeloom.runtime.transport import Boundary

M = 4


def plan(**changes):
    return pl.plan(**{"schedule": "1f1b", "pp": 2, "num_microbatches": M, **changes})


class Nothing(nn.Module):
    def forward(self, _):
        return None


def pipeline(tools, *, stages=None, loss_fn=None, **options):
    stages = tools.make_stages(2) if stages is None else stages
    return Pipeline(plan(), stages, loss_fn or tools.square_sum, **options)


def test_what_is_no_plan_and_no_module_is_refused(tools):
    with pytest.raises(PipelineError, match="plan is of type str, not a plan"):
        Pipeline("1f1b", tools.make_stages(2), tools.square_sum)
    for stages, named in (
        ([nn.Tanh(), torch.tanh], r"chunks holds <built-in method tanh .*no torch\.nn\.Module"),
        ([*tools.make_stages(3)], "chunks has 3 modules, but the plan has 2 stages"),
        (nn.Tanh(), "chunks has Tanh where a list of modules belongs"),
        ({0: nn.Tanh(), 1: nn.Tanh()}, "chunks has Tanh where a list of modules belongs"),
        ({0: [nn.Tanh()]}, "rank 1 has 0 chunks, but the plan gives it 1"),
        ({0: [nn.Tanh()], 2: [nn.Tanh()]}, r"modules for \[2\], but the plan's ranks are 0 to 1"),
    ):
        with pytest.raises(PipelineError, match=named):
            pipeline(tools, stages=stages)


def test_a_chunk_that_gives_nothing(tools):
    x = torch.randn(8, 6)
    with pytest.raises(BoundaryError, match="rank 0, 0F0: the output is a NoneType"):
        pipeline(tools, stages=[Nothing(), tools.Block()]).step(x, x)


LOSSES = [
    (lambda *_: None, "is of type NoneType, not a tensor of one number"),
    (lambda *_: 3.0, "is of type float, not a tensor of one number"),
    (lambda output, target: output - target, r"has shape \(2, 6\), not one number"),
    (lambda output, _: output.sum().detach(), "has no gradient: nothing would be trained"),
    (lambda *_: torch.tensor(3.0), "has no gradient: nothing would be trained"),
]


@pytest.mark.parametrize(("loss_fn", "named"), LOSSES)
def test_a_loss_that_is_no_number_or_trains_nothing(tools, loss_fn, named):
    x = torch.randn(8, 6)
    calls = [pipeline(tools, loss_fn=loss_fn).step]
    if "gradient" not in named:
        calls.append(pipeline(tools, loss_fn=loss_fn).evaluate)
    for call in calls:
        with pytest.raises(BoundaryError, match=f"the loss of 1F0 {named}"):
            call(x, x)


def test_a_loss_of_frozen_stages_is_no_fault(tools):
    """Of a pipeline some stages may train nothing, wherever they stand."""
    for frozen in (0, 1):
        stages, reference = tools.pair(2)
        for model in (stages, reference):
            model[frozen].requires_grad_(False)
        inputs, targets = tools.make_data([2] * M)
        loss = pipeline(tools, stages=stages).step(inputs, targets).loss
        assert torch.equal(loss, tools.run_reference(reference, inputs, targets))


def test_a_batch_that_does_not_fit(tools):
    x = torch.randn(8, 6)
    runs = pipeline(tools)
    for given, named in (
        ((x[:3], x[:3]), "batch has 3 samples for 4 microbatches"),
        ((x[:0], x), "batch has 0 samples for 4 microbatches"),
        ((torch.tensor(1.0), x), "batch has 0 samples for 4 microbatches"),
        ((3, x), "batch is of type int"),
        (("text", x), "batch is of type str"),
        (([x] * 3, x), "batch has 3 microbatches, but the plan has 4"),
        ((iter([x] * 5), x), "batch has 5 microbatches, but the plan has 4"),
        ((x, [x] * 3), "targets has 3 microbatches, but the plan has 4"),
        ((x, x[:6]), "batch has 8 samples and targets has 6: cut into 4 microbatches"),
        ((None, x), "batch is missing on the rank of the first stage"),
        ((x, None), "targets is missing on the rank of the last stage"),
        ((x, [(x, x)] * M), r"count fails on a target of type tuple.*\nhint: pass count="),
    ):
        with pytest.raises(PipelineError, match=named):
            runs.step(*given)
    assert runs.step(x, x).loss is not None  # in one process the next step is as any other


def test_several_targets_a_sample_are_cut_alongside(tools):
    x = torch.randn(8, 6)
    loss_fn = lambda output, target: (output.reshape(-1) - target).square().sum()  # noqa: E731
    flat = pipeline(tools, loss_fn=loss_fn).step(x, x.reshape(-1)).loss
    assert torch.equal(flat, pipeline(tools).step(x, x).loss)


def test_a_plan_or_stage_that_is_not_the_pipelines(tools):
    x = torch.randn(8, 6)
    runs = pipeline(tools)
    for change in ({"pp": 3}, {"schedule": "interleaved_1f1b", "vp": 2}, {"schedule": "zb_v"}):
        with pytest.raises(PipelineError, match=r"places stages at .* the pipeline has them at"):
            runs.step(x, x, plan=plan(**change))
    with pytest.raises(PipelineError, match="forward_only has no backward: a step trains nothing"):
        runs.step(x, x, plan=plan(schedule="forward_only"))
    with pytest.raises(PipelineError, match=r"stage_inputs names stages \[5\], .* plan has 2"):
        runs.step(x, x, stage_inputs={5: {"mask": x}})
    with torch.no_grad(), pytest.raises(PipelineError, match="gradients, but they are disabled"):
        runs.step(x, x)


def test_a_chunk_that_writes_to_its_input_is_told_how_not_to(tools):
    stages = [tools.Block(), nn.Sequential(nn.ReLU(inplace=True), tools.Block())]
    x = torch.randn(8, 6)
    with pytest.raises(RuntimeError, match="in-place operation") as told:
        pipeline(tools, stages=stages).step(x, x)
    place, hint = told.value.__notes__
    assert place.startswith("rank 1 stands at 1F0")
    assert hint.startswith("hint: a chunk may not write to its input")


class Failing(nn.Module):
    """Fails at one of its calls."""

    def __init__(self, stage, error, at):
        super().__init__()
        self.stage, self.error, self.left = stage, error, at

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise self.error("of the chunk's own")
        return self.stage(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_step_after_an_error_starts_anew(tools, schedule, error):
    """Gradients of the broken step are the caller's to zero; nothing else is left of it."""
    stages, reference = tools.pair(2)
    inputs, targets = tools.make_data([2] * M)
    own = [stages[0], Failing(stages[1], error, at=3)]
    runs = Pipeline(plan(schedule=schedule), own, tools.square_sum)
    with pytest.raises(error, match="of the chunk's own"):
        runs.step(inputs, targets)
    runs.evaluate(inputs, targets)
    for stage in stages:
        stage.zero_grad()
    loss = runs.step(inputs, targets).loss
    assert torch.equal(loss, tools.run_reference(reference, inputs, targets))
    tools.assert_same_gradients(stages, reference)


# Each: what rank 1 does otherwise, and what all are told.
DIFFERENT = [
    ("targets", {"targets": None}, "targets is missing on the rank of the last stage"),
    ("few", {"targets": torch.zeros(3, 6)}, "targets has 3 samples for 4 microbatches"),
    ("chunks", {"stages": [nn.Tanh()] * 3}, "rank 1 has 3 chunks, but the plan gives it 1"),
    ("pp", {"pp": 3}, "the plan has pp=3, but the transport has 2 ranks"),
    ("loss", {"loss_fn": lambda *_: None}, None),
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "change", "named", "late"),
    [(*row, False) for row in DIFFERENT] + [(*row, True) for row in DIFFERENT[:2]],
)
def test_a_wrong_call_of_one_rank_ends_all_at_once(tools, launch, name, change, named, late):
    """Its own error there; on the others one that quotes it, long before the limit of 20 s."""
    x = torch.randn(8, 6)

    def body(transport):
        own = change if transport.rank == 1 else {}
        right = Pipeline(plan(), tools.make_stages(2), tools.square_sum, transport=transport)
        if late:
            right.step(x, x)
        runs = Pipeline(
            plan(pp=own.get("pp", 2)),
            own.get("stages", tools.make_stages(2)),
            own.get("loss_fn", tools.square_sum),
            transport=transport,
        )
        runs.step(x, own.get("targets", x))

    results = launch(2, body)
    assert [code for code, _ in results] == [3, 3]
    first, second = launch.errors(results)
    assert all(left["seconds"] < 10 for _, left in results)
    if name == "loss":
        named = "the loss of 1F0 is of type NoneType"
        assert second.startswith("BoundaryError: ")
    else:
        assert second.startswith("PipelineError: ")
    assert named in second
    assert named in first
    kind = "PeerLost" if late or name == "loss" else "AgreementError: rank 1 can't take part"
    assert first.startswith(kind), first
    assert re.search(r"\nhint: .+$", first)


@pytest.mark.dist
def test_after_a_wrong_call_the_processes_start_again(tools, launch):
    x = torch.randn(8, 6)

    def body(transport):
        runs = Pipeline(plan(), tools.make_stages(2), tools.square_sum, transport=transport)
        with pytest.raises((PipelineError, AgreementError)):
            runs.step(x, x if transport.rank == 0 else None)
        runs.step(x, x)

    for rank, (_, left) in enumerate(launch(2, body)):
        assert left["seconds"] < 10
        assert left["error"].startswith(f"PipelineError: rank {rank}: an earlier step failed")


def test_a_sparse_tensor_crosses_in_one_process_and_is_refused_between_two():
    from pipeloom.runtime.distributed import TorchTransport

    sender = TorchTransport.__new__(TorchTransport)
    sender.rank = 0
    with pytest.raises(BoundaryError, match=r"torch\.sparse_coo can't be sent\nhint: send x\.to_d"):
        sender.send(None, None, torch.eye(2).to_sparse(), announce=True)


def test_copies_of_pipelines_and_of_plans_run_alike(tools):
    """A deep copy has modules of its own; a pickled plan is the plan."""
    inputs, targets = tools.make_data([2] * M)
    first = Pipeline(pickle.loads(pickle.dumps(plan())), tools.make_stages(2), tools.square_sum)
    second = copy.deepcopy(first)
    losses = [runs.step(inputs, targets).loss for runs in (first, second)]
    assert torch.equal(*losses)
    mine, others = (list(runs.parameters()) for runs in (first, second))
    assert not {id(p) for p in mine} & {id(p) for p in others}
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(mine, others, strict=True))


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        ("stage_inputs", "PipelineError: stage_inputs[1]['mask'] has 2 samples for 4 microbatches"),
        ("count", "ValueError: no such count"),
    ],
)
def test_what_one_rank_cannot_cut_is_an_error_on_all(tools, launch, mode, first):
    """Before anybody waits: the other rank quotes it."""
    inputs, targets = tools.make_data([2] * M)
    failing = []

    def count(target):
        if failing:
            raise ValueError("no such count")
        return target.numel()

    def body(transport):
        own = pipeline(tools, transport=transport, count=count)
        if mode == "count":
            failing.append(True)
            own.evaluate(inputs, targets)
        mask = {1: {"mask": torch.ones(2)}} if transport.rank == 1 else None
        own.step(inputs, targets, stage_inputs=mask)

    results = launch(2, body, timeout_s=30.0)
    other, own = launch.errors(results)
    assert own.startswith(first)
    assert other.startswith(f"AgreementError: rank 1 can't take part in the step: {first}")
    assert max(left["seconds"] for _, left in results) < 25.0


def test_stage_inputs_that_are_no_dict(tools):
    inputs, targets = tools.make_data([2] * M)
    with pytest.raises(PipelineError, match=r"stage_inputs\[1\] is of type Tensor.*\nhint: "):
        pipeline(tools).step(inputs, targets, stage_inputs={1: torch.ones(8)})


class Named(nn.Module):
    """Takes and gives a dict; with `writes`, changes the mask that it was given."""

    def __init__(self, *, writes=False):
        super().__init__()
        self.linear, self.writes = nn.Linear(6, 6), writes
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x, mask=None):
        if mask is not None and self.writes:
            mask.zero_()
        return {"x": self.linear(x), "mask": self.mask}


def named_loss(output, target):
    return (output["x"] - target).square().sum()


def test_dicts_of_unequal_numbers_of_samples_are_not_paired(tools):
    """Like tensors (`require_pairs`): 8 samples and 6 targets would be cut apart."""
    own = pipeline(tools, stages=[Named(), Named()], loss_fn=named_loss)
    own.step({"x": torch.ones(8, 6)}, torch.ones(8, 6))
    with pytest.raises(PipelineError, match="batch has 8 samples and targets has 6"):
        own.step({"x": torch.ones(8, 6)}, torch.ones(6, 6))


@pytest.mark.parametrize("counted", [1.5, -1, torch.tensor(2.5), float("inf"), torch.ones(2)])
def test_a_count_that_is_no_whole_number_is_refused(tools, counted):
    """It was cut to one, and all gradients scaled by another number."""
    x = torch.ones(8, 6)
    with pytest.raises(PipelineError, match=r"count gives .*no number of losses\nhint: "):
        pipeline(tools, count=lambda _: counted).step(x, x)
    whole = pipeline(tools, count=lambda target: torch.tensor(float(target.numel())))
    assert torch.equal(whole.step(x, x).loss, pipeline(tools).step(x, x).loss)


def test_a_norm_below_zero_is_refused(tools):
    for bound in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_norm=.*at least 0\nhint: "):
            pipeline(tools).clip_grad_norm(bound)


def test_a_chunk_that_writes_to_what_the_stage_before_keeps(tools):
    """Autograd guards what wants a gradient; a mask it does not."""
    stages = [Named(), Named(writes=True)]
    with pytest.raises(BoundaryError, match="rank 1, 1F0: the chunk wrote to its input"):
        pipeline(tools, stages=stages, loss_fn=named_loss).step(torch.ones(8, 6), torch.ones(8, 6))


def test_equal_shapes_agree_however_they_are_written():
    for ways in (
        [(2, 6), [2, 6], torch.Size((2, 6))],
        [[(2, 6)] * 3, [[2, 6]] * 3, lambda *_: torch.Size((2, 6))],
    ):
        assert len({Boundary(way).describe(2, 3) for way in ways}) == 1
    assert Boundary([(2, 6), (2, 5), (2, 6)]).describe(2, 3) != Boundary((2, 6)).describe(2, 3)
