"""The orders: what each rank computes, rule by rule as published."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeloom.reference import blocks, waves
from pipeloom.reference.checking import stuck
from pipeloom.reference.types import Op, Schedule, Step, loop, zigzag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Orders with a warm-up, a steady phase and a cool-down.


def one_f_one_b(forwards: Sequence[Op], backwards: Sequence[Op], warmup: int) -> list[Op]:
    """``warmup`` forwards, then one forward and one backward in turn, then the rest."""
    order = list(forwards[:warmup])
    left = list(backwards)
    for op in forwards[warmup:]:
        order += [op, left.pop(0)]
    return order + left


def table(num_microbatches: int, vp: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward step: groups, in them chunks, in them microbatches."""
    rows = []
    for first in range(0, num_microbatches, group):
        for chunk in range(vp):
            last = min(first + group, num_microbatches)
            rows += [(microbatch, chunk) for microbatch in range(first, last)]
    return rows


def is_legal_group(pp: int, num_microbatches: int, group: int) -> bool:
    """Megatron's rule for the group size."""
    left = num_microbatches % group
    return pp <= group <= num_microbatches and (left == 0 or left >= pp)


def default_group(pp: int, num_microbatches: int) -> int:
    """The group size if none is given: the smallest legal one; all microbatches if none is."""
    sizes = range(pp, num_microbatches + 1)
    return next((n for n in sizes if is_legal_group(pp, num_microbatches, n)), num_microbatches)


def interleaved_warmup(pp: int, vp: int, group: int, rank: int, extra: int = 0) -> int:
    """Warm-up steps before capping; one chunk is plain 1F1B."""
    if vp == 1:
        return pp - 1 - rank + extra
    return 2 * (pp - 1 - rank) + (vp - 1) * group + extra


def _table_ops(pp: int, vp: int, rank: int, rows: list[tuple[int, int]], kind: str) -> list[Op]:
    """The ops of table rows; backwards go through the chunks from last to first."""
    return [
        Op((c if kind == "F" else vp - 1 - c) * pp + rank, kind, microbatch)
        for microbatch, c in rows
    ]


def _each_rank(rank_of: list[int], pp: int, m: int, order: Callable[[int], list[Op]]) -> Schedule:
    return Schedule([[(op,) for op in order(rank)] for rank in range(pp)], rank_of, m)


def _one_chunk(pp: int, m: int, warmup: Callable[[int], int]) -> Schedule:
    def order(rank: int) -> list[Op]:
        f, b = ([Op(rank, kind, i) for i in range(m)] for kind in "FB")
        return one_f_one_b(f, b, min(warmup(rank), m))

    return _each_rank(loop(pp), pp, m, order)


def _interleaved(pp: int, m: int, vp: int, group: int | None = None, extra: int = 0) -> Schedule:
    size = group or default_group(pp, m)
    rows = table(m, vp, size)

    def order(rank: int) -> list[Op]:
        warmup = min(interleaved_warmup(pp, vp, size, rank, extra), len(rows))
        f, b = (_table_ops(pp, vp, rank, rows, kind) for kind in "FB")
        return one_f_one_b(f, b, warmup)

    return _each_rank(loop(pp, vp), pp, m, order)


def _looped_bfs(pp: int, m: int, vp: int, reverse_backward: bool = True) -> Schedule:
    def order(rank: int) -> list[Op]:
        units = range(m)
        backward_units = units[::-1] if reverse_backward else units
        f = [Op(c * pp + rank, "F", i) for c in range(vp) for i in units]
        b = [Op(c * pp + rank, "B", i) for c in reversed(range(vp)) for i in backward_units]
        return f + b

    return _each_rank(loop(pp, vp), pp, m, order)


def _forward_only(pp: int, m: int, vp: int, group: int | None = None) -> Schedule:
    rows = table(m, vp, group or min(pp, m))
    return _each_rank(loop(pp, vp), pp, m, lambda rank: _table_ops(pp, vp, rank, rows, "F"))


