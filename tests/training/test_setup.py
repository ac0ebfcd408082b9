"""Arguments, optimizer, schedule, log and measures of a run."""

import argparse
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pipeloom as pl
from pipeloom.model import GPTModel, TransformerConfig
from pipeloom.training import log
from pipeloom.training.arguments import TrainingArguments
from pipeloom.training.log import RunLog, StepRecord, read_losses
from pipeloom.training.measure import busiest, side_by_side
from pipeloom.training.options import add_train_arguments, arguments_from
from pipeloom.training.setup import OptimizerParamScheduler, make_optimizer, parameters_of


def parse(*words):
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return arguments_from(parser.parse_args(words))


def test_every_option_reaches_its_field():
    args = parse(
        *("--num-layers", "6", "--lr", "0.01", "--tie-embeddings", "--data", "a", "b"),
        *("--schedule", "1f1b", "--pp", "3", "--layout", "Ett|tt|ttL", "--out", "x"),
    )
    assert (args.num_layers, args.lr, args.tie_embeddings) == (6, 0.01, True)
    assert args.data == ("a", "b")
    assert [args.layout.layers(rank, 0) for rank in range(3)] == [[1, 2], [3, 4], [5, 6]]
    assert args.out == "x"


def test_the_default_is_8_layers_on_pp_2_vp_2():
    args = parse()
    assert (args.num_layers, args.pp, args.vp, args.schedule) == (8, 2, 2, "interleaved_1f1b")
    assert [args.layout.layers(r, c) for r in (0, 1) for c in (0, 1)] == [
        [1, 2],
        [5, 6],
        [3, 4],
        [7, 8],
    ]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"steps": 0}, "steps=0 is not at least 1"),
        ({"lr": 0.0}, r"lr=0\.0 is not above 0"),
        ({"min_lr": 1.0}, r"min_lr=1\.0 is not between 0 and lr=0\.006"),
        ({"adam_beta2": 1.0}, r"adam_beta2=1\.0"),
        ({"clip_grad": -1.0}, r"clip_grad=-1\.0 is not at least 0"),
        ({"activation": "relu"}, "activation='relu' is not one of gelu, swiglu"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"schedule": "2f2b"}, "2f2b"),
        ({"schedule": "1f1b", "vp": 2}, "vp"),
        (
            {"schedule": "dualpipe", "tie_embeddings": True},
            "schedule='dualpipe' runs 2 copies of the model, and with tie_embeddings=True",
        ),
        ({"steps": "many"}, "steps='many' is not of type int"),
        ({"steps": True}, "steps=True is not of type int"),
        ({"vp": 1.0}, r"vp=1\.0 is not of type int or None"),
        ({"lr": float("nan")}, "lr=nan is not above 0"),
        ({"data": [1]}, r"data=\(1,\) is not a list of paths"),
        ({"dp": 0}, "dp=0 is not at least 1"),
        ({"lr": math.inf}, "lr=inf is not finite"),
        ({"weight_decay": math.inf}, "weight_decay=inf is not finite"),
        ({"clip_grad": math.inf}, "clip_grad=inf is not finite"),
        ({"lr_decay_steps": 0}, "lr_decay_steps=0 is not at least 1"),
        ({"timeout_s": math.inf}, "timeout_s=inf is not in 0 < s <= 1e9"),
        ({"layout_text": 3}, r"layout=3 is not of type str or None\nhint: set it with --layout$"),
        ({"out": ""}, "out='' is not a path"),
        ({"data": [""]}, r"data=\('',\) is not a list of paths"),
        (
            {"recompute": True, "num_microbatches_with_partial_activation_checkpoints": 1},
            "recompute=True runs every forward again, but .*=1 keeps some",
        ),
    ],
)
def test_a_bad_argument_is_named(fields, named):
    with pytest.raises(pl.ConfigError, match=named) as caught:
        TrainingArguments(**fields)
    assert "hint: " in str(caught.value)


def test_a_layout_that_loses_layers_is_refused():
    with pytest.raises(pl.LayoutError):
        _ = TrainingArguments(pp=2, schedule="1f1b", layout_text="Ett|ttL").layout


