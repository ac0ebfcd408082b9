"""The same runs with one process a rank over gloo."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeloom.model import gpt_builder, model_provider
from pipeloom.profile import Profile
from pipeloom.training.checkpoint import resolve_checkpoint
from pipeloom.training.data import train_valid_test_datasets_provider
from pipeloom.training.generate import load_model
from pipeloom.training.pretrain import forward_step, pretrain

pytestmark = pytest.mark.dist
GPT = partial(model_provider, gpt_builder)


def run(args, forward_step_func=forward_step):
    result = pretrain(train_valid_test_datasets_provider, GPT, forward_step_func, args=args)
    return {
        "losses": [record.loss for record in result.losses if record.loss is not None],
        "valid_loss": result.valid_loss,
        "folder": str(result.folder),
        "written": [path is not None and path.exists() for path in (result.trace,)],
    }


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


def launch(folder, pp, body):
    """Forks `pp` processes; what each left, result or error."""
    folder.mkdir()
    context = mp.get_context("fork")
    processes = [
        context.Process(target=child, args=(rank, pp, str(folder), body)) for rank in range(pp)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        if process.is_alive():
            process.kill()
            pytest.fail("a process hangs")
    return [torch.load(folder / str(rank)) for rank in range(pp)]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_processes_train_the_model_that_one_process_trains(make_args, tmp_path, tied):
    fields = {"vp": 2, "tie_embeddings": tied, "hidden_dropout": 0.1}
    local = run(make_args(**fields))
    args = make_args(**fields, transport="torch")
    first, second = launch(tmp_path / "processes", 2, lambda: run(args))
    assert first["losses"] == local["losses"]
    assert first["valid_loss"] == second["valid_loss"] == local["valid_loss"]
    assert first["written"] == [True]
    ours, theirs = (load_model(each["folder"]).model.state_dict() for each in (first, local))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)


def test_processes_are_profiled_on_one_clock(make_args, tmp_path, require_sense):
    args = make_args(vp=2, steps=2, transport="torch", profile=True)
    folder = launch(tmp_path / "processes", 2, lambda: run(args))[0]["folder"]
    profile = Profile.load(folder)
    assert profile.side_by_side
    assert len(profile.steps) == 2
    require_sense(profile, args.make_plan())


def test_a_checkpoint_of_processes_goes_on_in_one_process_and_back(make_args, tmp_path):
    straight = run(make_args(vp=2, steps=6))
    args = make_args(vp=2, steps=2, lr_decay_steps=6, transport="torch")
    folder = launch(tmp_path / "a", 2, lambda: run(args))[0]["folder"]
    run(make_args(schedule="1f1b", steps=4, resume=folder, out=None, lr_decay_steps=6))
    args = make_args(vp=2, steps=6, resume=folder, out=None, transport="torch")
    last = launch(tmp_path / "b", 2, lambda: run(args))[0]
    assert last["losses"] == pytest.approx(straight["losses"], rel=1e-5)
    assert last["valid_loss"] == pytest.approx(straight["valid_loss"], rel=1e-5)


def test_a_loss_that_is_not_finite_ends_all_processes(make_args, tmp_path):
    def poisoned(iterator, chunk, recompute=None):
        batch = next(iterator)
        output, loss_func = forward_step(iter([batch]), chunk, recompute)
        return output * (float("nan") if batch.step == 2 else 1.0), loss_func

    args = make_args(steps=4, save_interval=2, transport="torch")
    errors = launch(tmp_path / "processes", 2, lambda: run(args, poisoned))
    assert all(error.startswith("DivergedError: loss is nan at step 3") for error in errors)
    assert resolve_checkpoint(args.out).name == "step-000002"


def test_an_error_of_the_first_process_is_raised_on_all(make_args, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    args = make_args(out=str(taken), transport="torch")
    errors = launch(tmp_path / "processes", 2, lambda: run(args))
    assert all("CheckpointError" in error and "not an empty folder" in error for error in errors)


def test_another_number_of_processes_than_ranks_is_refused(make_args, tmp_path):
    args = make_args(pp=4, schedule="1f1b", transport="torch")
    errors = launch(tmp_path / "processes", 2, lambda: run(args))
    assert all("2 processes for pp=4 ranks" in error for error in errors)
