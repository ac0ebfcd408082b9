"""A thread a rank, and delayed messages: the same numbers, errors that end every rank."""

import threading
import time

import pytest
import torch

import pipeloom as pl
from pipeloom.runtime import (
    DelayedTransport,
    LocalTransport,
    Pipeline,
    PipelineError,
    PipelineTimeout,
    ThreadedTransport,
)
from pipeloom.runtime.delay import jitter

MASK = "num_microbatches_with_partial_activation_checkpoints"


def run(tools, plan, transport, **options):
    stages = tools.make_stages(plan.num_stages)
    inputs, targets = tools.make_data([3] * plan.num_microbatches)
    pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
    return pipeline.step(inputs, targets, **options), stages


@pytest.mark.parametrize(
    ("schedule", "pp", "vp", "m", "optional"),
    [
        ("1f1b", 2, 1, 5, {}),
        ("1f1b", 4, 1, 8, {MASK: 0}),
        ("interleaved_1f1b", 2, 2, 6, {}),
        ("looped_bfs", 2, 2, 4, {}),
        ("zb_v", 3, 2, 7, {}),
        ("dualpipe_v", 2, 2, 6, {}),
    ],
)
def test_threads_give_the_bits_of_one_thread(tools, schedule, pp, vp, m, optional):
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=m, **optional)
    one, mine = run(tools, plan, LocalTransport(pp))
    many, theirs = run(tools, plan, ThreadedTransport(pp, timeout_s=20))
    assert torch.equal(one.loss, many.loss)
    for p, q in zip(mine, theirs, strict=True):
        for a, b in zip(p.parameters(), q.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_ranks_compute_at_the_same_time(tools):
    """Both ranks must be inside a forward at once, or the barrier breaks."""
    both = threading.Barrier(2, timeout=20)

    class Meet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(tools.width, tools.width)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    class First(Meet):
        def forward(self, x):
            if self.calls == 1:  # rank 0's second forward beside rank 1's first
                both.wait()
            return super().forward(x)

    class Second(Meet):
        def forward(self, x):
            if self.calls == 0:
                both.wait()
            return super().forward(x)

    plan = pl.plan("1f1b", pp=2, num_microbatches=3)
    inputs, targets = tools.make_data([2] * 3)
    transport = ThreadedTransport(2, timeout_s=20)
    Pipeline(plan, [First(), Second()], tools.square_sum, transport=transport).step(inputs, targets)
    assert not both.broken


def test_settings_of_the_caller_hold_in_the_threads(tools):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    seen = []

    class Look(torch.nn.Linear):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return super().forward(x)

    stages = [Look(tools.width, tools.width) for _ in range(2)]
    inputs, targets = tools.make_data([2, 2])
    transport = ThreadedTransport(2, timeout_s=20)
    pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
    pipeline.evaluate(inputs, targets)
    assert set(seen) == {(False, False)}
    seen.clear()
    with torch.autocast("cpu", torch.float32, enabled=False):
        pipeline.step(inputs, targets)
    assert set(seen) == {(True, False)}


def test_a_failing_rank_ends_all(tools):
    class Broken(tools.Block):
        def forward(self, _):
            raise ZeroDivisionError("in a stage")

    plan = pl.plan("1f1b", pp=3, num_microbatches=4)
    stages = [*tools.make_stages(1), Broken(), *tools.make_stages(1)]
    inputs, targets = tools.make_data([2] * 4)
    transport = ThreadedTransport(3, timeout_s=60)
    pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in a stage") as caught:
        pipeline.step(inputs, targets)
    assert time.monotonic() - begin < 20
    assert "rank 1 stands at 1F0" in caught.value.__notes__[0]
    assert not [t for t in threading.enumerate() if t.name.startswith("pipeloom rank")]


def test_a_wait_past_the_limit_says_where_each_rank_stands(tools):
    class Slow(tools.Block):
        def forward(self, x):
            time.sleep(1.0)
            return super().forward(x)

    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    stages = [Slow(), *tools.make_stages(1)]
    inputs, targets = tools.make_data([2] * 2)
    transport = ThreadedTransport(2, timeout_s=0.2)
    pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
    with pytest.raises(PipelineTimeout, match=r"rank 1 stands at 1F0(.|\n)*hint:"):
        pipeline.step(inputs, targets)


def test_delayed_messages_come_late_and_in_order(tools):
    plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4)
    plain, mine = run(tools, plan, LocalTransport(2))
    more = jitter(0.002)

    def late_s(channel, key):
        return 0.003 + more(channel, key)

    late = DelayedTransport(ThreadedTransport(2, timeout_s=20), delay_s=late_s)
    delayed, theirs = run(tools, plan, late, record=True)
    assert torch.equal(plain.loss, delayed.loss)
    for p, q in zip(mine, theirs, strict=True):
        for a, b in zip(p.parameters(), q.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    ends = {event.op: event.end for event in delayed.events}
    starts = {event.op: event.start for event in delayed.events}
    for mb in range(4):  # a lower bound always holds, however busy the machine
        assert starts[f"1F{mb}"] - ends[f"0F{mb}"] >= 0.003


def test_a_delay_needs_a_transport_with_a_clock():
    with pytest.raises(PipelineError, match=r"LocalTransport(.|\n)*hint: use ThreadedTransport"):
        DelayedTransport(LocalTransport(2), delay_s=0.1)
    with pytest.raises(PipelineError, match=r"delay_s=-1(.|\n)*hint:"):
        DelayedTransport(ThreadedTransport(2), delay_s=-1)