def test_a_resumed_run_keeps_its_arguments(tmp_path):
    path = tmp_path / "checkpoints" / "step-000003"
    path.mkdir(parents=True)
    stored = TrainingArguments(hidden_size=64, steps=3, lr=0.02, out="old", vp=4)
    state = {
        "step": 3,
        "consumed_samples": 96,
        "scheduler": {},
        "architecture": {},
        "arguments": stored.to_dict(),
        "format_version": 1,
    }
    (path / "train.json").write_text(json.dumps(state))
    (path.parent / "latest").write_text("step-000003\n")
    args = parse("--resume", str(tmp_path), "--steps", "9")
    assert (args.hidden_size, args.lr, args.vp, args.steps) == (64, 0.02, 4, 9)
    assert args.lr_decay_steps == 3
    assert args.out is None
    moved = parse("--resume", str(tmp_path), "--pp", "4", "--schedule", "1f1b")
    assert (moved.pp, moved.vp, moved.schedule) == (4, 1, "1f1b")
    with pytest.raises(pl.ConfigError, match=r"lr=0\.1 differs from the resumed run's 0\.02"):
        parse("--resume", str(tmp_path), "--lr", "0.1")


def resumable(tmp_path, **fields):
    """A run folder with the checkpoint of a run with these arguments."""
    path = tmp_path / "run" / "checkpoints" / "step-000003"
    path.mkdir(parents=True)
    (path / "train.json").write_text(
        json.dumps(
            {
                "step": 3,
                "consumed_samples": 96,
                "scheduler": {},
                "architecture": {},
                "arguments": TrainingArguments(steps=3, **fields).to_dict(),
                "format_version": 1,
            }
        )
    )
    (path.parent / "latest").write_text("step-000003\n")
    return str(tmp_path / "run")


def test_a_resume_may_cut_a_step_anew_but_not_change_its_size(tmp_path):
    run = resumable(tmp_path, num_microbatches=8)
    args = parse("--resume", run, "--steps", "9", "--dp", "2")
    assert (args.num_microbatches, args.dp) == (4, 2)
    assert args.samples_per_step == 16
    with pytest.raises(pl.ConfigError, match="num_microbatches=4 x dp=1 is not the 8"):
        parse("--resume", run, "--steps", "9", "--num-microbatches", "4")
    with pytest.raises(pl.ConfigError, match="num_microbatches=8 x dp=3 is not the 8"):
        parse("--resume", run, "--steps", "9", "--dp", "3")


@pytest.mark.parametrize("change", [["--pp", "4"], ["--schedule", "1f1b"], ["--vp", "1"]])
def test_a_run_of_a_plan_file_goes_on_with_another_plan(tmp_path, change):
    pl.plan("zb_v", pp=2, num_microbatches=4).to_csv(tmp_path / "plan.csv")
    run = resumable(tmp_path, plan=str(tmp_path / "plan.csv"))
    args = parse("--resume", run, "--steps", "9", *change)
    assert args.plan is None
    assert args.num_microbatches == 4
    assert parse("--resume", run, "--steps", "9").make_plan().placement == "v"


CONFIGS = {
    "run.toml": 'num-layers = 6\nlayout = "Ett|ttttL"\nschedule = "1f1b"\ndata = "text"\nlr = 1\n',
    "run.json": json.dumps(
        {"num_layers": 6, "layout": "Ett|ttttL", "schedule": "1f1b", "data": ["text"], "lr": 1}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_file_has_the_options_and_flags_win(tmp_path, name):
    file = tmp_path / name
    file.write_text(CONFIGS[name])
    args = parse("--config", str(file), "--lr", "0.5", "--no-recompute")
    assert (args.num_layers, args.lr, args.data, args.recompute) == (6, 0.5, ("text",), False)
    assert args.layout.layers(1, 0) == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        (
            "a.toml",
            "num_layer = 6",
            r"there is no option 'num_layer'\nhint: did you mean num_layers",
        ),
        ("a.toml", "layout_text = 'EtL'", "there is no option 'layout_text'"),
        ("a.toml", "vocab_size = 3", "there is no option 'vocab_size'"),
        ("a.toml", "steps = [", "is no TOML"),
        ("a.json", "{", "is no JSON"),
        ("a.json", "[1]", "holds no JSON object"),
        ("a.toml", "steps = 'ten'", "steps='ten' is not of type int"),
        ("a.toml", "\udcff", "can't be read"),
        ("a.toml", "num-layers = 6\nnum_layers = 5", "gives num_layers twice"),
        ("a.json", '{"steps": 1, "lr": 1, "steps": 2}', "is no JSON: 'steps' stands twice"),
        ("none.toml", None, "can't be read: No such file"),
    ],
)
def test_a_bad_configuration_file_is_named(tmp_path, name, text, named):
    file = tmp_path / name
    if text is not None:
        file.write_text(text, errors="surrogateescape")
    with pytest.raises(pl.ConfigError, match=named) as caught:
        parse("--config", str(file))
    assert "\nhint: " in str(caught.value)


