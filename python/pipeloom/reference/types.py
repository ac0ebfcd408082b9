"""What the twin works on: ops, steps, schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pipeloom.planning import OpKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeloom import Plan


NONE = 2**32 - 1
"""In a column: no pair, no group, no peer."""


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


def loop(pp: int, vp: int = 1) -> list[int]:
    """The rank of each stage: stage s on rank s mod pp."""
    return [s % pp for s in range(pp * vp)]


def zigzag(pp: int, vp: int = 2) -> list[int]:
    """The rank of each stage: every other chunk runs backwards over the ranks."""
    return [s % pp if (s // pp) % 2 == 0 else pp - 1 - s % pp for s in range(pp * vp)]


@dataclass(frozen=True)
class Schedule:
    """All ranks' orders.

    Attributes:
        steps: The steps of each rank, in order.
        rank_of: The rank of each stage.
        num_units: Units of a step, over all replicas: microbatches times pieces.
        num_replicas: Copies of the model; the stages of the second follow those of the first.
        num_seq_pieces: Pieces of a sequence: unit = microbatch * num_seq_pieces + piece.
        recomputed: (stage, unit) of the forwards that are run again before their backward.
    """

    steps: list[list[Step]]
    rank_of: list[int]
    num_units: int
    num_replicas: int = 1
    num_seq_pieces: int = 1
    recomputed: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Reads a plan, lowered or not, from its columns."""
        pieces = plan.num_seq_pieces
        columns = [plan.columns(rank) for rank in range(plan.pp)]
        return cls(
            [_steps(each, pieces) for each in columns],
            [rank for rank, _ in plan.stages],
            plan.num_microbatches * pieces,
            plan.num_replicas,
            pieces,
            frozenset(tensor for each in columns for tensor in _recomputed(each, pieces)),
        )

    @classmethod
    def read(cls, steps: list[list[Step]]) -> Self:
        """What a bare list of orders says of its pipeline, as for a reader of a CSV.

        A stage is on the rank that names it first; there are as many stages and units as the
        largest numbers say.

        Raises:
            ValueError: If a rank has no op, or a stage below the largest is on no rank.
        """
        rank_of: dict[int, int] = {}
        units = 0
        for rank, order in enumerate(steps):
            for step in order:
                for op in step:
                    rank_of.setdefault(op.stage, rank)
                    units = max(units, op.unit + 1)
        if not all(steps):
            raise ValueError("a rank has no op\nhint: each rank runs at least one stage")
        stages = range(max(rank_of) + 1)
        missing = [stage for stage in stages if stage not in rank_of]
        if missing:
            raise ValueError(f"no rank runs stages {missing}\nhint: number stages from 0")
        return cls(steps, [rank_of[stage] for stage in stages], units)

    def ops(self, rank: int) -> list[str]:
        """The order of a rank as text: each transfer by itself, a pair as one action."""
        texts: list[str] = []
        for step in self.steps[rank]:
            if len(step) == 2 and step[0].computes:
                texts.append(f"({step[0]};{step[1]})OVERLAP_F_B")
            else:
                texts += map(str, step)
        return texts

    def with_steps(self, steps: list[list[Step]]) -> Schedule:
        """The same pipeline with other orders."""
        return replace(self, steps=steps)

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


def _recomputed(columns: dict[str, NDArray[Any]], pieces: int) -> Iterator[tuple[int, int]]:
    names = ("stage", "microbatch", "piece", "recompute")
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    return (
        (stage, microbatch * pieces + piece) for stage, microbatch, piece, marked in rows if marked
    )


def _steps(columns: dict[str, NDArray[Any]], pieces: int) -> list[Step]:
    """Puts rows of one pair, or consecutive rows of one group of transfers, into one step."""
    rows = len(columns["kind"])
    alone = [-1] * rows
    rank_columns = [
        columns[name].tolist() if name in columns else alone
        for name in ("kind", "stage", "microbatch", "piece", "pair", "group")
    ]
    steps: list[Step] = []
    last = None
    for at, (kind, stage, microbatch, piece, pair, group) in enumerate(
        zip(*rank_columns, strict=True)
    ):
        op = Op(stage, OpKind(kind).name, microbatch * pieces + piece)
        together = ("pair", pair) if op.computes else ("group", group)
        if together[1] in (-1, NONE):
            together = ("row", at)
        if together == last:
            steps[-1] += (op,)
        else:
            steps.append((op,))
        last = together
    return steps
