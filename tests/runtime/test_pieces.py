"""Sequences cut into pieces: the numbers of whole sequences in one process, within 1e-5."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.model import GPTModel, TransformerConfig
from pipeloom.runtime import (
    LocalTransport,
    Pipeline,
    PipelineError,
    ThreadedTransport,
    with_earlier_pieces,
)
from pipeloom.runtime.pieces import SequenceCache

MASK = "num_microbatches_with_partial_activation_checkpoints"
VOCAB, LENGTH, SAMPLES = 33, 11, 8  # a length that no number of pieces but 1 divides
BOUND = 1e-5


class Chunk(nn.Module):
    """A chunk of a GPT as a module that takes what the one before gave."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt = gpt

    def forward(self, given):
        if self.gpt.pre_process:
            return self.gpt(given)
        self.gpt.set_input_tensor(given)
        return self.gpt()


def make_chunks(pp, **options):
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=VOCAB,
        init_method_std=0.2,
        pipeline_model_parallel_size=pp,
        **options,
    )
    return [
        Chunk(GPTModel(config, pp_rank=rank, pre_process=rank == 0, post_process=rank == pp - 1))
        for rank in range(pp)
    ]


def loss_sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make_tokens(seed=0, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (SAMPLES, length), generator=generator) for _ in range(2)]


def gradients_of(modules):
    return {name: p.grad for module in modules for name, p in module.named_parameters()}


def whole(modules, loss_fn, x, y, *, steps=1):
    """Loss and gradients of whole sequences, all samples at once, no pipeline."""
    for _ in range(steps):
        out = x
        for module in modules:
            out = module(out)
        loss = loss_fn(out, y) / y.numel()
        loss.backward()
    return loss.detach(), gradients_of(modules)


def seq_plan(pp, pieces, m, **optional):
    return pl.plan("seq1f1b", pp=pp, num_microbatches=m, num_seq_pieces=pieces, **optional)


def assert_close(loss, gradients, expected, bound=BOUND):
    true_loss, true_gradients = expected
    assert float(loss) == pytest.approx(float(true_loss), rel=bound)
    for name, gradient in gradients.items():
        true = true_gradients[name]
        assert (gradient - true).abs().max() <= bound * true.abs().max(), name


@pytest.fixture(scope="module")
def one_process():
    torch.set_num_threads(1)
    return whole(make_chunks(1), loss_sum, *make_tokens())


