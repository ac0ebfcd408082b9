"""`pipeloom train` and `pipeloom generate`, from the options to the text."""

import argparse
import json
import math
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import pipeloom as pl
from pipeloom.training import command
from pipeloom.training.checkpoint import resolve_checkpoint
from pipeloom.training.command import run_train
from pipeloom.training.errors import CheckpointError
from pipeloom.training.generate import (
    Sampling,
    add_generate_arguments,
    load_model,
    run_generate,
    sample_tokens,
)
from pipeloom.training.log import read_losses
from pipeloom.training.options import add_train_arguments

SMALL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--micro-batch-size", "4", "--num-microbatches", "4"),
    *("--eval-microbatches", "2"),
)


def parse(add, *words):
    parser = argparse.ArgumentParser()
    add(parser)
    parser.add_argument("--json", action="store_true")  # the command line adds it to all commands
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on text of one repeated line, long enough to know it."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("abcdefgh\n" * 2000)
    words = (*SMALL, "--data", str(text), "--out", str(folder / "run"))
    namespace = parse(add_train_arguments, *words, "--steps", "60", "--lr", "0.01")
    torch.manual_seed(0)
    assert run_train(namespace) == 0
    return folder / "run"


def test_the_model_says_what_it_was_trained_on(trained, capsys):
    words = ("--checkpoint", str(trained), "--prompt", "abc", "--temperature", "0")
    assert run_generate(parse(add_generate_arguments, *words, "--max-new-tokens", "60")) == 0
    # Longer than the context, so that it slides.
    assert capsys.readouterr().out.startswith(("abcdefgh\n" * 9)[:63])


def test_a_prompt_of_any_bytes_is_gone_on_from(trained, capsys):
    prompt = b"ab\xff".decode("utf-8", "surrogateescape")  # as Python gives words of the shell
    words = ("--checkpoint", str(trained), "--prompt", prompt, "--max-new-tokens", "3")
    assert run_generate(parse(add_generate_arguments, *words)) == 0
    assert capsys.readouterr().out.startswith("ab\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("temperature", [1e-6, 1e30])
def test_the_coldest_and_the_hottest_draw_are_of_numbers(trained, temperature):
    loaded = load_model(trained)
    sampling = Sampling(max_new_tokens=9, temperature=temperature)
    assert len(list(sample_tokens(loaded.model, [97], context=32, sampling=sampling))) == 9


def test_no_gpu_is_told_as_such(trained, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("--checkpoint", str(trained), "--device", "cuda")
    with pytest.raises(pl.ConfigError, match="torch sees no GPU"):
        run_generate(parse(add_generate_arguments, *words))


def test_json_has_tokens_and_text(trained, capsys):
    words = ("--checkpoint", str(trained), "--max-new-tokens", "9")
    run_generate(parse(add_generate_arguments, *words, "--json"))
    result = json.loads(capsys.readouterr().out)
    assert len(result["tokens"]) == 9
    assert result["text"].encode() == bytes(result["tokens"])


def test_a_seed_gives_the_same_text_and_another_seed_another(trained):
    model = load_model(trained).model

    def draw(**how):
        sampling = Sampling(max_new_tokens=40, temperature=3.0, top_k=0, **how)
        return list(sample_tokens(model, [97], context=32, sampling=sampling))

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)


def test_top_k_leaves_the_likeliest(trained):
    model = load_model(trained).model
    greedy = Sampling(max_new_tokens=20, temperature=0.0)
    one = Sampling(max_new_tokens=20, temperature=5.0, top_k=1)
    texts = [list(sample_tokens(model, [97], context=32, sampling=how)) for how in (greedy, one)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is below 1"),
        ({"temperature": -1.0}, r"temperature=-1\.0 is below 0"),
        ({"temperature": math.nan}, "temperature=nan is not 0, nor at least 1e-06 and finite"),
        ({"temperature": math.inf}, "temperature=inf is not 0"),
        ({"temperature": 1e-300}, "temperature=1e-300 is not 0"),
        ({"seed": 2**63}, r"seed=\d+ is not below 2\^63"),
        ({"top_k": -1}, "top_k=-1"),
    ],
)
def test_bad_sampling_is_named(fields, named):
    with pytest.raises(pl.ConfigError, match=named):
        Sampling(**fields)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    words = ("--checkpoint", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        run_generate(parse(add_generate_arguments, *words))


@pytest.mark.usefixtures("curves")
def test_the_end_of_a_run_says_where_everything_is(text, tmp_path, capsys):
    words = (*SMALL, "--data", str(text), "--steps", "2", "--out", str(tmp_path / "run"))
    assert run_train(parse(add_train_arguments, *words)) == 0
    out, progress = capsys.readouterr()
    for name in ("step-000002", "loss.jsonl", "loss.png", "loss.svg", "plan.svg", "trace.json"):
        assert name in out
    assert "held-out loss" in out
    assert "step 2/2  loss" in progress
    assert "bubble" in progress


def test_the_result_as_json_is_all_that_is_printed(text, tmp_path, capsys):
    words = (*SMALL, "--data", str(text), "--steps", "2", "--out", str(tmp_path / "run"))
    assert run_train(parse(add_train_arguments, *words, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in result["losses"]] == [1, 2, 2]
    assert result["valid_loss"] == result["losses"][-1]["valid_loss"]


def test_a_run_that_diverges_ends_in_an_error_not_a_traceback(text, tmp_path, capsys):
    words = (*SMALL, "--data", str(text), "--steps", "40", "--out", str(tmp_path / "run"))
    wild = ("--lr", "1e30", "--lr-warmup-steps", "0", "--clip-grad", "0")
    assert run_train(parse(add_train_arguments, *words, *wild)) == 1
    said = capsys.readouterr().err
    assert re.search(r"pipeloom: error: (loss|gradient norm) is (nan|inf) at step \d+", said)
    assert "hint: lower --lr" in said


def test_without_torch_the_error_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(pl.ConfigError, match="pip install 'pipeloom"):
        run_train(argparse.Namespace())


SCRIPT = """
import argparse, sys
from pipeloom.training.options import add_train_arguments
from pipeloom.training.command import run_train
parser = argparse.ArgumentParser()
add_train_arguments(parser)
sys.exit(run_train(parser.parse_args()))
"""


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_ends_a_run_at_once_and_keeps_the_last_whole_step(text, tmp_path, number, word):
    out = tmp_path / "run"
    words = (*SMALL, "--data", str(text), "--steps", "100000", "--save-interval", "5")
    command_line = [sys.executable, "-c", SCRIPT, *words, "--out", str(out)]
    with subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True) as run:
        try:
            deadline = time.monotonic() + 90
            while not (out / "checkpoints" / "latest").exists():
                assert time.monotonic() < deadline
                assert run.poll() is None, run.stderr.read()
                time.sleep(0.05)
            run.send_signal(number)
            _, said = run.communicate(timeout=20)
        finally:
            run.kill()
    assert run.returncode == 128 + number
    kept = resolve_checkpoint(out)
    step = int(kept.name.removeprefix("step-"))
    assert f"\n{word}: stopped after step {step}; last checkpoint: {kept}" in said
    assert read_losses(out)[-1].step in (step - 1, step)  # the step is over before it is told
    assert not [path for path in kept.parent.iterdir() if path.name.endswith(".partial")]
    load_model(kept)
