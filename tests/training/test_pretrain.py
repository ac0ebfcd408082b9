"""Whole runs: the same losses in every pipeline, exact resumes, honest ends."""

import json
from functools import partial

import pytest
import torch

import pipeloom as pl
from pipeloom.model import gpt_builder, model_provider
from pipeloom.training import checkpoint
from pipeloom.training.checkpoint import resolve_checkpoint
from pipeloom.training.data import train_valid_test_datasets_provider
from pipeloom.training.errors import CheckpointError, DivergedError
from pipeloom.training.generate import load_model
from pipeloom.training.log import read_losses
from pipeloom.training.pretrain import forward_step, pretrain

GPT = partial(model_provider, gpt_builder)


def train(args, forward_step_func=forward_step):
    return pretrain(train_valid_test_datasets_provider, GPT, forward_step_func, args=args)


def losses(result):
    return [record.loss for record in result.losses if record.loss is not None]


def weights(result):
    return load_model(result.checkpoint).model.state_dict()


ONE = {"pp": 1, "schedule": "no_pipelining"}
PIPELINES = {
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "gpipe": {"pp": 4, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "vp": 2},
    "zb_v": {"pp": 2, "schedule": "zb_v"},
    "recompute": {"pp": 2, "num_microbatches_with_partial_activation_checkpoints": 1},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES.keys())
def test_every_pipeline_trains_the_same_model(make_args, pipeline, tied):
    fields = {"tie_embeddings": tied, "hidden_dropout": 0.1, "steps": 3}
    one = train(make_args(**ONE, **fields))
    other = train(make_args(**pipeline, **fields))
    assert losses(other)[0] == losses(one)[0]
    assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    assert other.valid_loss == pytest.approx(one.valid_loss, rel=1e-5)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(other)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("row", [r for r in pl.schedules() if r.placement != "bidirectional"])
def test_every_schedule_of_one_replica_is_trained_or_refused_by_name(make_args, row):
    fields = {"schedule": row.name, "num_microbatches": 4, "steps": 1}
    if row.name == "no_pipelining":
        fields["pp"] = 1
    if row.vp is None:
        fields["vp"] = 2
    if row.name == "forward_only":
        with pytest.raises(pl.ConfigError, match=f"schedule='{row.name}'"):
            make_args(**fields)
        return
    one = train(make_args(**ONE, steps=1))
    other = train(make_args(**fields))
    assert losses(other) == losses(one)
    assert other.valid_loss == pytest.approx(one.valid_loss, rel=1e-6)


@pytest.mark.parametrize("pipeline", [{"pp": 2}, {"pp": 4, "recompute": True}, {"pp": 1}])
@pytest.mark.parametrize("pieces", [2, 3])
def test_sequences_in_pieces_train_the_same_model(make_args, pipeline, pieces):
    """Dropout's masks too; 16 tokens are pieces of 6, 5 and 5."""
    fields = {"hidden_dropout": 0.1, "steps": 3}
    one = train(make_args(**ONE, **fields))
    args = make_args(schedule="seq1f1b", num_seq_pieces=pieces, **pipeline, **fields)
    assert args.make_evaluation_plan(3).num_seq_pieces == pieces
    cut = train(args)
    assert losses(cut) == pytest.approx(losses(one), rel=1e-5)
    assert cut.valid_loss == pytest.approx(one.valid_loss, rel=1e-5)
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(cut)[name], value, rtol=1e-3, atol=1e-4)


def test_pieces_go_on_where_whole_sequences_stopped_and_back(make_args, tmp_path):
    fields = {"schedule": "seq1f1b", "num_seq_pieces": 2, "lr_decay_steps": 6}
    straight = train(make_args(**ONE, steps=6))
    first = train(make_args(**fields, steps=2))
    plan = pl.plan("seq1f1b", pp=3, num_microbatches=4, num_seq_pieces=4)
    plan.save(tmp_path / "plan")
    more = {"lr_decay_steps": 6, "out": None}
    second = train(make_args(resume=str(first.folder), schedule="1f1b", steps=4, **more))
    file = str(tmp_path / "plan")
    third = train(make_args(resume=str(second.folder), plan=file, steps=6, **more))
    assert losses(third) == pytest.approx(losses(straight), rel=1e-5)


def test_a_saved_plan_and_a_csv_are_trained(make_args, tmp_path):
    plan = pl.plan("zb_v", pp=2, num_microbatches=4)
    plan.save(tmp_path / "plan")
    plan.to_csv(tmp_path / "plan.csv")
    by_name = train(make_args(schedule="zb_v"))
    for file in ("plan", "plan.csv"):
        args = make_args(plan=str(tmp_path / file), pp=7, num_microbatches=9)
        assert (args.pp, args.vp, args.num_microbatches) == (2, 2, 4)
        by_file = train(args)
        assert losses(by_file) == losses(by_name)
        assert by_file.valid_loss == by_name.valid_loss


