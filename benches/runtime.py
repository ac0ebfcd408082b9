"""The rows about running plans: a step of ours and of torch's, in turns, in forked processes.

Ratios within one run are the figures: a busy machine slows both sides alike. Every row gives
medians; `best` has the least of each side.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import peers
import pipeloom as pl
from pipeloom.model import GPTModel, TransformerConfig
from pipeloom.runtime import Pipeline
from pipeloom.runtime.distributed import TorchTransport

if TYPE_CHECKING:
    from collections.abc import Callable

Step = "Callable[[], object]"
TORCH_CLASSES = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
MASK = "num_microbatches_with_partial_activation_checkpoints"
LIMIT_S = 300.0
BUDGET_S = 90.0
"""Of one race; a step more than fits is not begun."""


@dataclass(frozen=True)
class Workload:
    """A model in stages, its microbatches and its loss."""

    stages: list[nn.Module]
    inputs: list[Tensor]
    targets: list[Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def tiny(num_stages: int, m: int) -> Workload:
    """Stages whose computation is next to nothing."""
    torch.manual_seed(0)
    data = [torch.randn(1, 16) for _ in range(2 * m)]
    stages: list[nn.Module] = [nn.Linear(16, 16) for _ in range(num_stages)]
    return Workload(stages, data[:m], data[m:], lambda y, t: (y - t).square().sum())


class GPTStage(nn.Module):
    """A GPT chunk as a function of one tensor: tokens or hidden states."""

    def __init__(self, gpt: GPTModel, *, recompute: bool = False) -> None:
        super().__init__()
        self.gpt = gpt
        self.recompute = recompute

    def run(self, x: Tensor) -> Tensor:
        if self.gpt.pre_process:
            return self.gpt(tokens=x)
        self.gpt.set_input_tensor(x)
        return self.gpt()

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)


def gpt(num_stages: int, *, layers: int = 8, hidden: int = 256, m: int = 8) -> Workload:
    """8 layers, hidden 256, 8 microbatches of 2 sequences of 128 tokens, vocabulary 1024."""
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=4,
        vocab_size=1024,
        pipeline_model_parallel_size=num_stages,
    )
    last = num_stages - 1
    stages: list[nn.Module] = [
        GPTStage(GPTModel(config, pp_rank=s, pre_process=s == 0, post_process=s == last))
        for s in range(num_stages)
    ]
    torch.manual_seed(0)
    data = [torch.randint(1024, (2, 128)) for _ in range(2 * m)]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.reshape(-1, 1024), target.reshape(-1), reduction="sum")

    return Workload(stages, data[:m], data[m:], loss)


def one_process(work: Workload) -> Step:
    """The unpipelined model, its microbatches one after another."""
    engine = torch.autograd.Variable._execution_engine.run_backward

    def step() -> None:
        for x, target in zip(work.inputs, work.targets, strict=True):
            for stage in work.stages:
                x = stage(x)
            loss = work.loss(x, target)
            engine((loss,), (torch.ones_like(loss),), False, False, (), True, True)

    return step


def our_step(
    work: Workload, name: str, pp: int, vp: int, *, recompute: bool, **options: Any
) -> Step:
    plan = pl.plan(
        name,
        pp=pp,
        vp=vp,
        num_microbatches=len(work.inputs),
        **({MASK: 0} if recompute else {}),
    )
    shape = tuple(boundary_of(work))
    pipeline = Pipeline(plan, work.stages, work.loss, boundary_shape=shape, **options)
    return lambda: pipeline.step(work.inputs, work.targets, loss_scale=1.0)


def boundary_of(work: Workload) -> torch.Size:
    with torch.no_grad():
        return work.stages[0](work.inputs[0]).shape


def torch_step(work: Workload, name: str, pp: int, vp: int, rank: int, *, recompute: bool) -> Step:
    """The peer: the same modules in `torch.distributed.pipelining`."""
    if not peers.installed("torch").startswith(peers.TORCH):
        raise peers.MissingPeerError(f"torch {peers.TORCH} is needed")
    from torch.distributed import pipelining

    number = pp * vp
    on_v = name in ("zb_v", "dualpipe_v")
    mine = [rank, number - 1 - rank] if on_v else list(range(rank, number, pp))
    for stage in work.stages:
        if recompute:
            stage.recompute = True
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(work.stages[s], s, number, device) for s in mine]
    make = getattr(pipelining, TORCH_CLASSES[name])
    schedule = make(
        stages if issubclass(make, pipelining.schedules.PipelineScheduleMulti) else stages[0],
        len(work.inputs),
        loss_fn=work.loss,
        scale_grads=False,
    )
    batch, targets = torch.cat(work.inputs), torch.cat(work.targets)
    arguments = (batch,) if 0 in mine else ()
    goals = {"target": targets, "losses": []} if number - 1 in mine else {}
    return lambda: schedule.step(*arguments, **goals, return_outputs=False)


@dataclass
class Timed:
    """Seconds of each repetition by contestant; over ranks the slowest counts."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def best(self, name: str) -> float:
        return min(self.seconds[name])

    def noise(self, name: str) -> float:
        values = sorted(self.seconds[name])
        quarter = len(values) // 4
        return (values[-1 - quarter] - values[quarter]) / 2 / self.median(name)


