"""The same runs with one process a rank over gloo."""

import pytest
import torch

import pipeloom as pl
from pipeloom.profile import Profile
from pipeloom.training.checkpoint import resolve_checkpoint
from pipeloom.training.generate import load_model
from pipeloom.training.pretrain import forward_step

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_processes_train_the_model_that_one_process_trains(make_args, run, launch, tied):
    fields = {"vp": 2, "tie_embeddings": tied, "hidden_dropout": 0.1}
    local = run(make_args(**fields))
    args = make_args(**fields, transport="torch")
    first, second = launch(2, lambda: run(args))
    assert first["losses"] == local["losses"]
    assert first["valid_loss"] == second["valid_loss"] == local["valid_loss"]
    assert first["written"] == [True]
    ours, theirs = (load_model(each["folder"]).model.state_dict() for each in (first, local))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (3, 1), (2, 2)])
def test_processes_train_sequences_in_pieces(make_args, run, launch, pp, dp):
    one = run(make_args(schedule="1f1b", num_microbatches=4))
    fields = {"schedule": "seq1f1b", "num_seq_pieces": 3, "transport": "torch"}
    args = make_args(pp=pp, dp=dp, num_microbatches=4 // dp, **fields)
    first, *others = launch(pp * dp, lambda: run(args))
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert first["valid_loss"] == pytest.approx(one["valid_loss"], rel=1e-5)
    assert all(other["valid_loss"] == first["valid_loss"] for other in others)


def test_processes_are_profiled_on_one_clock(make_args, run, launch, require_sense):
    args = make_args(vp=2, steps=2, transport="torch", profile=True)
    folder = launch(2, lambda: run(args))[0]["folder"]
    profile = Profile.load(folder)
    assert profile.side_by_side
    assert len(profile.steps) == 2
    require_sense(profile, args.make_plan())


def test_a_checkpoint_of_processes_goes_on_in_one_process_and_back(make_args, run, launch):
    straight = run(make_args(vp=2, steps=6))
    args = make_args(vp=2, steps=2, lr_decay_steps=6, transport="torch")
    folder = launch(2, lambda: run(args))[0]["folder"]
    run(make_args(schedule="1f1b", steps=4, resume=folder, out=None, lr_decay_steps=6))
    args = make_args(vp=2, steps=6, resume=folder, out=None, transport="torch")
    last = launch(2, lambda: run(args))[0]
    assert last["losses"] == pytest.approx(straight["losses"], rel=1e-5)
    assert last["valid_loss"] == pytest.approx(straight["valid_loss"], rel=1e-5)


def test_a_loss_that_is_not_finite_ends_all_processes(make_args, run, launch):
    def poisoned(iterator, chunk, recompute=None):
        batch = next(iterator)
        output, loss_func = forward_step(iter([batch]), chunk, recompute)
        return output * (float("nan") if batch.step == 2 else 1.0), loss_func

    args = make_args(steps=4, save_interval=2, transport="torch")
    errors = launch(2, lambda: run(args, poisoned))
    assert all(error.startswith("DivergedError: loss is nan at step 3") for error in errors)
    assert resolve_checkpoint(args.out).name == "step-000002"


def test_an_error_of_the_first_process_is_raised_on_all(make_args, run, launch, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    args = make_args(out=str(taken), transport="torch")
    errors = launch(2, lambda: run(args))
    assert all("CheckpointError" in error and "not an empty folder" in error for error in errors)


def test_another_number_of_processes_than_ranks_is_refused(make_args, run, launch):
    args = make_args(pp=4, schedule="1f1b", transport="torch")
    errors = launch(2, lambda: run(args))
    assert all("2 processes for pp=4 ranks" in error for error in errors)


def test_data_parallel_pipelines_train_the_model_that_one_process_trains(make_args, run, launch):
    """pp 2 x dp 2, with twice the microbatches in the one process: the same step."""
    fields = {"schedule": "zb_h1", "hidden_dropout": 0.1, "tie_embeddings": True, "steps": 3}
    local = run(make_args(**fields, num_microbatches=4))
    args = make_args(**fields, num_microbatches=2, dp=2, transport="torch")
    all_four = launch(4, lambda: run(args))
    assert {each["valid_loss"] for each in all_four} == {all_four[0]["valid_loss"]}
    assert all_four[0]["losses"] == pytest.approx(local["losses"], rel=1e-6)
    ours, theirs = (load_model(each["folder"]).model.state_dict() for each in (all_four[0], local))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
    resume = {"resume": all_four[0]["folder"], "steps": 5, "out": None}
    alone = run(make_args(**{**fields, **resume}, num_microbatches=4))
    straight = run(make_args(**{**fields, "steps": 5}, lr_decay_steps=3))
    assert alone["losses"] == pytest.approx(straight["losses"], rel=1e-5)


def test_data_parallel_pipelines_need_processes(make_args, run):
    with pytest.raises(pl.ConfigError, match=r"dp=2 pipelines need 4 processes, this is one"):
        run(make_args(dp=2))
