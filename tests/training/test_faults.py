"""When it breaks: nothing is lost, and the last good checkpoint goes on exactly."""

import contextlib
import os
import re
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist

import pipeloom as pl
from pipeloom.training.checkpoint import require_whole, resolve_checkpoint
from pipeloom.training.errors import CheckpointError
from pipeloom.training.generate import load_model
from pipeloom.training.pretrain import forward_step
from pipeloom.training.processes import Processes

pytestmark = pytest.mark.dist
STEPS = 5
SMALL = {"num_layers": 2, "schedule": "1f1b", "steps": STEPS, "save_interval": 2}


def weights(folder):
    return load_model(folder).model.state_dict()


def trap(deed, *, rank, step):
    """A forward step in which one rank does something bad at the given step, after a checkpoint."""

    def forward(iterator, chunk, recompute=None):
        batch = next(iterator)
        if dist.get_rank() == rank and batch.step == step:
            deed()
        return forward_step(iter([batch]), chunk, recompute)

    return forward


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("deed", "named"),
    [(kill_self, "PeerLost: rank 0 stands at"), (stop_self, "PipelineTimeout: rank 0 stands at")],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_ends_the_run_and_the_checkpoint_goes_on(make_args, run, launch, deed, named):
    undisturbed = make_args(**SMALL, transport="torch")
    straight = launch(2, lambda: run(undisturbed))[0]
    args = make_args(**SMALL, transport="torch", timeout_s=2.0)
    body = trap(deed, rank=1, step=3)
    error, nothing = launch(2, lambda: run(args, body), victim=1)
    assert nothing is None
    assert error.startswith(named)
    assert re.search(r"from rank 1", error)
    kept = resolve_checkpoint(args.out)
    assert kept.name == "step-000002"
    assert sorted(path.name for path in kept.parent.iterdir()) == ["latest", "step-000002"]

    other = make_args(**{**SMALL, "schedule": "interleaved_1f1b"}, resume=str(kept))
    assert run(other)["losses"] == pytest.approx(straight["losses"][2:], rel=1e-5)

    again = make_args(**{**SMALL, "out": None}, transport="torch", resume=args.out)
    resumed = launch(2, lambda: run(again))[0]
    assert resumed["losses"] == straight["losses"]
    for name, value in weights(straight["folder"]).items():
        assert torch.equal(weights(resumed["folder"])[name], value), name


def test_a_rank_lost_between_steps_is_told(launch):
    def body():
        if dist.get_rank() == 1:
            kill_self()
        Processes(dist.group.WORLD).gather(1)

    error, _ = launch(2, body, victim=1)
    assert error.startswith("PeerLost: rank 0 lost another rank between two steps")
    assert error.endswith(
        "\nhint: look first at the rank that reports nothing; go on with --resume"
    )