def race(
    contestants: dict[str, Step],
    reps: int,
    *,
    barrier: Callable[[], object],
    cpu: bool = False,
    burst: int = 0,
) -> dict[str, list[float]]:
    """Run all in turns, one step each, after a warm one: `reps` times, fewer if it takes long.

    Every other round goes backwards, so that nobody always runs behind the same neighbour.

    With `burst`, a turn is one step that does not count and so many that do, of which the median is
    kept: a short step depends on which cores the contestant before it left the ranks on, which a
    loop of equal steps does not.
    """
    clock = time.thread_time if cpu else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    started = time.perf_counter()
    for rep in range(reps + 1):
        if rep > 1 and _agreed(time.perf_counter() - started > BUDGET_S * rep / (rep + 1)):
            break
        turns = list(contestants.items())
        for name, step in turns[:: -1 if rep % 2 else 1]:
            elapsed = []
            for _ in range(1 + burst):
                barrier()
                begin = clock()
                step()
                elapsed.append(clock() - begin)
            if rep:
                seconds[name].append(statistics.median(elapsed[1:] or elapsed))
    return seconds


def _agreed(over: bool) -> bool:
    """Rank 0's answer on all ranks, which must run equally often."""
    if not dist.is_initialized():
        return over
    answer = torch.tensor(over)
    dist.broadcast(answer, 0)
    return bool(answer)


def forked(pp: int, body: Callable[[int], dict[str, list[float]]]) -> Timed:
    """Run `body(rank)` in `pp` forked processes joined by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        ranks = [context.Process(target=_child, args=(r, pp, folder, body)) for r in range(pp)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(LIMIT_S)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"a rank failed: exit codes {[p.exitcode for p in ranks]}")
        each = [torch.load(f"{folder}/{rank}") for rank in range(pp)]
    return Timed({n: [max(t) for t in zip(*(e[n] for e in each), strict=True)] for n in each[0]})


def _child(rank: int, pp: int, folder: str, body: Callable[[int], dict[str, list[float]]]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # torch's schedules print
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=pp)
    torch.save(body(rank), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def overhead(reps: int) -> Timed:
    """CPU seconds of a step of tiny stages on one rank, and of its bare computation."""
    m = 64

    def body(_: int) -> dict[str, list[float]]:
        entries: dict[str, Step] = {}
        for name, vp in (("1f1b", 1), ("interleaved_1f1b", 4)):
            work = tiny(vp, m)
            entries[f"{name} bare"] = one_process(work)
            entries[name] = our_step(work, name, 1, vp, recompute=False)
            entries[f"{name} torch"] = torch_step(work, name, 1, vp, 0, recompute=False)
        return race(entries, reps, barrier=lambda: None, cpu=True)

    return forked(1, body)


def transfers(reps: int) -> Timed:
    """Seconds of a step of tiny stages on two ranks."""
    m = 32

    def body(rank: int) -> dict[str, list[float]]:
        entries: dict[str, Step] = {}
        near, gloo = TorchTransport(), TorchTransport(sockets=False)
        for name, vp in (("1f1b", 1), ("interleaved_1f1b", 2)):
            work = tiny(2 * vp, m)
            entries[name] = our_step(work, name, 2, vp, recompute=False, transport=near)
            entries[f"{name} gloo"] = our_step(work, name, 2, vp, recompute=False, transport=gloo)
            entries[f"{name} torch"] = torch_step(work, name, 2, vp, rank, recompute=False)
        return race(entries, reps, barrier=dist.barrier, burst=4)

    return forked(2, body)


def gpt_steps(pp: int, reps: int, names: list[str], *, recompute: bool, alone: bool) -> Timed:
    """Seconds of a GPT's step by schedule, ours and torch's; and of one process if `alone`."""

    def body(rank: int) -> dict[str, list[float]]:
        entries: dict[str, Step] = {}
        transport = TorchTransport(timeout_s=120.0)
        for name in names:
            vp = 1 if name == "1f1b" else 2
            options = {"recompute": recompute}
            entries[name] = our_step(gpt(pp * vp), name, pp, vp, transport=transport, **options)
            entries[f"{name} torch"] = torch_step(gpt(pp * vp), name, pp, vp, rank, **options)
        if alone:
            entries["one process"] = one_process(gpt(1)) if rank == 0 else lambda: None
        return race(entries, reps, barrier=dist.barrier)

    return forked(pp, body)
