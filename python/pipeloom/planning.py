"""The typed face of the planner."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from pipeloom import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeloom._core import Costs, Layout, Plan

__all__ = ["OpKind", "Schedule", "legal_num_microbatches", "plan", "schedules"]


class OpKind(IntEnum):
    """What an op does: the values of the `kind` column.

    Examples:
        >>> import pipeloom as pl
        >>> kinds = pl.plan("1f1b", pp=2, num_microbatches=1).columns(0)["kind"]
        >>> [pl.OpKind(kind).name for kind in kinds]
        ['F', 'B']
    """

    F = 0
    """Forward."""
    B = 1
    """Full backward."""
    I = 2  # noqa: E741 - PyTorch's letter
    """Input-gradient half of a split backward."""
    W = 3
    """Weight-gradient half of a split backward."""
    SEND_F = 4
    """Send of an output to the next stage."""
    RECV_F = 5
    """Receive of an input from the previous stage."""
    SEND_B = 6
    """Send of an input gradient to the previous stage."""
    RECV_B = 7
    """Receive of an output gradient from the next stage."""


class Schedule(NamedTuple):
    """One row of the table of schedules."""

    name: str
    """What `plan` takes."""
    summary: str
    """One line: what it is good for."""
    source: str
    """The paper or system it comes from."""
    constraints: str
    """What it asks of the shape."""
    vp: int | None
    """Its only number of chunks a rank; None: any."""
    placement: str
    """Its placement of stages on ranks."""
    arguments: tuple[str, ...]
    """The optional arguments of `plan` that it uses."""


def plan(
    schedule: str,
    *,
    pp: int,
    num_microbatches: int,
    vp: int | None = None,
    microbatch_group_size: int | None = None,
    placement: str | None = None,
    num_seq_pieces: int | None = None,
    reverse_backward: bool | None = None,
    forward_only: bool = False,
    extra_warmup: int | None = None,
    num_microbatches_with_partial_activation_checkpoints: int | None = None,
    layout: Layout | None = None,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Plan:
    """Plan one step of a pipeline: every rank's exact order.

    Args:
        schedule: Name of a schedule; `schedules()` lists them.
        pp: Number of pipeline-parallel ranks.
        num_microbatches: Number of microbatches of the step, any number from 1.
        vp: Model chunks a rank. None: the schedule's own (1 for most).
        microbatch_group_size: Consecutive microbatches a chunk runs before the next chunk, for
            table families. None: the smallest that keeps the pipeline full.
        placement: Placement of stages on ranks. None: the schedule's own.
        num_seq_pieces: Pieces each sequence is cut into.
        reverse_backward: Whether backwards run microbatches from last to first (`looped_bfs`).
        forward_only: Leave out the backwards: evaluation.
        extra_warmup: 1: one more forward of warm-up on each rank.
        num_microbatches_with_partial_activation_checkpoints: Of each window of warm-up + 1
            forward steps, so many keep their activations; the others are recomputed. None: all
            keep them.
        layout: The layout that will be run: refused if its ranks, chunks or placement differ
            from the plan's. With vp=None its number of chunks is taken.
        costs: Costs for schedules found by search; the closed-form schedules do not use them
            (`plan.simulate` takes costs of any plan).
        memory_limit: Memory of each rank for schedules found by search.

    Returns:
        The plan. For closed-form schedules it is lazy: a few hundred bytes at any size. `v_half`,
        `v_min`, `v_1f1b`, `chimera` and `hanayo` hold their ops, 12 bytes each.

    Raises:
        ConfigError: An argument is out of range, unknown to the schedule, or contradicts another;
            the message names it and ends in a hint.

    Examples:
        >>> import pipeloom as pl
        >>> p = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4)
        >>> p.num_warmup(0), p.ops(1)[:4]
        (4, ['1F0', '1F1', '3F0', '3B0'])
    """
    return _core.plan(
        schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        vp=vp,
        microbatch_group_size=microbatch_group_size,
        placement=placement,
        num_seq_pieces=num_seq_pieces,
        reverse_backward=reverse_backward,
        forward_only=forward_only,
        extra_warmup=extra_warmup,
        num_microbatches_with_partial_activation_checkpoints=(
            num_microbatches_with_partial_activation_checkpoints
        ),
        layout=layout,
        costs=costs,
        memory_limit=memory_limit,
    )


def legal_num_microbatches(
    schedule: str,
    *,
    pp: int,
    vp: int | None = None,
    at_least: int = 1,
    microbatch_group_size: int | None = None,
    placement: str | None = None,
    num_seq_pieces: int | None = None,
    forward_only: bool = False,
    extra_warmup: int | None = None,
) -> int:
    """Find the smallest number of microbatches, from `at_least` on, that `plan` accepts.

    Args:
        schedule: Name of a schedule; `schedules()` lists them.
        pp: Number of pipeline-parallel ranks.
        vp: Model chunks a rank. None: the schedule's own.
        at_least: Where to begin. If it is not legal itself, `pp` and `microbatch_group_size` may
            be 8192 at most: what is legal is searched.
        microbatch_group_size: As in `plan`.
        placement: As in `plan`.
        num_seq_pieces: As in `plan`.
        forward_only: As in `plan`.
        extra_warmup: As in `plan`.

    Returns:
        A number of microbatches, at least `at_least`.

    Raises:
        ConfigError: No number is accepted with these arguments; the message says why.

    Examples:
        >>> import pipeloom as pl
        >>> pl.legal_num_microbatches("dualpipe", pp=4, at_least=3)
        8
        >>> pl.legal_num_microbatches("interleaved_1f1b", pp=4, vp=2, at_least=7)
        7
    """
    return _core.legal_num_microbatches(
        schedule,
        pp=pp,
        vp=vp,
        at_least=at_least,
        microbatch_group_size=microbatch_group_size,
        placement=placement,
        num_seq_pieces=num_seq_pieces,
        forward_only=forward_only,
        extra_warmup=extra_warmup,
    )


def schedules() -> list[Schedule]:
    """List the schedules that `plan` knows.

    Examples:
        >>> import pipeloom as pl
        >>> [s.name for s in pl.schedules()][:3]
        ['no_pipelining', 'gpipe', '1f1b']
    """
    return [
        Schedule(**row | {"arguments": tuple(row["arguments"])}) for row in _core.schedules_table()
    ]
