"""Every example runs, and Hugging Face models split by them equal the whole ones."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipeloom as pl
from pipeloom.runtime import Pipeline

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def need_transformers():
    pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    """As its own process, and without a word on stderr."""
    if path.stem.startswith("hf"):
        need_transformers()
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_two_modules_learn(capsys):
    losses = load("two_modules").main()
    assert losses[-1] < 0.2 * losses[0]
    assert "evaluation  loss" in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [
        "two_modules",
        pytest.param("hf_gpt2", marks=pytest.mark.slow),
        pytest.param("hf_llama", marks=pytest.mark.slow),
    ],
)
def test_examples_print_the_same_losses_under_torchrun(name):
    if name.startswith("hf"):
        need_transformers()
    script = EXAMPLES / f"{name}.py"
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=True
    )
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks = subprocess.run(
        [sys.executable, "-m", *command, script], capture_output=True, text=True, timeout=100,
        check=True,
    )  # fmt: skip
    assert "loss" in alone.stdout
    assert sorted(ranks.stdout.splitlines()) == sorted(alone.stdout.splitlines())


SCHEDULES = [("1f1b", 1), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
@pytest.mark.parametrize(("schedule", "vp"), SCHEDULES)
def test_split_model_equals_the_whole_one(name, schedule, vp):
    """Bitwise the loss of the model's own forward; gradients within 1e-6 of the largest."""
    need_transformers()
    example = load(name)
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4)
    layout = pl.Layout.even(6, pp=2, vp=vp, placement=plan.placement)
    whole, _ = example.build(layout)
    model, chunks = example.build(layout)
    if name == "hf_gpt2":
        tokens = torch.randint(0, 97, (8, 17), generator=torch.Generator().manual_seed(1))
        inputs, labels, count = tokens[:, :-1], tokens[:, 1:], torch.numel
        own = [{"input_ids": part} for part in inputs.chunk(4)]
    else:
        inputs, labels = example.batch()
        count = example.count
        masks = inputs["mask"].chunk(4)
        own = [
            {"input_ids": part, "attention_mask": mask}
            for part, mask in zip(inputs["x"].chunk(4), masks, strict=True)
        ]
    scale = 1.0 / count(labels)
    total = None
    for arguments, goal in zip(own, labels.chunk(4), strict=True):
        loss = example.loss_sum(whole(**arguments, use_cache=False).logits, goal)
        loss.backward(torch.full_like(loss, scale))
        scaled = loss.detach() * scale
        total = scaled if total is None else total + scaled
    result = Pipeline(plan, chunks, example.loss_sum, count=count).step(inputs, labels)
    assert torch.equal(result.loss, total)
    true = dict(whole.named_parameters())
    for key, p in model.named_parameters():
        bound = 1e-6 * float(true[key].grad.abs().max())
        torch.testing.assert_close(p.grad, true[key].grad, rtol=0, atol=bound)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