def _seq_1f1b(pp: int, m: int, pieces: int = 1) -> Schedule:
    """Seq1F1B: forwards in unit order; backwards of a microbatch from last piece to first."""

    def order(rank: int) -> list[Op]:
        units = list(range(m * pieces))
        backward_units = [i // pieces * pieces + pieces - 1 - i % pieces for i in units]
        warmup = min(pp - 2 - rank + pieces, len(units))
        f = [Op(rank, "F", u) for u in units]
        b = [Op(rank, "B", u) for u in backward_units]
        return one_f_one_b(f, b, warmup)

    schedule = _each_rank(loop(pp), pp, m * pieces, order)
    return replace(schedule, num_seq_pieces=pieces)


# Orders that split the backward: I gives the input's gradient, W (later) the weights'.


def _zero_bubble(pp: int, m: int, warmup_factor: int) -> Schedule:
    """ZB-H1 (factor 1), ZB-H2 (factor 2): weight gradients fill the bubble of the cool-down."""

    def order(rank: int) -> list[Op]:
        warmup, delay = warmup_factor * (pp - 1 - rank), warmup_factor * (pp - 1)
        ops = [Op(rank, "F", i) for i in range(min(warmup, m))]
        weights = [Op(rank, "W", i) for i in range(m)]
        for i in range(m):
            if warmup + i < m:
                ops.append(Op(rank, "F", warmup + i))
            ops.append(Op(rank, "I", i))
            if warmup + i >= delay:
                ops.append(weights.pop(0))
        return ops + weights

    return _each_rank(loop(pp), pp, m, order)


def interleaved_zb_group(pp: int, num_microbatches: int) -> int:
    """The group size if none is given: torch's where it has one, otherwise 1F1B's."""
    rounds = max(1, num_microbatches // pp)
    if num_microbatches % rounds == 0:
        return num_microbatches // rounds
    return default_group(pp, num_microbatches)


def _interleaved_zb(pp: int, m: int, vp: int, group: int | None = None) -> Schedule:
    """Interleaved with half of its warm-up; rank r starts its weight gradients r steps late."""
    return _split_table(pp, m, vp, group or interleaved_zb_group(pp, m), lambda rank: rank)


def group_interleaved_group(pp: int, num_microbatches: int, vp: int) -> int:
    """The group size if none is given: the smallest from half of the ranks on that progresses."""
    least = min(-(-pp // 2), num_microbatches)
    sizes = range(least, num_microbatches + 1)
    return next(n for n in sizes if not stuck(_group_interleaved(pp, num_microbatches, vp, n)))


def _group_interleaved(pp: int, m: int, vp: int, group: int | None = None) -> Schedule:
    """Small groups, and no weight gradient is put off."""
    return _split_table(pp, m, vp, group or group_interleaved_group(pp, m, vp), lambda _: 0)


def _split_table(pp: int, m: int, vp: int, group: int, late: Callable[[int], int]) -> Schedule:
    """Half of interleaved 1F1B's warm-up; weight gradients begin `late` steps after the others."""
    rows = table(m, vp, group)

    def order(rank: int) -> list[Op]:
        warmup = min(pp - 1 - rank + (vp - 1) * group, len(rows))
        f, i, w = (_table_ops(pp, vp, rank, rows, kind) for kind in "FIW")
        ops, f = f[:warmup], f[warmup:]
        for k in range(len(rows)):
            ops += f[k : k + 1] + i[k : k + 1]
            if k >= late(rank):
                ops.append(w.pop(0))
        return ops + w

    return _each_rank(loop(pp, vp), pp, m, order)


class _Counted:
    """Appends ops of a rank's two stages; each kind counts its own microbatches.

    `first` is the first microbatch of each stage.
    """

    def __init__(self, stages: tuple[int, int], first: tuple[int, int] = (0, 0)) -> None:
        self.stages = stages
        self.steps: list[Step] = []
        self.count = {(chunk, kind): first[chunk] for chunk in (0, 1) for kind in "FIW"}
        self.waiting: list[Op] = []

    def take(self, chunk: int, kind: str) -> Op:
        counter = (chunk, "I" if kind == "B" else kind)
        op = Op(self.stages[chunk], kind, self.count[counter])
        self.count[counter] += 1
        return op

    def add(self, *what: tuple[int, str]) -> None:
        self.steps += [(self.take(chunk, kind),) for chunk, kind in what]


def _zb_v(pp: int, m: int) -> Schedule:
    """ZB-V written out for at least 2 pp - 1 microbatches; those beyond m are then dropped."""
    n = max(2 * pp - 1, m)
    steps = []
    for rank in range(pp):
        v = _Counted((rank, 2 * pp - 1 - rank))
        v.add(*[(0, "F")] * (2 * (pp - rank) - 1))
        v.add(*[(1, "F"), (0, "F")] * rank)
        v.add(*[(1, "F"), (1, "I"), (1, "W")] * (pp - rank))
        while v.count[1, "F"] < v.count[0, "F"] or v.count[0, "F"] < n:
            if v.count[0, "F"] < n:
                v.add((0, "F"))
            v.add((0, "I"), (0, "W"), (1, "F"), (1, "I"), (1, "W"))
        v.add(*[(0, "I"), (1, "I")] * rank)
        v.add(*[(0, "I"), (0, "W")] * (pp - rank))
        for chunk in (1, 0):
            v.add(*[(chunk, "W")] * (v.count[chunk, "I"] - v.count[chunk, "W"]))
        steps.append([step for step in v.steps if step[0].unit < m])
    return Schedule(steps, zigzag(pp), m)


def _dualpipe_v(pp: int, m: int) -> Schedule:
    steps = []
    for rank in range(pp):
        v = _Counted((rank, 2 * pp - 1 - rank))
        steps.append(_eight_steps(v, pp, m, rank))
    return Schedule(steps, zigzag(pp), m)


def _dualpipe(pp: int, m: int) -> Schedule:
    """Two replicas in opposite directions: each half of the ranks is a DualPipeV of its own."""
    steps = []
    for rank in range(pp):
        own = (rank, 0), (2 * pp - 1 - rank, m // 2)  # (stage, first microbatch) by replica
        near, far = own if rank < pp // 2 else own[::-1]
        both = _Counted((near[0], far[0]), (near[1], far[1]))
        steps.append(_eight_steps(both, pp // 2, m // 2, min(rank, pp - 1 - rank)))
    return Schedule(steps, [*range(pp), *reversed(range(pp))], m, num_replicas=2)


def _eight_steps(v: _Counted, pp: int, m: int, rank: int) -> list[Step]:
    """DualPipe: forwards of one stage overlap backwards of the other."""
    after = pp - 1 - rank  # ranks behind this one

    def backward(chunk: int, split: bool) -> None:
        op = v.take(chunk, "I" if split else "B")
        v.steps.append((op,))
        if split:
            v.waiting.append(op)

    def weight() -> None:
        op = v.waiting.pop(0)
        v.steps.append((op._replace(kind="W"),))

    def pair(forward: int) -> None:
        v.steps.append((v.take(forward, "F"), v.take(1 - forward, "B")))

    v.add(*[(0, "F")] * (2 * after))
    v.add(*[(0, "F"), (1, "F")] * (rank + 1))
    for _ in range(after):
        backward(1, split=True)
        weight()
        v.add((1, "F"))
    for i in range(m - 2 * pp + rank + 1):
        if i == 0 and after == 0:  # nothing to overlap with yet
            v.add((0, "F"))
            backward(1, split=False)
        else:
            pair(0)
        pair(1)
    for _ in range(after):
        backward(1, split=False)
        pair(1)
    half, split = (rank + 1) // 2, False
    for i in range(rank + 1):
        split = split or (i == half and rank % 2 == 1)
        backward(1, split)
        split = split or (i == half and rank % 2 == 0)
        backward(0, split)
    for _ in range(after):
        weight()
        backward(0, split=True)
    for _ in range(rank + 1):
        weight()
    return v.steps


def _no_pipelining(pp: int, m: int) -> Schedule:
    return _one_chunk(pp, m, lambda _: 0)


FAMILIES: dict[str, Callable[..., Schedule]] = {
    "no_pipelining": _no_pipelining,
    "gpipe": lambda pp, m: _one_chunk(pp, m, lambda _: m),
    "1f1b": lambda pp, m: _one_chunk(pp, m, lambda r: pp - 1 - r),
    "eager_1f1b": lambda pp, m: _one_chunk(pp, m, lambda r: 2 * (pp - 1 - r)),
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "forward_only": _forward_only,
    "zb_h1": lambda pp, m: _zero_bubble(pp, m, 1),
    "zb_h2": lambda pp, m: _zero_bubble(pp, m, 2),
    "interleaved_zb": _interleaved_zb,
    "zb_v": _zb_v,
    "dualpipe_v": _dualpipe_v,
    "dualpipe": _dualpipe,
    "seq1f1b": _seq_1f1b,
    "group_interleaved": _group_interleaved,
    "v_half": blocks.v_half,
    "v_min": blocks.v_min,
    "v_1f1b": blocks.v_1f1b,
    "hanayo": waves.hanayo,
    "chimera": waves.chimera,
}
"""The families by name."""

MANY_CHUNKS = (
    "interleaved_1f1b",
    "looped_bfs",
    "forward_only",
    "interleaved_zb",
    "group_interleaved",
    "hanayo",
)
"""Those of them that take several numbers of chunks a rank; if none is given, their least."""


def schedule(
    name: str,
    *,
    pp: int,
    num_microbatches: int,
    vp: int | None = None,
    microbatch_group_size: int | None = None,
    reverse_backward: bool | None = None,
    extra_warmup: int = 0,
    num_seq_pieces: int = 1,
) -> Schedule:
    """The twin of :func:`pipeloom.plan`; assumes that the arguments are legal.

    Raises:
        KeyError: If the family has no twin.
    """
    options: dict[str, int | bool | None] = {
        "vp": vp,
        "group": microbatch_group_size,
        "reverse_backward": reverse_backward,
        "extra": extra_warmup or None,
        "pieces": num_seq_pieces if num_seq_pieces > 1 else None,
    }
    family = FAMILIES[name]
    if name in MANY_CHUNKS:
        options["vp"] = vp or (2 if name == "hanayo" else 1)
    else:
        options["vp"] = None
    given = {key: value for key, value in options.items() if value is not None}
    return family(pp, num_microbatches, **given)


def warmup(
    name: str,
    rank: int,
    *,
    pp: int,
    num_microbatches: int,
    vp: int | None = None,
    microbatch_group_size: int | None = None,
    extra_warmup: int = 0,
    num_seq_pieces: int = 1,
) -> int:
    """Warm-up steps of a rank, for the families that have a formula.

    Raises:
        KeyError: If the family has none.
    """
    chunks = vp or 1
    total = num_microbatches * num_seq_pieces * chunks
    group = microbatch_group_size or default_group(pp, num_microbatches)
    zb_group = microbatch_group_size or interleaved_zb_group(pp, num_microbatches)
    formulas = {
        "no_pipelining": 0,
        "gpipe": total,
        "1f1b": pp - 1 - rank,
        "seq1f1b": pp - 2 - rank + num_seq_pieces,
        "eager_1f1b": 2 * (pp - 1 - rank),
        "interleaved_1f1b": interleaved_warmup(pp, chunks, group, rank, extra_warmup),
        "looped_bfs": total,
        "forward_only": total,
        "zb_h1": pp - 1 - rank,
        "zb_h2": 2 * (pp - 1 - rank),
        "interleaved_zb": pp - 1 - rank + (chunks - 1) * zb_group,
    }
    if name == "group_interleaved":
        size = microbatch_group_size or group_interleaved_group(pp, num_microbatches, chunks)
        return min(pp - 1 - rank + (chunks - 1) * size, total)
    return min(formulas[name], total)


def recompute_mask(warmup: int, num_forwards: int, kept: int) -> list[bool]:
    """Which forward steps of a rank keep only their input.

    Of each ``warmup + 1`` steps, the most that are in flight at once, ``kept`` keep everything.
    """
    return [k % (warmup + 1) >= kept for k in range(num_forwards)]
