"""Which ranks live in this process, and how its processes talk: decided once, at the start."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipeloom import ConfigError
from pipeloom.training.checkpoint import Processes

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
    """

    transport: Any
    processes: Processes
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.processes.index == 0


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def open_session(args: TrainingArguments) -> Iterator[Session]:
    """Makes transport and process group as `--transport` and `--device` say, and closes them.

    Raises:
        ConfigError: No GPU where one is asked for, or another number of processes than ranks.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no GPU\nhint: --device cpu")
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

        yield Session(LocalTransport(args.pp), Processes(), torch.device(args.device))
        return
    with _process_group(args, under_torchrun) as (group, device):
        from pipeloom.runtime.distributed import TorchTransport

        transport = TorchTransport(device=device, timeout_s=args.timeout_s)
        yield Session(transport, Processes(group), device)


@contextmanager
def _process_group(
    args: TrainingArguments, under_torchrun: bool
) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    if dist.is_initialized():
        size, made_here = dist.get_world_size(), False
    else:
        if not under_torchrun:
            raise ConfigError(
                "transport='torch' needs processes that torchrun started\n"
                f"hint: torchrun --nproc-per-node {args.pp} --module pipeloom train ..."
            )
        size, made_here = _world_size(), True
    if size != args.pp:
        raise ConfigError(
            f"{size} processes for pp={args.pp} ranks\n"
            f"hint: torchrun --nproc-per-node {args.pp}, or --pp {size}"
        )
    device = torch.device("cpu")
    if args.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local} has no GPU: torch sees {torch.cuda.device_count()}\n"
                "hint: several NCCL ranks need several GPUs; on one use --transport local"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if made_here:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    # Objects and checkpoints go over gloo, whatever carries the activations.
    group = dist.new_group(backend="gloo") if args.device == "cuda" else dist.group.WORLD
    assert group is not None
    yield group, device
    if made_here:  # not after an error: a peer that is gone would be waited for
        dist.destroy_process_group()
