"""A plan of forwards for an evaluation with its own number of microbatches."""

from __future__ import annotations

from functools import lru_cache

import pipeloom as pl

__all__ = ["evaluation_plan"]


@lru_cache(maxsize=64)
def evaluation_plan(plan: pl.Plan, num_microbatches: int) -> pl.Plan:
    """Plan forwards over the stages of a training plan, whatever its placement.

    Args:
        plan: The training plan. Of two replicas the first does all; sequences are cut as it does.
        num_microbatches: The evaluation's own.

    Examples:
        >>> import pipeloom as pl
        >>> for row in map(
        ...     evaluation_plan(pl.plan("zb_v", pp=2, num_microbatches=4), 3).ops, (0, 1)
        ... ):
        ...     print(*row)
        0F0 0F1 0F2 3F0 3F1 3F2
        1F0 2F0 1F1 2F1 1F2 2F2
    """
    if plan.num_seq_pieces > 1 and plan.vp == 1:  # with more chunks no family has pieces
        return pl.plan(
            "seq1f1b",
            pp=plan.pp,
            num_microbatches=num_microbatches,
            num_seq_pieces=plan.num_seq_pieces,
        )
    if plan.placement in ("loop", "bidirectional"):
        return pl.plan("forward_only", pp=plan.pp, vp=plan.vp, num_microbatches=num_microbatches)
    stages = plan.stages[: plan.num_stages // plan.num_replicas]
    own = [[s for s, (owner, _) in enumerate(stages) if owner == rank] for rank in range(plan.pp)]
    orders: list[list[str]] = [[] for _ in own]
    done = [0] * len(stages)
    # Tick by tick each rank runs the oldest microbatch that has come to one of its stages. What is
    # run in the order of ticks can't wait in a circle.
    while done[-1] < num_microbatches:
        come = [num_microbatches, *done]
        for rank, some in enumerate(own):
            ready = [(done[stage], stage) for stage in some if done[stage] < come[stage]]
            if ready:
                unit, stage = min(ready)
                orders[rank].append(f"{stage}F{unit}")
                done[stage] += 1
    return pl.Plan.from_csv("\n".join(map(",".join, orders)))