def test_bfloat16_computes_in_it_and_keeps_float32_weights(make_args):
    fields = {"dtype": "bfloat16", "steps": 3}
    one = train(make_args(**ONE, **fields))
    cut = train(make_args(**fields, recompute=True))
    full = train(make_args(**ONE, steps=3))
    assert losses(cut)[0] == losses(one)[0]
    assert losses(cut) == pytest.approx(losses(one), rel=1e-4)
    assert losses(one) != losses(full)
    assert losses(one) == pytest.approx(losses(full), rel=1e-2)
    assert {value.dtype for value in weights(one).values()} == {torch.float32}


@pytest.mark.usefixtures("curves")
def test_the_loss_falls_and_the_run_says_where_everything_is(make_args):
    args = make_args(steps=40, lr=1e-2, eval_interval=20)
    result = train(args)
    assert losses(result)[0] > 5.0
    assert losses(result)[-1] < 3.2
    assert result.valid_loss < 3.4
    for path in (result.checkpoint, *result.loss_curve, result.plan_picture, result.trace):
        assert path.exists()
    assert {path.suffix for path in result.loss_curve} == {".png", ".svg"}
    evaluations = [r.step for r in read_losses(result.folder) if r.valid_loss is not None]
    assert evaluations == [20, 40]
    for record in read_losses(result.folder)[:3]:
        assert record.tokens_per_s > 0
        assert 0 <= record.bubble < 1
    json.dumps(result.to_dict())


def test_the_trace_holds_each_op_of_one_step(make_args):
    args = make_args(steps=1)
    rows = json.loads(train(args).trace.read_text())["traceEvents"]
    plan = args.make_plan()
    for rank in range(2):
        names = [row["name"] for row in rows if row["ph"] == "X" and row["pid"] == rank]
        assert sorted(names) == sorted(plan.ops(rank))
    arrows = [row for row in rows if row["ph"] in "sf"]
    # 3 boundaries, all between ranks, each crossed forward and backward by 4 microbatches.
    assert len(arrows) == 2 * 3 * 2 * 4


