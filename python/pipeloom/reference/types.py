"""What the twin works on: ops, steps, schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Op(NamedTuple):
    """One entry of an order; its text is PyTorch's, as in ``"2F0"``."""

    stage: int
    kind: str
    unit: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit}"

    @property
    def computes(self) -> bool:
        """Whether the op computes, as opposed to moving a tensor."""
        return self.kind in ("F", "B", "I", "W")


Step = tuple[Op, ...]
"""Ops that run as one block: an overlapped pair, or a group of transfers. Most have one op."""


@dataclass(frozen=True)
class Schedule:
    """All ranks' orders.

    Attributes:
        steps: The steps of each rank, in order.
        rank_of: The rank of each stage.
        num_units: Units of a step, over all replicas: microbatches times pieces.
        num_replicas: Copies of the model; the stages of the second follow those of the first.
        num_seq_pieces: Pieces of a sequence: unit = microbatch * num_seq_pieces + piece.
    """

    steps: list[list[Step]]
    rank_of: list[int]
    num_units: int
    num_replicas: int = 1
    num_seq_pieces: int = 1

    def ops(self, rank: int) -> list[str]:
        """The order of a rank as text; the ops of a pair or group stand one after the other."""
        return [str(op) for step in self.steps[rank] for op in step]

    def previous(self, stage: int) -> int | None:
        """The stage whose output is this one's input."""
        return None if stage % self.stages_per_replica == 0 else stage - 1

    def next(self, stage: int) -> int | None:
        """The stage that takes this one's output."""
        return None if (stage + 1) % self.stages_per_replica == 0 else stage + 1

    @property
    def stages_per_replica(self) -> int:
        """Number of stages of one copy of the model."""
        return len(self.rank_of) // self.num_replicas

    def units_of(self, stage: int) -> range:
        """The units that a stage runs: all, or its replica's half."""
        if self.num_replicas == 1:
            return range(self.num_units)
        half = self.num_units // 2
        return range(half) if stage < self.stages_per_replica else range(half, self.num_units)

    def walk(self) -> Iterator[tuple[int, int, Op]]:
        """(rank, step, op) of every op."""
        for rank, steps in enumerate(self.steps):
            for at, step in enumerate(steps):
                for op in step:
                    yield rank, at, op