def test_a_configuration_file_may_begin_with_a_byte_order_mark(tmp_path):
    for name, text in (("a.toml", "steps = 3"), ("a.json", '{"steps": 3}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert parse("--config", str(tmp_path / name)).steps == 3


def test_a_plan_that_is_a_flag_wins_over_the_files_pipeline(tmp_path):
    pl.plan("zb_v", pp=4, num_microbatches=6).save(tmp_path / "plan")
    (tmp_path / "a.toml").write_text("schedule = '1f1b'\npp = 2\nrecompute = true\nsteps = 3\n")
    args = parse("--config", str(tmp_path / "a.toml"), "--plan", str(tmp_path / "plan"))
    assert (args.schedule, args.pp, args.num_microbatches, args.steps) == ("zb_v", 4, 6, 3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--pp", "2"], "says pp itself, but pp=2 is given too"),
        (["--schedule", "1f1b"], "says schedule itself"),
        (["--num-microbatches", "4"], "hint: leave --num-microbatches out"),
        (["--recompute"], "says recompute itself"),
        (
            ["--num-microbatches-with-partial-activation-checkpoints", "0"],
            "says num_microbatches_with_partial_activation_checkpoints itself",
        ),
        (["--p2p", "fifo"], r"has its own sends and receives \(streams\), so p2p='fifo'"),
    ],
)
def test_a_plan_file_and_what_it_says_itself_are_a_contradiction(tmp_path, words, named):
    pl.plan("1f1b", pp=2, num_microbatches=4).lower("streams").save(tmp_path / "plan")
    with pytest.raises(pl.ConfigError, match=named):
        parse("--plan", str(tmp_path / "plan"), *words)


GUIDE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_guides_options_exist_and_its_file_is_read(tmp_path):
    text = GUIDE.read_text()
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    torchruns = {"--module", "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr"}
    others = {"--master-port", "--help", "--checkpoint", "--prompt", "--save"}
    flags = set(re.findall(r"--[a-z][a-z-]+", text))
    assert flags - torchruns - others <= known
    (tmp_path / "run.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.S)[1])
    assert parse("--config", str(tmp_path / "run.toml"), "--lr", "1e-3").schedule == "zb_v"


def test_tensorboard_that_is_not_installed_is_told_with_the_line_that_installs_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    with pytest.raises(pl.ConfigError, match="hint: pip install tensorboard"):
        TrainingArguments(tensorboard=True)


def test_tensorboard_gets_every_number_of_a_record(tmp_path, monkeypatch):
    told = []

    class Writer:
        def __init__(self, folder, purge_step):
            told.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("closed")

    stub = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    log = RunLog(tmp_path, first_step=2, steps=3, tensorboard=True, stream=io.StringIO())
    with log:
        log.record(StepRecord(3, loss=1.5, lr=0.1))
    assert told == [
        (tmp_path / "tensorboard", 3),
        *(("loss", 1.5, 3), ("lr", 0.1, 3)),
        "closed",
    ]


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    schedule = OptimizerParamScheduler(
        optimizer, lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12
    )
    rates = []
    for _ in range(16):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)
    assert rates[4:13] == sorted(rates[4:13], reverse=True)
    assert rates[12:] == [0.1] * 4
    other = OptimizerParamScheduler(optimizer, lr=9.0, min_lr=9.0, warmup_steps=0, decay_steps=0)
    other.load_state_dict({**schedule.state_dict(), "num_steps": 8})
    assert optimizer.param_groups[0]["lr"] == rates[8]


def test_matrices_decay_and_vectors_do_not():
    model = GPTModel(
        TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, add_bias_linear=True)
    )
    optimizer = make_optimizer(TrainingArguments(weight_decay=0.3), [model])
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_an_optimizer_of_nothing_takes_its_steps():
    make_optimizer(TrainingArguments(), [torch.nn.Identity()]).step()