@pytest.mark.parametrize("pipeline", [ONE, {"pp": 2, "vp": 2}], ids=["one", "interleaved"])
def test_a_resume_is_exact(make_args, pipeline):
    fields = {**pipeline, "hidden_dropout": 0.1}
    straight = train(make_args(**fields, steps=6))
    first = train(make_args(**fields, steps=3, lr_decay_steps=6))
    assert losses(first) == losses(straight)[:3]
    resumed = train(make_args(**fields, steps=6, resume=str(first.folder), out=None))
    assert resumed.folder == first.folder
    assert losses(resumed) == losses(straight)
    assert resumed.valid_loss == straight.valid_loss
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_checkpoint_goes_on_in_another_pipeline(make_args):
    straight = train(make_args(**ONE, steps=6))
    first = train(make_args(pp=2, vp=2, steps=3, lr_decay_steps=6))
    other = make_args(pp=4, schedule="1f1b", steps=6, resume=str(first.folder))
    assert losses(train(other)) == pytest.approx(losses(straight)[3:], rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_checkpoint_kept(make_args):
    def poisoned(iterator, chunk, recompute=None):
        batch = next(iterator)
        output, loss_func = forward_step(iter([batch]), chunk, recompute)
        return output * (float("nan") if batch.step == 3 else 1.0), loss_func

    args = make_args(steps=6, save_interval=2)
    with pytest.raises(DivergedError, match="loss is nan at step 4") as caught:
        train(args, poisoned)
    kept = resolve_checkpoint(args.out)
    assert kept.name == "step-000002"
    assert str(kept) in str(caught.value)
    assert all(torch.isfinite(value).all() for value in load_model(kept).model.parameters())


def test_weights_that_are_no_numbers_are_never_a_checkpoint(make_args, monkeypatch):
    args = make_args(steps=6, save_interval=1)
    step = torch.optim.AdamW.step

    def overflowing(optimizer, *given):
        step(optimizer, *given)
        if optimizer.param_groups[0]["params"][0] in optimizer.state and overflowing.left == 0:
            optimizer.param_groups[0]["params"][0].data[0, 0] = torch.inf
        overflowing.left -= 1

    overflowing.left = 2
    monkeypatch.setattr(torch.optim.AdamW, "step", overflowing)
    with pytest.raises(DivergedError, match="a weight is not finite after step 3") as caught:
        train(args)
    kept = resolve_checkpoint(args.out)
    assert kept.name == "step-000002"
    assert str(kept) in str(caught.value)


@pytest.mark.parametrize("interval", [0, 2])
def test_a_held_out_loss_that_is_not_finite_ends_the_run(make_args, interval):
    def poisoned(iterator, chunk, recompute=None):
        output, loss_func = forward_step(iterator, chunk, recompute)
        return output * (1.0 if chunk.training else float("inf")), loss_func

    args = make_args(steps=4, eval_interval=interval, save_interval=1)
    with pytest.raises(DivergedError, match=r"held-out loss is .* after step") as caught:
        train(args, poisoned)
    kept = "step-000001" if interval else "step-000003"
    assert resolve_checkpoint(args.out).name == kept
    assert kept in str(caught.value)


def interrupted_at(step):
    """A forward step that Ctrl-C hits."""

    def forward(iterator, chunk, recompute=None):
        batch = next(iterator)
        if batch.step == step:
            raise KeyboardInterrupt
        return forward_step(iter([batch]), chunk, recompute)

    return forward


def test_an_interruption_keeps_every_whole_step_and_goes_on_exactly(make_args):
    straight = train(make_args(steps=5))
    args = make_args(steps=5)
    with pytest.raises(KeyboardInterrupt, match=r"after step 3; last checkpoint: .*step-000003"):
        train(args, interrupted_at(3))
    resumed = train(make_args(steps=5, resume=args.out, out=None))
    assert losses(resumed) == losses(straight)
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_an_interruption_of_a_save_keeps_the_last_checkpoint_and_nothing_half(
    make_args, monkeypatch
):
    args = make_args(steps=6, save_interval=2)
    saves = []
    save = checkpoint.state_dict_saver.save

    def later_ones_are_interrupted(*given, **named):
        saves.append(1)
        if len(saves) >= 2:
            raise KeyboardInterrupt
        return save(*given, **named)

    monkeypatch.setattr(checkpoint.state_dict_saver, "save", later_ones_are_interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"step 4; last checkpoint: .*step-000002"):
        train(args)
    kept = resolve_checkpoint(args.out)
    assert sorted(path.name for path in kept.parent.iterdir()) == ["latest", "step-000002"]
    load_model(kept)


def test_a_folder_with_another_run_is_not_written_to(make_args):
    first = train(make_args(steps=1))
    before = sorted(first.folder.rglob("*"))
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        train(make_args(steps=1, out=str(first.folder)))
    assert sorted(first.folder.rglob("*")) == before


def test_a_resume_with_another_model_or_text_is_refused(make_args, text):
    first = train(make_args(steps=1))
    resume = {"resume": str(first.folder), "out": None}
    with pytest.raises(pl.ConfigError, match="the run has done 1 steps already"):
        train(make_args(**{**resume, "steps": 1}))
    with pytest.raises(CheckpointError, match="hidden_size: stored 16, this model 32"):
        train(make_args(hidden_size=32, **resume))
    (text / "file1.txt").write_text("something else\n" * 40)
    with pytest.raises(CheckpointError, match="trained on another text"):
        train(make_args(**resume))


def test_the_callers_own_forward_step_is_told_what_to_recompute(make_args):
    told = []

    def spying(iterator, chunk, recompute=None):
        told.append(recompute)
        return forward_step(iterator, chunk, recompute)

    args = make_args(**PIPELINES["recompute"], schedule="1f1b", steps=1, eval_microbatches=1)
    train(args, spying)
    expected = [bool(flag) for rank in range(2) for flag in args.make_plan().recompute_mask(rank)]
    assert sorted(t for t in told if t is not None) == sorted(expected)


def test_a_layout_of_the_callers_own_is_trained(make_args):
    one = train(make_args(**ONE, steps=2))
    own = train(make_args(pp=2, schedule="1f1b", layout_text="Et|tttL", steps=2))
    assert losses(own) == pytest.approx(losses(one), rel=1e-5)
    with pytest.raises(pl.LayoutError):
        train(make_args(pp=2, schedule="1f1b", layout_text="Et|ttL", steps=2))


@pytest.mark.gpu
def test_a_gpu_trains_the_model_that_the_cpu_trains(make_args):
    fields = {"vp": 2, "steps": 3, "tie_embeddings": True}
    cpu = train(make_args(**fields))
    gpu = train(make_args(**fields, device="cuda"))
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-4)
    assert gpu.valid_loss == pytest.approx(cpu.valid_loss, rel=1e-4)
    resumed = make_args(**{**fields, "steps": 4}, resume=str(gpu.folder), out=None, device="cuda")
    assert torch.isfinite(torch.tensor(losses(train(resumed)))).all()
