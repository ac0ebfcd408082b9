"""The rows about slow links: stages that sleep in place of computing, so that cores don't matter.

A stage sleeps its forward, its input gradient and its weight gradient; ranks are threads; a courier
delays messages. What is measured is then the runtime's order and waiting alone.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.runtime import DelayedTransport, LocalTransport, Pipeline, ThreadedTransport
from pipeloom.runtime.delay import jitter
from runtime import Timed, gpt, race

if TYPE_CHECKING:
    from pipeloom.runtime import Channel, Key
    from pipeloom.runtime.executor import Event

UNIT_S = 0.004
"""Seconds of F, I and W of a sleeping rank, shared by its chunks."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient.clone(), None, None


class SleepingStage(nn.Module):
    """Adds a parameter to its input; F, I and W take `unit_s` each."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.unit_s = unit_s

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.unit_s, self.unit_s) + _Sleep.apply(self.bias, 0.0, self.unit_s)


class WaitedSends(ThreadedTransport):
    """A link whose sends are waited for before the next op, as a synchronous runtime does."""

    def __init__(self, pp: int, delay_s: float) -> None:
        super().__init__(pp)
        self.delay_s = delay_s

    def send(self, channel: Channel, key: Key, value: Any, *, announce: bool) -> None:
        time.sleep(self.delay_s)
        super().send(channel, key, value, announce=announce)


def sleeping_step(plan: pl.Plan, transport: Any, order: str = "plan") -> Any:
    """A step of sleeping stages; gives its events."""
    m, unit_s = plan.num_microbatches, UNIT_S / plan.vp
    stages = [SleepingStage(unit_s) for _ in range(plan.num_stages)]
    data = [torch.ones(1, 4, requires_grad=i < 0) for i in range(m)]
    pipeline = Pipeline(
        plan,
        stages,
        lambda y, t: (y - t).sum(),
        transport=transport,
        boundary_shape=(1, 4),
        order=order,
    )
    return lambda: pipeline.step(data, data, loss_scale=1.0, record=True)


OVERLAP = {"pp": 4, "num_microbatches": 24}
OVERLAP_DELAY_S = 0.6 * UNIT_S


def overlap(reps: int) -> Timed:
    """Steps of eager 1F1B on a link of no delay, of a delay below a forward, and if waited for.

    Contestants that end in `steady` are the steady phase of the step of that name, by its trace.
    """
    plan, pp = pl.plan("eager_1f1b", **OVERLAP), OVERLAP["pp"]
    delayed = DelayedTransport(ThreadedTransport(pp), delay_s=OVERLAP_DELAY_S)
    contestants = {
        "no delay": sleeping_step(plan, ThreadedTransport(pp)),
        "delay": sleeping_step(plan, delayed),
        "waited": sleeping_step(plan, WaitedSends(pp, OVERLAP_DELAY_S)),
    }
    traces: dict[str, list[float]] = {f"{name} steady": [] for name in contestants}

    def traced(name: str) -> Any:
        return lambda: traces[f"{name} steady"].append(steady_s(contestants[name]().events))

    seconds = race({name: traced(name) for name in contestants}, reps, barrier=lambda: None)
    return Timed(seconds | {name: times[1:] for name, times in traces.items()})


def steady_s(events: list[Event]) -> float:
    """Seconds from a rank's first backward to its last forward; of all ranks the most."""
    spans = []
    for rank in {event.rank for event in events}:
        own = [event for event in events if event.rank == rank]
        begin = min(event.start for event in own if "B" in event.op)
        spans.append(max(event.end for event in own if "F" in event.op) - begin)
    return max(spans)


JITTER = {"mean_s": UNIT_S / 2, "share": 0.1}
"""One message in ten is late, by five ops on average."""
PLANS = {
    "1f1b": {"pp": 4, "num_microbatches": 16},
    "interleaved_1f1b": {"pp": 4, "vp": 2, "num_microbatches": 16},
    "zb_h2": {"pp": 4, "num_microbatches": 16},
    "zb_v": {"pp": 4, "num_microbatches": 16},
    "dualpipe_v": {"pp": 4, "num_microbatches": 16},
}


def late_messages(reps: int, *, late: bool) -> Timed:
    """Steps in the plan's order and ready-first; both see the same delays, new ones each time."""
    contestants = {}
    for name, shape in PLANS.items():
        plan = pl.plan(name, **shape)
        for order in ("plan", "ready"):
            transport = DelayedTransport(ThreadedTransport(plan.pp), delay_s=0.0)
            step = sleeping_step(plan, transport, order)
            contestants[f"{name} {order}"] = _redrawn(step, transport) if late else step
    return Timed(race(contestants, reps, barrier=lambda: None))


def _redrawn(step: Any, transport: DelayedTransport) -> Any:
    seeds = itertools.count()

    def run() -> None:
        transport.delay_s = jitter(**JITTER, seed=next(seeds))
        step()

    return run


def threads(reps: int) -> Timed:
    """A GPT's step by a thread a rank; by one thread, whose kernels use one core or two."""
    pp, cores = 2, torch.get_num_threads()
    contestants = {
        "threads": _gpt_step(ThreadedTransport(pp, torch_threads=1), cores),
        "one core": _gpt_step(LocalTransport(pp), 1),
        "kernels": _gpt_step(LocalTransport(pp), pp),
    }
    try:
        return Timed(race(contestants, reps, barrier=lambda: None))
    finally:
        torch.set_num_threads(cores)


def _gpt_step(transport: Any, cores: int) -> Any:
    """A step whose kernels use so many cores."""
    work = gpt(2)
    plan = pl.plan("1f1b", pp=2, num_microbatches=len(work.inputs))
    pipeline = Pipeline(plan, work.stages, work.loss, transport=transport)

    def run() -> None:
        torch.set_num_threads(cores)
        pipeline.step(work.inputs, work.targets, loss_scale=1.0)

    return run