@pytest.mark.parametrize("kept", [None, 0, 1])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_gpt_is_that_of_whole_sequences(one_process, pp, kept):
    tokens, labels = make_tokens()
    for pieces, m in itertools.product((1, 2, 3, 4), (1, 2, 4, 8)):
        optional = {} if kept is None else {MASK: kept}
        pipeline = Pipeline(seq_plan(pp, pieces, m, **optional), make_chunks(pp), loss_sum)
        evaluated = [pipeline.evaluate(tokens, labels)]
        result = pipeline.step(tokens, labels)
        evaluated.append(pipeline.evaluate(tokens, labels, num_microbatches=3))
        assert_close(
            result.loss, gradients_of(pipeline.chunks[r][0] for r in range(pp)), one_process
        )
        for other in evaluated:
            assert float(other.loss) == pytest.approx(float(one_process[0]), rel=BOUND)
        assert result.num_tokens == [SAMPLES // m * LENGTH] * m
        total = sum(float(loss) for loss in result.losses) / labels.numel()
        assert total == pytest.approx(float(result.loss), rel=1e-6)


@pytest.mark.parametrize("order", ["plan", "ready"])
@pytest.mark.parametrize(
    "transport",
    [lambda: LocalTransport(3, seed=5), lambda: ThreadedTransport(3, timeout_s=20)],
    ids=["shuffled", "threads"],
)
def test_every_transport_and_order_gives_the_same_bits(transport, order):
    plan, data = seq_plan(3, 3, 4), make_tokens()

    def run(**options):
        pipeline = Pipeline(plan, make_chunks(3), loss_sum, **options)
        loss = pipeline.step(*data).loss
        return loss, gradients_of(pipeline.chunks[rank][0] for rank in range(3))

    loss, gradients = run()
    other, others = run(transport=transport(), order=order)
    assert torch.equal(loss, other)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def test_steps_add_up_and_evaluation_leaves_them(one_process):
    tokens, labels = make_tokens()
    pipeline = Pipeline(seq_plan(2, 4, 2), make_chunks(2), loss_sum)
    for plan in (None, seq_plan(2, 2, 4), pl.plan("1f1b", pp=2, num_microbatches=4)):
        loss = pipeline.step(tokens, labels, plan=plan).loss
        pipeline.evaluate(tokens, labels)
    gradients = gradients_of(pipeline.chunks[rank][0] for rank in range(2))
    expected = {name: 3 * gradient for name, gradient in one_process[1].items()}
    assert_close(loss, gradients, (one_process[0], expected))


def test_the_loss_is_added_up_by_microbatch_and_piece():
    tokens, labels = make_tokens()
    pipeline = Pipeline(seq_plan(2, 3, 2), make_chunks(2), loss_sum)
    result = pipeline.evaluate(tokens, labels, keep_outputs=True)
    assert [out.shape[1] for out in result.outputs] == [4, 4, 3] * 2
    cut = [part.split([4, 4, 3], 1) for part in labels.chunk(2)]
    losses = [
        sum(loss_sum(out, y) for out, y in zip(result.outputs[3 * mb :], cut[mb], strict=False))
        for mb in range(2)
    ]
    assert all(map(torch.equal, result.losses, losses))
    assert torch.equal(result.loss, sum(loss * (1 / labels.numel()) for loss in losses))


def test_half_precision_runs_in_pieces_too():
    tokens, labels = make_tokens()
    expected = whole(make_chunks(1, compute_dtype="bfloat16"), loss_sum, tokens, labels)
    pipeline = Pipeline(seq_plan(2, 3, 2), make_chunks(2, compute_dtype="bfloat16"), loss_sum)
    loss = pipeline.step(tokens, labels).loss
    gradients = gradients_of(pipeline.chunks[rank][0] for rank in range(2))
    assert_close(loss, gradients, expected, bound=0.05)


class Attention(nn.Module):
    """A user's own, batch first: one head, and a shift by one position before it."""

    def __init__(self, width=6, seed=0, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.reentrant = options.get("reentrant")
        self.second_key = options.get("second_key", "v")

    def shifted(self, x):
        """x at the position before: of a first piece zeros, of others the piece before's last."""
        longer = with_earlier_pieces(x, (self, "x"), dim=1)
        return F.pad(longer, (0, 0, 1, 0))[:, -1 - x.shape[1] : -1]

    def attend(self, x):
        q, k, v = self.qkv(x + self.shifted(x)).chunk(3, dim=-1)
        k = with_earlier_pieces(k, (self, "k"), dim=1)
        v = with_earlier_pieces(v, (self, self.second_key), dim=1)
        hidden = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()
        scores = (q @ k.mT).masked_fill(hidden, -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)

    def forward(self, x):
        if self.reentrant is None:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.reentrant)


def square_sum(output, target):
    return (output - target).square().sum()


def make_rows(length=10, width=6):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, length, width, generator=generator) for _ in range(2)]


def attention_run(plan, stages, **options):
    pipeline = Pipeline(plan, stages, square_sum, **options)
    loss = pipeline.step(*make_rows()).loss
    return loss, {n: p.grad for s, stage in enumerate(stages) for n, p in named(stage, s)}


def named(stage, number):
    return [(f"{number}.{name}", p) for name, p in stage.named_parameters()]


def attention_expected(stages):
    loss, _ = whole(stages, square_sum, *make_rows())
    return loss, {n: p.grad for s, stage in enumerate(stages) for n, p in named(stage, s)}


@pytest.mark.parametrize("kept", [None, 0])
@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_a_module_of_the_users(pieces, kept):
    expected = attention_expected([Attention(seed=s) for s in range(2)])
    optional = {} if kept is None else {MASK: kept}
    stages = [Attention(seed=s) for s in range(2)]
    assert_close(*attention_run(seq_plan(2, pieces, 2, **optional), stages), expected)


