"""A plan compiled for execution: what each rank does, with everything looked up once.

The runtime decides no order. `compile_plan` turns each rank's ops into instructions one for one;
what it adds is where each op's input comes from and where its result goes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeloom.runtime.transport import BACKWARD, FORWARD, Channel, Key

if TYPE_CHECKING:
    from pipeloom import Plan

__all__ = ["CompiledPlan", "Instruction", "Program", "compile_plan"]

# Actions: what an executor does.
RUN_FORWARD, RUN_BACKWARD, RUN_INPUT_HALF, RUN_WEIGHT_HALF, SEND, RECV = range(6)

# The values of the `kind` column (`pipeloom.OpKind`).
_F, _B, _I, _W, _SEND_F, _RECV_F, _SEND_B, _RECV_B = range(8)
_TEXT = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")

NO_CELL = -1
NO_KEY = Key(-1, -1)


@dataclass(slots=True, eq=False)
class Instruction:
    """One op of a rank, ready to run.

    A unit is a microbatch, or a piece of it where the plan cuts sequences. A cell is the number of
    a (chunk, unit) on its rank: the place of its tensors in the executor's tables.
    """

    action: int
    """`RUN_FORWARD`, `RUN_BACKWARD`, one of its halves, `SEND` or `RECV`."""
    position: int
    """Place in the rank's order."""
    stage: int
    chunk: int
    microbatch: int
    cell: int
    kind: int
    """Value of the op's `kind` column."""
    unit: int = 0
    """Its number in the plan's text: microbatch * num_seq_pieces + piece."""
    piece: int = 0
    """Piece of the sequence; 0 where it is not cut."""
    recompute: bool | None = None
    """The forward keeps only its input; the backward runs it again. None: the plan has no mask."""
    outer: bool = False
    """Forward: the first stage, input is data. Backward: the last stage, the seed is the loss."""
    inner_end: bool = False
    """Forward: the last stage, the result is a loss. Backward: the first, nothing to pass on."""
    received: bool = False
    """The input comes by message, not from a chunk of the same rank."""
    hand_to: int = NO_CELL
    """Cell of this rank that the result is handed to; `NO_CELL`: a SEND takes it."""
    last_of_chunk: bool = False
    """The chunk's last backward: its gradients are complete after it."""
    channel: Channel | None = None
    """SEND and RECV: the lane."""
    key: Key = NO_KEY
    """The message that a transfer moves, or that the op's result becomes."""
    reads_inbox: bool = False
    """F and RECV_F read and fill the table of activations, others that of gradients."""

    @property
    def text(self) -> str:
        """The op in the plan's words, such as `2F0`."""
        return f"{self.stage}{_TEXT[self.kind]}{self.unit}"


@dataclass(frozen=True, eq=False)
class Program:
    """All instructions of one rank."""

    rank: int
    instructions: tuple[Instruction, ...]
    num_cells: int
    hosts_input: bool
    """Whether a first stage is on this rank."""
    hosts_loss: bool
    """Whether a last stage is on this rank."""
    chunk_order: dict[int, tuple[int, ...]]
    """The units of each chunk in the order of its forwards."""
    num_seq_pieces: int
    """Into how many pieces each sequence is cut."""


@dataclass(eq=False)
class CompiledPlan:
    """A plan with the programs of the ranks that were asked for."""

    plan: Plan
    forward_only: bool
    programs: dict[int, Program]
    channels: tuple[Channel, ...]
    """Every channel of the plan, over all ranks, in one order."""
    digest: str
    """Names the plan: equal on two ranks iff their plans are."""
    stages_per_replica: int
    chunks: dict[int, int] = field(default_factory=dict)
    """Number of chunks of each rank."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step."""
        return int(self.plan.num_microbatches)

    @property
    def num_seq_pieces(self) -> int:
        """Number of pieces of each sequence."""
        return int(self.plan.num_seq_pieces)

    @property
    def num_units(self) -> int:
        """Number of microbatches times pieces of a step."""
        return self.num_microbatches * self.num_seq_pieces


@lru_cache(maxsize=64)
def compile_plan(
    plan: Plan, ranks: tuple[int, ...], *, backend: str | None = None, forward_only: bool = False
) -> CompiledPlan:
    """Compile the programs of some ranks, once for each plan.

    Args:
        plan: What to run. Transfers are added by `plan.lower("auto")` if it has none.
        ranks: The ranks that live in this process.
        backend: Communication backend, for `plan.lower`.
        forward_only: Leave out the backwards and their transfers: evaluation by a training plan.

    Returns:
        The programs, and what all ranks must agree on.
    """
    if plan.pp > 1 and plan.style is None:
        plan = plan.lower("auto", backend=backend)
    stages = list(plan.stages)
    per_replica = plan.num_stages // plan.num_replicas
    channels = set()
    for stage in range(plan.num_stages):
        if (stage + 1) % per_replica:
            here, there = stages[stage][0], stages[stage + 1][0]
            if here != there:
                channels.add(Channel(here, there, FORWARD))
                if not (forward_only or plan.forward_only):
                    channels.add(Channel(there, here, BACKWARD))
    chunks: dict[int, int] = {}
    for rank, chunk in stages:
        chunks[rank] = max(chunks.get(rank, 0), chunk + 1)
    compiler = _Compiler(plan, stages, per_replica, forward_only)
    return CompiledPlan(
        plan=plan,
        forward_only=forward_only or plan.forward_only,
        programs={rank: compiler.program(rank) for rank in ranks},
        channels=tuple(sorted(channels)),
        digest=_digest(plan, forward_only),
        stages_per_replica=per_replica,
        chunks=chunks,
    )