@contextlib.contextmanager
def full_disk(num_bytes=4096):
    """No file can grow beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_full_disk_keeps_the_checkpoint_before(make_args, run):
    straight = run(make_args(**SMALL))
    args = make_args(**SMALL)

    def filling(iterator, chunk, recompute=None):
        batch = next(iterator)
        if batch.step == 3:
            fill_the_disk()
        return forward_step(iter([batch]), chunk, recompute)

    with (
        full_disk(1 << 30),
        pytest.raises(CheckpointError, match="step 4 can't be written") as told,
    ):
        run(args, filling)
    kept = resolve_checkpoint(args.out)
    assert f"the newest whole checkpoint is {kept}" in str(told.value)
    assert sorted(path.name for path in kept.parent.iterdir()) == ["latest", "step-000002"]
    resumed = run(make_args(**{**SMALL, "out": None}, resume=args.out))
    assert resumed["losses"] == straight["losses"]
    assert resumed["valid_loss"] == straight["valid_loss"]


def test_a_full_disk_of_one_rank_is_an_error_on_all(make_args, run, launch):
    args = make_args(**SMALL, transport="torch")
    body = trap(fill_the_disk, rank=1, step=3)
    errors = launch(2, lambda: run(args, body))
    for error in errors:
        assert re.match(r"CheckpointError: the checkpoint of step 4 can't be written", error)
    assert require_whole(resolve_checkpoint(args.out)).step == 2


def test_a_damaged_checkpoint_is_refused_and_the_one_before_goes_on(make_args, run):
    straight = run(make_args(**SMALL))
    stopped = run(make_args(**{**SMALL, "steps": 4}, lr_decay_steps=STEPS))
    latest = resolve_checkpoint(stopped["folder"])
    file = latest / "__0_0.distcp"
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)
    resume = {**SMALL, "out": None}
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp has changed") as told:
        run(make_args(**resume, resume=stopped["folder"]))
    before = str(told.value).rsplit("go on from the one before: ", 1)[1]
    assert before.endswith("step-000002")
    resumed = run(make_args(**resume, resume=before))
    assert resumed["losses"] == straight["losses"]
    assert require_whole(resolve_checkpoint(stopped["folder"])).step == STEPS


# What rank 1 is told otherwise, and how that shows.
DIFFERENCES = [
    ({"schedule": "gpipe"}, "schedule: rank 0 has '1f1b'; rank 1 has 'gpipe'"),
    ({"num_microbatches": 6}, "num_microbatches: rank 0 has 4; rank 1 has 6"),
    ({"pp": 4}, "pp: rank 0 has 2; rank 1 has 4"),
    ({"dp": 2}, "dp: rank 0 has 1; rank 1 has 2"),
    ({"layout_text": "Ett|L"}, "layout_text: rank 0 has None; rank 1 has 'Ett|L'"),
    ({"hidden_size": 32}, "hidden_size: rank 0 has 16; rank 1 has 32"),
    ({"num_layers": 3}, "num_layers: rank 0 has 2; rank 1 has 3"),
    ({"tie_embeddings": True}, "tie_embeddings: rank 0 has False; rank 1 has True"),
    ({"seq_length": 8}, "seq_length: rank 0 has 16; rank 1 has 8"),
    ({"micro_batch_size": 1}, "micro_batch_size: rank 0 has 2; rank 1 has 1"),
    ({"dtype": "bfloat16"}, "dtype: rank 0 has 'float32'; rank 1 has 'bfloat16'"),
    ({"seed": 7}, "seed: rank 0 has 1234; rank 1 has 7"),
    ({"lr": 0.01}, "lr: rank 0 has 0.006; rank 1 has 0.01"),
    ({"recompute": True}, "recompute: rank 0 has False; rank 1 has True"),
    ({"p2p": "fifo"}, "p2p: rank 0 has 'auto'; rank 1 has 'fifo'"),
]


def test_what_ranks_are_told_otherwise_is_one_error_on_each_before_the_first_step(
    make_args, run, launch, tmp_path
):
    common = {**SMALL, "transport": "torch", "out": str(tmp_path / "never")}
    (tmp_path / "other.txt").write_text("another text\n" * 200)
    table = [
        *DIFFERENCES,
        ({"data": (str(tmp_path / "other.txt"),)}, "data: rank 0 has "),
    ]

    def body():
        said = []
        for change, _ in table:
            args = make_args(**{**common, **(change if dist.get_rank() == 1 else {})})
            try:
                run(args)
            except pl.PlanError as error:
                said.append(f"unnamed {error}")
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    began = time.monotonic()
    first, second = launch(2, body)
    assert time.monotonic() - began < 30
    assert first == second
    assert not (tmp_path / "never").exists()
    for (change, named), text in zip(table, first, strict=True):
        lines = text.split("\n")
        assert lines[0] == "AgreementError: the ranks do not agree", (change, text)
        assert any(line.startswith(named) for line in lines[1:]), (change, text)
        assert lines[-1].startswith("hint: start every rank with the same options")


def test_an_error_of_one_rank_is_told_by_all(make_args, run, launch, tmp_path):
    def body():
        missing = {"data": (str(tmp_path / "none"),)} if dist.get_rank() == 1 else {}
        run(make_args(**SMALL, transport="torch", **missing))

    first, second = launch(2, body)
    assert re.match(r"AgreementError: rank 1 can't take part: DataError: .*no such file", first)
    assert second.startswith("DataError: ")
