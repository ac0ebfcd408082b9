"""What `train --profile` records, alone and with one process a rank."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import pipeloom as pl
from pipeloom.model import gpt_builder, model_provider
from pipeloom.profile import Profile
from pipeloom.training import profiling
from pipeloom.training.data import train_valid_test_datasets_provider
from pipeloom.training.log import read_losses
from pipeloom.training.pretrain import pretrain
from pipeloom.training.profiling import clock_offset


def profiled(args):
    provider = partial(model_provider, gpt_builder)
    return pretrain(train_valid_test_datasets_provider, provider, args=args)


def test_a_run_in_one_process_is_profiled(make_args, monkeypatch, require_sense):
    monkeypatch.setattr(profiling, "MAX_STEPS", 2)
    args = make_args(steps=3, profile=True, vp=2)
    result = profiled(args)
    profile = Profile.load(result.folder)
    assert result.to_dict()["profile"] == str(result.profile)
    assert profile.plan == args.make_plan()
    assert not profile.side_by_side
    assert [step.number for step in profile.steps] == [2, 3]
    require_sense(profile, args.make_plan())
    costs = pl.Costs.from_profile(result.folder)
    assert len(costs.forward) == len(costs.backward) == 4
    assert min(costs.forward + costs.backward) > 0
    # What is drawn is the replayed step: its parts are the measured ones.
    assert profile.plan.simulate(costs).makespan > 0
    for record in read_losses(result.folder)[:3]:
        assert record.bubble == min(record.bubbles)
        assert all(0 <= bubble < 1 for bubble in record.bubbles)
        assert len(record.waits_s) == 2


def test_a_plan_with_transfers_is_profiled_by_its_computation(make_args, tmp_path):
    plan = pl.plan("1f1b", pp=2, num_microbatches=4)
    plan.lower("batched").save(tmp_path / "lowered.plan")
    result = profiled(make_args(steps=1, profile=True, plan=str(tmp_path / "lowered.plan")))
    profile = Profile.load(result.folder)
    assert profile.plan == plan
    assert (result.folder / "trace.json").exists()
    assert "replayed" in profile.drawing().headline


def test_without_profile_there_is_none(make_args, refused):
    result = profiled(make_args(steps=1))
    assert result.profile is None
    refused(pl.ParseError, lambda: Profile.load(result.folder), "--profile")


class Peers:
    """Two processes whose clocks differ; a gather takes a while and ends after both are in."""

    index, count = 1, 2

    def __init__(self, ahead_s):
        self.ahead_s, self.now = ahead_s, 1000.0
        self.entered = None

    def clock(self):
        self.now += 1e-6
        return self.now + self.ahead_s

    def gather(self, value):
        if value is None:
            self.entered, self.now = self.now, self.now + 0.002
            return [None, None]
        # The first process entered a little earlier and left a little later.
        return [(self.entered - 0.001, self.now + 0.001), value]


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -0.5])
def test_clocks_are_aligned_within_the_time_of_a_gather(ahead_s, monkeypatch):
    peers = Peers(ahead_s)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=peers.clock))
    found = clock_offset(peers)
    assert found == pytest.approx(ahead_s, abs=0.003)
    if ahead_s == 0:
        assert found == 0


def test_ops_have_their_names_in_torchs_profiler(make_args):
    args = make_args(steps=1, vp=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        profiled(args)
    names = {event.key for event in profiler.key_averages()}
    plan = args.make_plan()
    assert {f"rank {rank} {op}" for rank in range(2) for op in plan.ops(rank)} <= names
