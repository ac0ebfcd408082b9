"""Which rank gets which of the caller's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from pipeloom.runtime.errors import PipelineError, with_hint

if TYPE_CHECKING:
    from pipeloom import Plan

__all__ = ["place_chunks"]


def place_chunks(
    plan: Plan,
    ranks: Sequence[int],
    chunks: Mapping[int, Sequence[nn.Module]] | Sequence[nn.Module],
) -> dict[int, list[nn.Module]]:
    """Give each of `ranks` its list of chunks.

    Args:
        plan: Says which rank holds which stage.
        ranks: The ranks of this process.
        chunks: A mapping from rank to its chunks; or all stages in order; or, with one rank in
            this process, its own chunks.

    Raises:
        PipelineError: The number of modules does not fit the plan.

    Examples:
        >>> import pipeloom as pl
        >>> from torch import nn
        >>> stages = [nn.Identity(), nn.ReLU(), nn.Tanh(), nn.Sigmoid()]
        >>> place_chunks(pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=2), [1], stages)
        {1: [ReLU(), Sigmoid()]}
    """
    stages = list(plan.stages)
    everything = chunks.values() if isinstance(chunks, Mapping) else [chunks]
    for module in (module for some in everything for module in _listed(some)):
        if not isinstance(module, nn.Module):
            raise PipelineError(
                with_hint(
                    f"chunks holds {module!r:.60}, which is no torch.nn.Module",
                    "give modules; wrap a function in one",
                )
            )
    counts = {
        rank: max((chunk + 1 for owner, chunk in stages if owner == rank), default=0)
        for rank in ranks
    }
    if isinstance(chunks, Mapping):
        strangers = sorted(set(chunks) - set(range(plan.pp)), key=repr)
        if strangers:
            raise PipelineError(
                with_hint(
                    f"chunks has modules for {strangers}, but the plan's ranks are 0 to "
                    f"{plan.pp - 1}",
                    "give a mapping from rank to its list of chunks",
                )
            )
        placed = {rank: list(chunks.get(rank, ())) for rank in ranks}
    elif len(chunks) == len(stages):
        placed = {rank: [nn.Identity()] * counts[rank] for rank in ranks}
        for (rank, chunk), module in zip(stages, chunks, strict=True):
            if rank in placed:
                placed[rank][chunk] = module
    elif len(ranks) == 1:
        placed = {ranks[0]: list(chunks)}
    else:
        raise PipelineError(
            with_hint(
                f"chunks has {len(chunks)} modules, but the plan has {len(stages)} stages",
                "give one module a stage in order, or a mapping from rank to its list of chunks",
            )
        )
    for rank, modules in placed.items():
        if len(modules) != counts[rank]:
            raise PipelineError(
                with_hint(
                    f"rank {rank} has {len(modules)} chunks, but the plan gives it {counts[rank]}",
                    f"give one module for each of its stages: "
                    f"{[stage for stage, place in enumerate(stages) if place[0] == rank]}",
                )
            )
    return placed


def _listed(chunks: Any) -> list[Any]:
    """The modules of a sequence of chunks; a module that holds no others is one that lacks it."""
    if isinstance(chunks, Sequence | nn.ModuleList | nn.Sequential):
        return list(chunks)
    raise PipelineError(
        with_hint(
            f"chunks has {type(chunks).__name__} where a list of modules belongs",
            "give a list with one module a stage, or a mapping from rank to its list",
        )
    )