def test_a_shared_parameter_counts_once():
    one = torch.nn.Linear(2, 2)
    two = torch.nn.Linear(2, 2)
    two.weight = one.weight
    two.bias.requires_grad_(False)
    assert [id(p) for p in parameters_of([one, two])] == [id(one.weight), id(one.bias)]


def record(folder, first_step, steps, numbers):
    stream = io.StringIO()
    run = RunLog(folder, first_step=first_step, steps=steps, log_interval=2, stream=stream)
    with run:
        for step in numbers:
            run.record(StepRecord(step, loss=10.0 - step, tokens_per_s=1234.5, bubble=0.125))
    return stream.getvalue().splitlines()


def test_the_log_shows_some_steps_and_stores_all(tmp_path):
    lines = record(tmp_path, 0, 5, [1, 2, 3, 4, 5])
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "4/5", "5/5"]
    assert lines[0] == "step 1/5  loss 9.0000  1,234 tokens/s  bubble 12.5 %"
    assert [r.step for r in read_losses(tmp_path)] == [1, 2, 3, 4, 5]
    assert read_losses(tmp_path)[0] == StepRecord(1, loss=9.0, tokens_per_s=1234.5, bubble=0.125)


def test_a_resume_drops_the_records_that_it_trains_again(tmp_path):
    record(tmp_path, 0, 6, [1, 2, 3, 4])
    record(tmp_path, 2, 6, [3])
    assert [r.step for r in read_losses(tmp_path)] == [1, 2, 3]


def test_half_a_line_of_a_full_disk_is_passed_over(tmp_path):
    record(tmp_path, 0, 6, [1, 2, 3])
    with (tmp_path / "loss.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    record(tmp_path, 3, 6, [4])
    assert [r.step for r in read_losses(tmp_path)] == [1, 2, 3, 4]


def test_the_records_of_a_run_are_not_lost_when_there_is_no_room_to_write_them_again(
    tmp_path, monkeypatch
):
    record(tmp_path, 0, 6, [1, 2, 3])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "write_durably", full)
    with pytest.raises(OSError, match="No space"):
        record(tmp_path, 2, 6, [])
    assert [r.step for r in read_losses(tmp_path)] == [1, 2, 3]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    with RunLog(tmp_path, steps=2) as run:
        run._file.close()
        run._file = open("/dev/full", "w")  # noqa: SIM115, PTH123 - closed by the log
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            run.record(StepRecord(1, loss=1.0))


def test_other_processes_say_and_store_nothing(capsys):
    with RunLog(None, steps=1) as run:
        run.say("text")
        run.record(StepRecord(1, loss=1.0))
    assert capsys.readouterr() == ("", "")


def turns(plan, durations):
    """Ops as one process runs them: ranks in turn, one op after another."""
    events, now = [], 0.0
    for rank in range(plan.pp):
        for op in plan.ops(rank):
            kind = "F" if "F" in op else "B"
            events.append(SimpleNamespace(rank=rank, op=op, start=now, end=now + durations[kind]))
            now += durations[kind]
    return events


@pytest.mark.parametrize(
    ("schedule", "shape", "makespan"),
    [
        ("1f1b", {"pp": 4, "num_microbatches": 4}, 21),
        ("gpipe", {"pp": 8, "num_microbatches": 1}, 24),
        ("interleaved_1f1b", {"pp": 4, "vp": 2, "num_microbatches": 8}, 57),
    ],
)
def test_ranks_that_took_turns_are_timed_side_by_side(schedule, shape, makespan):
    plan = pl.plan(schedule, **shape)
    events = turns(plan, {"F": 1.0, "B": 2.0})
    assert side_by_side(events, plan.num_stages) == makespan
    work = 3.0 * shape["num_microbatches"] * plan.vp
    assert busiest(events) == work


def test_options_are_added_without_torch():
    code = (
        "import argparse, sys\n"
        "from pipeloom.training.options import add_train_arguments, arguments_from\n"
        "from pipeloom.training.generate import add_generate_arguments\n"
        "import pipeloom.training.command, pipeloom.training.corpus\n"
        "parser = argparse.ArgumentParser()\n"
        "add_train_arguments(parser)\n"
        "arguments_from(parser.parse_args([]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