def test_several_layers_a_stage_with_checkpoints_of_their_own():
    def make():
        layers = [Attention(seed=s, reentrant=False) for s in range(4)]
        return [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]

    expected = attention_expected(make())
    assert_close(*attention_run(seq_plan(2, 3, 2), make()), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, where a graph breaks
def test_a_compiled_chunk():
    expected = attention_expected([Attention(seed=s) for s in range(2)])
    stages = [Attention(seed=s) for s in range(2)]
    compiled = [torch.compile(stage, backend="aot_eager") for stage in stages]
    pipeline = Pipeline(seq_plan(2, 2, 2), compiled, square_sum)
    loss = pipeline.step(*make_rows()).loss
    gradients = {n: p.grad for s, stage in enumerate(stages) for n, p in named(stage, s)}
    assert_close(loss, gradients, expected)


def test_a_stage_without_attention_needs_nothing(tools):
    stages, reference = tools.pair(2)
    x, y = make_rows()
    expected, _ = whole(reference, square_sum, x, y)
    loss = Pipeline(seq_plan(2, 3, 2), stages, square_sum).step(x, y).loss
    assert float(loss) == pytest.approx(float(expected), rel=BOUND)
    tools.assert_same_gradients(stages, reference, BOUND)


class Before(nn.Module):
    """Reads earlier pieces alone: a piece's own output does not depend on what it gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        everything = with_earlier_pieces(y, (self, "y"), dim=1)
        earlier = everything[:, : everything.shape[1] - y.shape[1]]
        return x + earlier.sum(1, keepdim=True)


def test_what_only_later_pieces_read_gets_its_gradient():
    x, y = make_rows()
    true = Before()
    parts = [true.linear(part).sum(1, keepdim=True) for part in x.split([4, 3, 3], 1)]
    moved = [0.0, parts[0], parts[0] + parts[1]]
    outs = [part + by for part, by in zip(x.split([4, 3, 3], 1), moved, strict=True)]
    (square_sum(torch.cat(outs, 1), y) / y.numel()).backward()
    stage = Before()
    Pipeline(seq_plan(1, 3, 2), [stage], square_sum).step(x, y)
    for mine, p in zip(stage.parameters(), true.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, p.grad, rtol=BOUND, atol=BOUND)


def split_backwards(plan, path, *, mask=False):
    """The plan with each B as I and, later, W: pieces' weight halves run first piece first."""
    lines = [
        "pipeloom-plan 1",
        "schedule halves",
        f"shape pp={plan.pp} vp=1 num_microbatches={plan.num_microbatches} "
        f"num_seq_pieces={plan.num_seq_pieces} placement=loop",
        "params group=0 extra_warmup=0 reverse_backward=0 forward_only=0 kept_activations=none",
        "orders ops",
        "style none",
        "promises buffered",
    ]
    again = "!" if mask else ""
    for rank in range(plan.pp):
        ops = plan.ops(rank)
        forwards_and_halves = [op.replace("B", "I") + again for op in ops]
        weights = [op.replace("F", "W") for op in ops if "F" in op]
        lines.append("rank " + " ".join([*forwards_and_halves, *weights]))
    text = "\n".join(lines) + "\n"
    digest = 0xCBF29CE484222325
    for byte in text.encode():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    path.write_text(f"{text}checksum {digest:016x}\n")
    return pl.Plan.load(path)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("checkpointed", [None, False])
def test_split_backwards(tmp_path, mask, checkpointed):
    plan = split_backwards(seq_plan(2, 3, 2), tmp_path / "plan", mask=mask)
    make = [lambda s=s: Attention(seed=s, reentrant=checkpointed) for s in range(2)]
    expected = attention_expected([stage() for stage in make])
    assert_close(*attention_run(plan, [stage() for stage in make]), expected)


def test_caches_are_empty_after_a_step(monkeypatch):
    made = []
    start = SequenceCache.__init__
    monkeypatch.setattr(
        SequenceCache, "__init__", lambda self, n: (made.append(self), start(self, n))[1]
    )
    attention_run(seq_plan(2, 3, 2), [Attention(seed=s) for s in range(2)])
    assert len(made) == 4
    assert not any(parts for cache in made for parts in cache._parts.values())


class Alternating(nn.Module):
    """Uses its key in every second forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(())), 0

    def forward(self, x):
        self.calls += 1
        return self.weight * (x if self.calls % 2 else with_earlier_pieces(x, (self, 0), dim=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Attention(second_key="k"),
            r"used twice in the forward of piece 0(.|\n)*hint: give",
        ),
        (lambda: Attention(reentrant=True), r"second run does\nhint: checkpoint"),
        (Alternating, r"piece 1 of a sequence uses it, but piece 0 did not\nhint: call"),
    ],
)
def test_misuse_is_named(make, message):
    stages = [nn.Linear(6, 6), make()]
    with pytest.raises(PipelineError, match=message):
        attention_run(seq_plan(2, 2, 2), stages)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (
            torch.ones(4),
            {},
            r"batch has a tensor of shape \(2,\), which has no dimension 1 (.|\n)*hint",
        ),
        (
            torch.ones(4, 2, 6),
            {},
            r"sequences of length 2 \(dimension 1 of \(2, 2, 6\)\) for 3 pieces",
        ),
        (
            {"x": torch.ones(4, 9, 6), "mask": torch.ones(4, 7)},
            {},
            r"different lengths: 9 in batch\['x'\], 7 in batch\['mask'\](.|\n)*hint: sequence_dim",
        ),
        (torch.ones(4, 9, 6), {"sequence_dim": 3}, r"no dimension 3 to cut into 3 pieces"),
    ],
)
def test_a_batch_that_can_not_be_cut(batch, options, message):
    pipeline = Pipeline(seq_plan(1, 3, 2), [nn.Identity()], square_sum, **options)
    with pytest.raises(PipelineError, match=message):
        pipeline.evaluate(batch, torch.ones(4, 9, 6))


class Conditioned(nn.Module):
    """Attention with a gain for each sample and a factor for each position."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, gain, factor, power=1):
        return self.attention(x * gain[:, None, None]) * factor.mT[..., None] ** power


def test_batches_name_where_their_sequences_are():
    """A dict by key, lists of microbatches, and lists of pieces that the caller cut."""
    x, y = make_rows()
    gain, factor = torch.rand(4), torch.rand(10, 4)
    model = Conditioned()
    expected = (square_sum(model(x, gain, factor, 2), y) / y.numel()).detach()
    named_dims = {"gain": None, "factor": 0}
    batch = {"x": x, "gain": gain, "factor": factor.mT.contiguous()}
    by_microbatch = [
        {"x": x[2 * i :][:2], "gain": gain[2 * i :][:2], "factor": factor[:, 2 * i :][:, :2]}
        for i in range(2)
    ]
    by_piece = [
        {"x": part["x"][:, a:b], "gain": part["gain"], "factor": part["factor"][a:b]}
        for part in by_microbatch
        for a, b in [(0, 7), (7, 10)]
    ]
    goals = [y[2 * i :][:2, a:b] for i in range(2) for a, b in [(0, 7), (7, 10)]]
    for given, targets, dims in [
        (by_microbatch, y, named_dims),
        (by_piece, goals, 1),
    ]:
        pipeline = Pipeline(seq_plan(1, 2, 2), [model], square_sum, sequence_dim=dims)
        extra = {0: {"power": 2}}
        loss = pipeline.evaluate(given, targets, stage_inputs=extra).loss
        assert float(loss) == pytest.approx(float(expected), rel=BOUND)
    assert batch["factor"].shape == (4, 10)


def test_stage_inputs_are_cut_too():
    x, y = make_rows()
    gain, factor = torch.rand(4), torch.rand(4, 10)

    class Scaled(Conditioned):
        def forward(self, x, gain, factor):
            return super().forward(x, gain, factor.mT)

    model = Scaled()
    expected = (square_sum(model(x, gain, factor), y) / y.numel()).detach()
    pipeline = Pipeline(
        seq_plan(2, 3, 2), [nn.Identity(), model], square_sum, sequence_dim={"gain": None}
    )
    inputs = {1: {"gain": gain, "factor": factor}}
    loss = pipeline.evaluate(x, y, stage_inputs=inputs).loss
    assert float(loss) == pytest.approx(float(expected), rel=BOUND)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("variable", [False, True])
def test_classic_entry_point(dropout, variable):
    """Iterators of pieces, shapes known up front; dropout's masks are those of whole sequences."""
    tokens, labels = make_tokens()

    def step_func(iterator, chunk, again=None):
        x, y, number, start = next(iterator)
        output = chunk(x, y, dropout_key=(0, number, start), checkpoint_activations=bool(again))
        return output, lambda losses: (losses.sum(), losses.numel())

    def run(plan):
        chunks = [chunk.gpt for chunk in make_chunks(plan.pp, hidden_dropout=dropout)]
        sizes = [4, 4, 3] if plan.num_seq_pieces > 1 else [11]
        items = [
            (x, y, number, sum(sizes[:piece]))
            for number, rows in enumerate(zip(tokens.chunk(2), labels.chunk(2), strict=True))
            for piece, (x, y) in enumerate(
                zip(*(part.split(sizes, 1) for part in rows), strict=True)
            )
        ]
        result = pl.get_forward_backward_func(plan.pp)(
            forward_step_func=step_func,
            data_iterator={rank: [iter(items)] for rank in range(plan.pp)},
            model={rank: [chunk] for rank, chunk in enumerate(chunks)},
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=4,
            total_num_tokens=labels.numel(),
            plan=plan,
            variable_shapes=variable,
        )
        return result.loss, gradients_of(chunks)

    expected = run(pl.plan("1f1b", pp=1, num_microbatches=2))
    assert_close(*run(seq_plan(2, 3, 2)), expected)
    assert_close(*run(seq_plan(3, 3, 2, **{MASK: 0})), expected)


def test_a_wait_names_the_piece():
    import time

    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(1.0)
            return super().forward(x)

    stages = [Slow(6, 6), nn.Linear(6, 6)]
    transport = ThreadedTransport(2, timeout_s=0.2)
    pipeline = Pipeline(seq_plan(2, 2, 2), stages, square_sum, transport=transport)
    with pytest.raises(PipelineError, match="activation of microbatch 0, piece 0"):
        pipeline.step(*make_rows())


@pytest.mark.dist
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize(("pp", "pieces", "kept"), [(2, 3, None), (3, 2, 0), (4, 4, 1)])
def test_one_process_a_rank(launch, one_process, pp, pieces, kept, sockets):
    tokens, labels = make_tokens()
    optional = {} if kept is None else {MASK: kept}
    plan = seq_plan(pp, pieces, 4, **optional)
    lengths = [part.shape[1] for part in tokens.tensor_split(pieces, 1)]
    shapes = [(length, 2, 16) for length in lengths] * 4

    def body(transport):
        pipeline = Pipeline(
            plan,
            make_chunks(pp),
            loss_sum,
            transport=transport,
            boundary_shape=shapes if pp == 3 else None,
        )
        losses = [pipeline.evaluate(tokens, labels).loss]
        losses.append(pipeline.evaluate(tokens, labels, num_microbatches=4).loss)
        losses.append(pipeline.step(tokens, labels).loss)
        return losses, gradients_of(pipeline.chunks[transport.rank])

    outcomes = launch.values(launch(pp, body, sockets=sockets))
    for rank, (losses, gradients) in enumerate(outcomes):
        if rank < pp - 1:
            assert losses == [None] * 3
        for loss in losses if rank == pp - 1 else ():
            assert_close(loss, {}, one_process)
        assert_close(one_process[0], gradients, one_process)
        assert gradients


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped_chunks(launch, kind):
    """pp 2 x dp 2: reductions start after the backward of the last microbatch's first piece."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from pipeloom.runtime.distributed import TorchTransport

    x, y = make_rows()
    expected = attention_expected([Attention(seed=s) for s in range(2)])

    def body(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        stage, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        chunk = Attention(seed=stage)
        if kind == "ddp":
            wrapped = DistributedDataParallel(chunk, process_group=mesh["dp"].get_group())
        else:
            wrapped = fully_shard(chunk, mesh=mesh["dp"])
        pipeline = Pipeline(
            seq_plan(2, 3, 2),
            [wrapped],
            square_sum,
            transport=TorchTransport(mesh["pp"].get_group(), timeout_s=20.0),
            data_parallel_group=mesh["dp"].get_group(),
        )
        pipeline.step(x[2 * part :][:2], y[2 * part :][:2])
        whole_of = (lambda g: g.full_tensor()) if kind == "fsdp" else (lambda g: g)
        return {f"{stage}.{n}": whole_of(p.grad) for n, p in chunk.named_parameters()}

    for gradients in launch.values(launch(4, body)):
        assert len(gradients) == 4
        assert_close(expected[0], gradients, expected)
