"""The peers' planning code, called as their own training loops call it.

Megatron-core: `schedules.get_pp_rank_microbatches`, `schedules.get_schedule_table` and
`cuda_graphs.convert_schedule_table_to_order`. Torch: the schedule classes of
`torch.distributed.pipelining`, private parts included, hence the pinned version.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TORCH = "2.13"


class MissingPeerError(Exception):
    """The peer is not installed, or not in the version that the row needs."""


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def megatron_rank(pp: int, vp: int, m: int, group: int) -> Callable[[int], object]:
    """A function that gives one rank's rows, table and order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of every optional accelerator it lacks
        try:
            from megatron.core.pipeline_parallel.schedules import (
                get_pp_rank_microbatches,
                get_schedule_table,
            )
            from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order
        except ImportError as error:
            raise MissingPeerError(f"megatron-core: {error}") from error

    def communicator(rank: int) -> SimpleNamespace:
        # What the functions read of a P2PCommunicator, without process groups.
        return SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
            virtual_pipeline_model_parallel_size=vp,
        )

    communicators = [communicator(rank) for rank in range(pp)]

    def one(rank: int) -> object:
        rows = get_pp_rank_microbatches(m, vp, group, p2p_communicator=communicators[rank])
        table = get_schedule_table(m, vp, group)
        return rows, table, convert_schedule_table_to_order(rows[2], vp, table)

    return one


class _MockStage:
    """What the schedule classes read of a stage."""

    is_last = is_first = False
    group = None
    submod = None

    def __init__(self, index: int, pp: int, num_stages: int, rank: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = pp, rank
        self.stage_index_to_group_rank: dict[int, int] = {}


def _torch_class(name: str) -> type:
    if not installed("torch").startswith(TORCH):
        raise MissingPeerError(f"torch {TORCH} is needed, found {installed('torch')}")
    from torch.distributed.pipelining import schedules

    return getattr(schedules, name)


def torch_order_and_transfers(name: str, pp: int, vp: int, m: int) -> Callable[[], object]:
    """All ranks' compute orders and `_add_send_recv`, without the rest of the constructor."""
    cls = _torch_class(name)
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
    from torch.distributed.pipelining.schedules import _add_send_recv

    rounds = max(1, m // pp)
    style = "v" if name == "ScheduleZBVZeroBubble" else "loop"
    rank_of = generate_stage_to_rank_mapping(pp, pp * vp, style=style)

    def plan() -> object:
        maker = cls.__new__(cls)
        maker.pp_group_size, maker.n_local_stages = pp, vp
        maker.num_stages = maker._num_stages = pp * vp
        maker._n_microbatches, maker.microbatches_per_round = m, m // rounds
        maker.number_of_rounds = rounds
        orders = {}
        for rank in range(pp):
            maker.rank = rank
            ops = maker._calculate_single_rank_operations(rank)
            orders[rank] = [op for op in ops if op is not None]
        return _add_send_recv(orders, rank_of.__getitem__, pp * vp)

    return plan


def torch_constructor(name: str, pp: int, vp: int, m: int) -> Callable[[], object]:
    """The whole constructor, which every rank runs."""
    cls = _torch_class(name)
    stages = [_MockStage(chunk * pp, pp, pp * vp, 0) for chunk in range(vp)]
    return lambda: cls(stages, m)
