"""Ctrl-C, SIGTERM and SIGHUP: the last whole step is kept, and nothing is torn."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from pipeloom.training.checkpoint import require_whole, resolve_checkpoint
from pipeloom.training.generate import load_model
from pipeloom.training.interrupts import Interrupted, Interrupts
from pipeloom.training.pretrain import forward_step

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
FIELDS = {"num_layers": 2, "schedule": "1f1b", "steps": 5}


@pytest.fixture(autouse=True)
def default_handlers():
    """As at the start of a process, whatever the test runner has set."""
    usual = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(*pair) for pair in zip(SIGNALS, usual, strict=True)]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_at_once_or_at_the_end_of_a_hold(number):
    done = []
    with Interrupts(alone=True) as interrupts:

        def write():
            with interrupts.hold():
                signal.raise_signal(number)
                done.append("written")

        with pytest.raises(Interrupted) as told:
            write()
        assert told.value.number == number
        assert done == ["written"]
        with interrupts.hold():
            done.append("again")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_the_callers_own_stay():
    seen = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with Interrupts(alone=True):
        signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]


def test_one_of_several_notes_the_first_sigterm():
    with Interrupts(alone=False) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.asked == signal.SIGTERM
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def signalled(number, step, rank=None):
    """A forward step in which a process gets a signal in the middle of a step."""

    def forward(iterator, chunk, recompute=None):
        batch = next(iterator)
        here = rank is None or dist.get_rank() == rank
        if here and batch.step == step and batch.number == 2:
            os.kill(os.getpid(), number)
        return forward_step(iter([batch]), chunk, recompute)

    return forward


def same_weights(first, second):
    ours, theirs = (load_model(folder).model.state_dict() for folder in (first, second))
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("number", SIGNALS)
def test_one_process_keeps_the_last_whole_step(make_args, run, number):
    straight = run(make_args(**FIELDS))
    args = make_args(**FIELDS)
    said = r"^stopped after step 3; last checkpoint: .*step-000003$"
    with pytest.raises(Interrupted, match=said) as told:
        run(args, signalled(number, step=3))
    assert told.value.number == number
    resumed = run(make_args(**{**FIELDS, "out": None}, resume=args.out))
    assert resumed["losses"] == straight["losses"]
    assert same_weights(resumed["folder"], straight["folder"])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_optimizer_writes_waits_for_its_end(make_args, run, number, monkeypatch):
    args = make_args(**FIELDS)
    step = torch.optim.AdamW.step
    calls = []

    def stepping(self, *given):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", stepping)
        with pytest.raises(Interrupted, match=r"after step 2; last checkpoint: .*step-000002"):
            run(args)
    assert require_whole(resolve_checkpoint(args.out)).step == 2


@pytest.mark.dist
def test_sigterm_of_one_process_ends_all_at_the_end_of_the_step(make_args, run, launch):
    """Nothing is lost, though one process alone can't save: all end the step and save together."""
    undisturbed, args = (make_args(**FIELDS, transport="torch") for _ in range(2))
    straight = launch(2, lambda: run(undisturbed))[0]
    body = signalled(signal.SIGTERM, step=2, rank=1)
    errors = launch(2, lambda: run(args, body))
    kept = resolve_checkpoint(args.out)
    said = f"Interrupted: stopped after step 3; last checkpoint: {kept}"
    assert errors == [said, said]
    assert kept.name == "step-000003"
    again = make_args(**{**FIELDS, "out": None}, transport="torch", resume=args.out)
    resumed = launch(2, lambda: run(again))[0]
    assert resumed["losses"] == straight["losses"]
    assert same_weights(resumed["folder"], straight["folder"])