def _digest(plan: Plan, forward_only: bool) -> str:
    """Name a plan: what a person calls it, then a hash of every rank's order."""
    hasher = hashlib.sha256()
    for rank in range(plan.pp):
        columns = plan.columns(rank)
        for name in sorted(columns):
            hasher.update(name.encode())
            hasher.update(columns[name].tobytes())
    for place in plan.stages:
        hasher.update(repr(place).encode())
    pieces = f" num_seq_pieces={plan.num_seq_pieces}" if plan.num_seq_pieces > 1 else ""
    evaluation = ", forwards only" if forward_only else ""
    return (
        f"{plan.schedule} pp={plan.pp} vp={plan.vp} num_microbatches={plan.num_microbatches}"
        f"{pieces} p2p={plan.style}{evaluation} ({hasher.hexdigest()[:12]})"
    )


class _Compiler:
    """Compiles ranks of one plan."""

    def __init__(
        self, plan: Plan, stages: list[tuple[int, int]], per_replica: int, forward_only: bool
    ) -> None:
        self.plan = plan
        self.num_seq_pieces: int = plan.num_seq_pieces
        self.num_units: int = plan.num_microbatches * plan.num_seq_pieces
        self.stages = stages
        self.per_replica = per_replica
        self.forward_only = forward_only

    def program(self, rank: int) -> Program:
        """Compile one rank."""
        columns: dict[str, Any] = {
            name: column.tolist() for name, column in self.plan.columns(rank).items()
        }
        kinds, stages, microbatches = columns["kind"], columns["stage"], columns["microbatch"]
        peers = columns.get("peer", [0] * len(kinds))
        mask = self.plan.recompute_mask(rank) is not None or any(columns["recompute"])
        pieces = columns.get("piece", [0] * len(kinds))
        instructions = []
        order: dict[int, list[int]] = {}
        for position, (kind, stage, microbatch) in enumerate(
            zip(kinds, stages, microbatches, strict=True)
        ):
            if self.forward_only and kind not in (_F, _SEND_F, _RECV_F):
                continue
            chunk, piece = self.stages[stage][1], pieces[position]
            unit = microbatch * self.num_seq_pieces + piece
            instruction = Instruction(
                action=_action(kind),
                position=position,
                stage=stage,
                chunk=chunk,
                microbatch=microbatch,
                cell=self._cell(stage, unit),
                kind=kind,
                unit=unit,
                piece=piece,
                reads_inbox=kind in (_F, _RECV_F),
            )
            if kind == _F:
                order.setdefault(chunk, []).append(unit)
            if mask:
                instruction.recompute = bool(columns["recompute"][position])
            if instruction.action in (SEND, RECV):
                _route_transfer(instruction, rank, int(peers[position]))
            elif kind != _W:
                self._route_compute(instruction, rank)
            instructions.append(instruction)
        _mark_last_backwards(instructions)
        own = [stage for stage, (owner, _) in enumerate(self.stages) if owner == rank]
        return Program(
            rank=rank,
            instructions=tuple(instructions),
            num_cells=self.num_units * max((self.stages[stage][1] + 1 for stage in own), default=0),
            hosts_input=any(self._is_first(stage) for stage in own),
            hosts_loss=any(self._is_last(stage) for stage in own),
            chunk_order={chunk: tuple(units) for chunk, units in order.items()},
            num_seq_pieces=self.num_seq_pieces,
        )

    def _cell(self, stage: int, unit: int) -> int:
        return self.stages[stage][1] * self.num_units + unit

    def _is_first(self, stage: int) -> bool:
        return stage % self.per_replica == 0

    def _is_last(self, stage: int) -> bool:
        return (stage + 1) % self.per_replica == 0

    def _route_compute(self, op: Instruction, rank: int) -> None:
        """Say where the op's input comes from and where its result goes."""
        forward = op.action == RUN_FORWARD
        starts = self._is_first(op.stage) if forward else self._is_last(op.stage)
        ends = self._is_last(op.stage) if forward else self._is_first(op.stage)
        step = 1 if forward else -1
        op.outer, op.inner_end = starts, ends
        op.received = not starts and self.stages[op.stage - step][0] != rank
        if not ends:
            op.key = Key(op.stage if forward else op.stage - 1, op.unit)
            if self.stages[op.stage + step][0] == rank:
                op.hand_to = self._cell(op.stage + step, op.unit)


def _action(kind: int) -> int:
    if kind == _F:
        return RUN_FORWARD
    if kind == _B:
        return RUN_BACKWARD
    if kind in (_I, _W):
        return RUN_INPUT_HALF if kind == _I else RUN_WEIGHT_HALF
    return SEND if kind in (_SEND_F, _SEND_B) else RECV


def _route_transfer(op: Instruction, rank: int, peer: int) -> None:
    direction = FORWARD if op.kind in (_SEND_F, _RECV_F) else BACKWARD
    source, destination = (rank, peer) if op.action == SEND else (peer, rank)
    op.channel = Channel(source, destination, direction)
    # SEND_F and RECV_B stand behind their stage, RECV_F and SEND_B before it.
    behind = op.kind in (_SEND_F, _RECV_B)
    op.key = Key(op.stage if behind else op.stage - 1, op.unit)


def _mark_last_backwards(instructions: list[Instruction]) -> None:
    seen = set()
    for instruction in reversed(instructions):
        backward = instruction.action in (RUN_BACKWARD, RUN_WEIGHT_HALF)
        if backward and instruction.chunk not in seen:
            seen.add(instruction.chunk)
            instruction.last_of_chunk = True
