"""Which ranks live in this process, and how its processes talk: decided once, at the start."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipeloom import ConfigError
from pipeloom.runtime.agreement import versions
from pipeloom.training.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeloom.training.arguments import TrainingArguments


@dataclass(frozen=True, slots=True)
class Session:
    """The processes of a run.

    Attributes:
        transport: Moves tensors between ranks; its `local_ranks` live in this process.
        processes: For what all processes do together besides.
        device: Where the chunks of this process live.
        pipelines: Which of the `dp` data-parallel pipelines this process runs, one after another.
        replicas: The processes of the same rank in all pipelines; None where there is one.
    """

    transport: Any
    processes: Processes
    device: torch.device
    pipelines: tuple[int, ...] = (0,)
    replicas: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.processes.index == 0


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_gpu() -> None:
    """Says that there is no GPU, where there is none.

    Raises:
        ConfigError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no GPU\nhint: --device cpu")


@contextmanager
def open_session(args: TrainingArguments) -> Iterator[Session]:
    """Makes transport and process group as `--transport` and `--device` say, and closes them.

    Raises:
        ConfigError: No GPU where one is asked for, or another number of processes than ranks.
    """
    if args.device == "cuda":
        require_gpu()
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    kind = args.transport
    if kind == "auto":
        kind = "torch" if under_torchrun and _world_size() > 1 else "local"
    if kind == "local":
        if _world_size() > 1:
            raise ConfigError(
                f"transport='local' in {_world_size()} processes would train {_world_size()} "
                "models\nhint: leave --transport out, or start it without torchrun"
            )
        from pipeloom.runtime.local import LocalTransport

        yield Session(
            LocalTransport(args.pp),
            Processes(),
            torch.device(args.device),
            # On the same chunks, whose gradients add up.
            pipelines=tuple(range(args.dp)),
        )
        return
    made_here = not dist.is_initialized()
    if made_here:
        if not under_torchrun:
            raise ConfigError(
                "transport='torch' needs processes that torchrun started\n"
                f"hint: torchrun --nproc-per-node {args.pp * args.dp} --module pipeloom train ..."
            )
        dist.init_process_group(
            "nccl" if args.device == "cuda" else "gloo", timeout=timedelta(seconds=args.timeout_s)
        )
    yield _join(args)
    if made_here:  # not after an error: a peer that is gone would be waited for
        dist.destroy_process_group()


# Each host has its own paths; what was read there is compared by its fingerprint.
_OWN_TO_A_PROCESS = frozenset({"data", "vocab_size", "is_bytes", "data_fingerprint", "data_source"})


def fingerprint_of(args: TrainingArguments) -> dict[str, str]:
    """What all processes of a run must be told alike, by name."""
    values = {
        spec.name: repr(getattr(args, spec.name))
        for spec in dataclasses.fields(args)
        if spec.name not in _OWN_TO_A_PROCESS
    }
    return {**values, **versions()}


def _join(args: TrainingArguments) -> Session:
    """This process's place among all, once they agree on what the run is."""
    from pipeloom.runtime.distributed import TorchTransport

    limit = timedelta(seconds=args.timeout_s)
    cuda = args.device == "cuda"
    # Objects and checkpoints go over gloo, whatever carries the activations.
    everyone = dist.new_group(backend="gloo", timeout=limit) if cuda else dist.group.WORLD
    assert everyone is not None
    processes = Processes(everyone)
    processes.agree(fingerprint_of(args))
    pp, dp, size = args.pp, args.dp, processes.count
    if size != pp * dp:
        ranks = f"pp={pp} ranks" if dp == 1 else f"pp={pp} x dp={dp} ranks"
        fitting = f", or --pp {size // dp}" if size % dp == 0 else ""
        raise ConfigError(
            f"{size} processes for {ranks}\nhint: torchrun --nproc-per-node {pp * dp}{fitting}"
        )
    device = processes.together(_own_gpu) if cuda else torch.device("cpu")
    # As a mesh of (pp, dp), dp the inner axis: replicas of a rank, which exchange most, are near.
    pipeline = processes.index % dp
    own = replicas = None
    if dp > 1:
        for number in range(dp):
            group = dist.new_group([rank * dp + number for rank in range(pp)], timeout=limit)
            own = group if number == pipeline else own
        for rank in range(pp):
            group = dist.new_group([rank * dp + number for number in range(dp)], timeout=limit)
            replicas = group if rank == processes.index // dp else replicas
    transport = TorchTransport(own, device=device, timeout_s=args.timeout_s)
    return Session(transport, processes, device, (pipeline,), replicas)


def _own_gpu() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local} has no GPU: torch sees {torch.cuda.device_count()}\n"
            "hint: several NCCL ranks need several GPUs; on one use --transport local"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
