"""Two replicas of a model in one pipeline: their copies of each stage train as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeloom.runtime.errors import PipelineError, with_hint
from pipeloom.runtime.gradients import TiedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeloom import Plan
    from pipeloom.runtime.executor import RankExecutor
    from pipeloom.runtime.transport import Transport

__all__ = ["replica_weights", "share_losses"]


def replica_weights(plan: Plan, chunks: Mapping[int, Sequence[nn.Module]]) -> list[TiedWeight]:
    """The weights that two ranks hold copies of because the plan runs two replicas.

    Each copy has seen half of the microbatches, so their gradients are summed at the end of a
    step, and a norm counts them once. Order: by stage, then by parameter, on every rank.

    Args:
        plan: Any plan; without replicas there are none.
        chunks: The chunks of each rank of this process.

    Examples:
        >>> import pipeloom as pl
        >>> from torch import nn
        >>> plan = pl.plan("chimera", pp=2, num_microbatches=2)
        >>> chunks = {rank: [nn.Linear(2, 2), nn.Linear(2, 2)] for rank in range(2)}
        >>> [weight.ranks for weight in replica_weights(plan, chunks)]
        [(0, 1), (0, 1), (0, 1), (0, 1)]
    """
    if plan.num_replicas == 1:
        return []
    stages = list(plan.stages)
    per_replica = plan.num_stages // plan.num_replicas
    weights = []
    for stage in range(per_replica):
        places = stages[stage::per_replica]
        ranks = [rank for rank, _ in places]
        own = {
            rank: list(chunks[rank][chunk].parameters()) for rank, chunk in places if rank in chunks
        }
        if len({len(parameters) for parameters in own.values()}) > 1:
            raise PipelineError(
                with_hint(
                    f"the replicas of stage {stage} have different numbers of parameters",
                    "build both replicas of a stage alike",
                )
            )
        for number in range(max(map(len, own.values()), default=0)):
            owners = {rank: parameters[number] for rank, parameters in own.items()}
            weights.append(TiedWeight(owners, ranks))
    return weights


def share_losses(plan: Plan, transport: Transport, executors: Sequence[RankExecutor]) -> None:
    """Give every rank that ends a replica all microbatches' losses, where ranks are processes.

    Args:
        plan: The plan that was run.
        transport: The pipeline's.
        executors: This process's ranks, at the end of their programs.
    """
    per_replica = plan.num_stages // plan.num_replicas
    ends = sorted(rank for rank, _ in list(plan.stages)[per_replica - 1 :: per_replica])
    if len(ends) == 1 or len(transport.local_ranks) == plan.pp:
        return
    units = plan.num_microbatches * plan.num_seq_pieces
    for executor in executors:
        if executor.rank not in ends or not executor.losses:
            continue
        one = next(iter(executor.losses.values()))
        # Zeros are added: in float64 every loss comes through unchanged.
        table = torch.zeros(units, 2, dtype=torch.float64, device=one.device)
        for unit, loss in executor.losses.items():
            table[unit, 0] = loss.reshape(())
            table[unit, 1] = executor.num_tokens[unit]
        transport.all_reduce({executor.rank: table}, ends)
        for unit, (loss, num_tokens) in enumerate(table):
            executor.losses[unit] = loss.to(one.dtype).reshape(one.shape)
            executor.num_tokens[unit] = int(num_tokens)
