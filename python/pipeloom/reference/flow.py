"""What ops make, need and carry."""

from __future__ import annotations

from pipeloom.reference.types import Op, Schedule

Value = tuple[str, int, int]
"""("output" or "gradient", stage, unit): what an op makes; a gradient is that of the input."""
Channel = tuple[int, int, str]
"""(source rank, destination rank, "F" or "B")."""


def makes(op: Op) -> list[Value]:
    """What a compute op makes."""
    if op.kind == "F":
        return [("output", op.stage, op.unit)]
    if op.kind in "BI":
        return [("gradient", op.stage, op.unit)]
    return []


def needs(schedule: Schedule, op: Op) -> list[Value]:
    """What a compute op needs, wherever it was made."""
    stage, kind, unit = op
    piece = unit % schedule.num_seq_pieces
    if kind == "W":
        return [("gradient", stage, unit)]
    if kind == "F":
        before, name, earlier = schedule.previous(stage), "output", unit - 1
        own: list[Value] = []
        first = piece == 0
    else:
        before, name, earlier = schedule.next(stage), "gradient", unit + 1
        own = [("output", stage, unit)]
        first = piece == schedule.num_seq_pieces - 1
    if before is not None:
        own.append((name, before, unit))
    if not first:
        # Causal attention: a piece reads the earlier pieces' keys and values.
        own.append((name, stage, earlier))
    return own


def carried(op: Op) -> Value:
    """What a transfer carries, named by the stage that made it."""
    maker = op.stage + {"RECV_F": -1, "RECV_B": 1}.get(op.kind, 0)
    return ("output" if op.kind.endswith("F") else "gradient", maker, op.unit)


def match_of(op: Op) -> Op:
    """The receive of a send, the send of a receive."""
    way = 1 if op.kind.endswith("F") else -1
    if op.kind.startswith("SEND"):
        return Op(op.stage + way, op.kind.replace("SEND", "RECV"), op.unit)
    return Op(op.stage - way, op.kind.replace("RECV", "SEND"), op.unit)


def crosses(schedule: Schedule, op: Op) -> bool:
    """Whether a transfer is one: between neighbouring stages of one replica, on two ranks."""
    stages, other = len(schedule.rank_of), match_of(op).stage
    if not (0 <= op.stage < stages and 0 <= other < stages):
        return False
    if op.stage // schedule.stages_per_replica != other // schedule.stages_per_replica:
        return False
    return schedule.rank_of[op.stage] != schedule.rank_of[other]


def channel(schedule: Schedule, op: Op) -> Channel:
    """The channel of a transfer."""
    mine, theirs = schedule.rank_of[op.stage], schedule.rank_of[match_of(op).stage]
    source, target = (mine, theirs) if op.kind.startswith("SEND") else (theirs, mine)
    return source, target, op.kind[-1]
