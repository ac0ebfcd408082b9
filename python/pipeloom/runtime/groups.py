"""Process groups of some ranks, made by those ranks alone."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["make_group"]


def make_group(ranks: Sequence[int], *, name: str, backend: str, timeout_s: float) -> Any:
    """Make a process group; only its ranks call, in the same order where they share several.

    `torch.distributed.new_group` wants every process of the job to call. With
    `use_local_synchronization` only the members do, but then it names the group after the number of
    groups that the process has: two members that have different numbers wait for each other
    under different names. In a pipeline a middle rank has more channels than the first.

    Args:
        ranks: Its members, as ranks of the default group.
        name: The same on all members; no other group of theirs has it.
        backend: `"gloo"` or `"nccl"`.
        timeout_s: Limit of its collectives, in seconds.
    """
    members = sorted(ranks)
    group, _ = distributed_c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        dist.Backend(backend),
        distributed_c10d._get_default_store(),
        name,  # type: ignore[arg-type]
        timeout=timedelta(seconds=timeout_s),
        group_desc=name,
    )
    places = {member: place for place, member in enumerate(members)}
    distributed_c10d._world.pg_group_ranks[group] = places
    return group
