"""A small text, small runs, and the same with one process a rank."""

import itertools
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeloom.model import gpt_builder, model_provider
from pipeloom.training import artifacts
from pipeloom.training.arguments import TrainingArguments
from pipeloom.training.data import train_valid_test_datasets_provider
from pipeloom.training.pretrain import forward_step, pretrain

GPT = partial(model_provider, gpt_builder)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def curves():
    """Asks for loss curves, which take matplotlib seconds to draw."""


@pytest.fixture(autouse=True)
def few_curves(monkeypatch, request):
    if "curves" not in request.fixturenames:
        monkeypatch.setattr(artifacts, "draw_loss_curve", lambda *_, **__: [])


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(8):
        lines = [f"line {n} of file {number}: {n * number}\n" for n in range(60)]
        (folder / f"file{number}.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def make_args(text, tmp_path):
    """Arguments of a run of a few steps; the folder is new unless it is resumed."""
    count = iter(range(100))

    def make(**changes):
        small = {
            "num_layers": 4,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "seq_length": 16,
            "micro_batch_size": 2,
            "num_microbatches": 4,
            "steps": 4,
            "lr_warmup_steps": 2,
            "eval_microbatches": 3,
            "save_interval": 0,
            "data": (str(text),),
            "out": str(tmp_path / f"run{next(count)}"),
        }
        return TrainingArguments(**{**small, **changes})

    return make


@pytest.fixture
def require_sense():
    """Checks that the times of a profile could be those of its plan."""

    def check(profile, plan):
        """Ops of a rank follow each other; an op starts after what it reads has ended."""
        ends = {}
        for step in profile.steps:
            for rank in range(plan.pp):
                times = zip(plan.ops(rank), step.start[rank], step.end[rank], strict=True)
                for op, start, end in times:
                    ends[op] = (start, end)
                for (_, end), (start, _) in itertools.pairwise(
                    zip(step.start[rank], step.end[rank], strict=True)
                ):
                    assert end <= start
            for microbatch in range(plan.num_microbatches):
                for stage in range(1, plan.num_stages):
                    assert ends[f"{stage - 1}F{microbatch}"][1] <= ends[f"{stage}F{microbatch}"][0]
                    assert ends[f"{stage}B{microbatch}"][1] <= ends[f"{stage - 1}B{microbatch}"][0]

    return check


def run_one(args, forward_step_func=forward_step):
    """Trains; what the run ended with, as plain values that go through a file."""
    result = pretrain(train_valid_test_datasets_provider, GPT, forward_step_func, args=args)
    return {
        "losses": [record.loss for record in result.losses if record.loss is not None],
        "valid_loss": result.valid_loss,
        "folder": str(result.folder),
        "written": [path is not None and path.exists() for path in (result.trace,)],
    }


@pytest.fixture
def run():
    return run_one


def child(rank, pp, folder, body):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=pp)
    try:
        outcome = body()
    except BaseException as error:
        torch.save(f"{type(error).__name__}: {error}", f"{folder}/{rank}")
        os._exit(3)
    torch.save(outcome, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def launch(tmp_path):
    """Forks ranks that run a body; gives what each left: its result, its error, or None."""
    folders = (tmp_path / f"processes{number}" for number in itertools.count())

    def start(pp, body, *, victim=None):
        """A victim kills or stops itself: it is waited for last, and leaves nothing."""
        folder = next(folders)
        folder.mkdir()
        context = mp.get_context("fork")
        processes = [
            context.Process(target=child, args=(rank, pp, str(folder), body)) for rank in range(pp)
        ]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank == victim:
                continue
            process.join(60)
            if process.is_alive():
                process.kill()
                pytest.fail(f"rank {rank} hangs")
        if victim is not None:
            processes[victim].kill()
            processes[victim].join()
        files = [folder / str(rank) for rank in range(pp)]
        return [torch.load(file) if file.exists() else None for file in files]

    return start
