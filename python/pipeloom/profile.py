"""What a run measured: each op's start and end on every rank, and what follows from them.

`pipeloom train --profile` writes a profile; `pipeloom show RUN` draws it below its plan, and
`pipeloom.Costs.from_profile` turns it into costs. Times are in milliseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from pipeloom._core import Costs, Drawing, ParseError, Plan, plan_from_saved
from pipeloom.training.measure import Timed, replay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from os import PathLike

    from pipeloom._core import Timeline
    from pipeloom.training.measure import OpEvent

__all__ = ["FILE", "OpTimes", "Profile", "Step", "measured_costs"]

FILE = "profile.json"
"""Name of the profile in a run's folder."""
FORMAT = 1
_MS_PER_S = 1000
_NANOSECONDS_PER_MS = 1_000_000
_KIND_NAMES = "FBIW"


class Step(NamedTuple):
    """One measured step: for each rank, its ops' times in the plan's order, in milliseconds."""

    number: int
    start: list[list[float]]
    end: list[list[float]]


class OpTimes(NamedTuple):
    """An op as planned and as it ran, in milliseconds."""

    op: str
    rank: int
    planned_start: float
    planned_end: float
    start: float
    end: float

    @property
    def late(self) -> float:
        """How long after its planned start it started."""
        return self.start - self.planned_start

    @property
    def longer(self) -> float:
        """How much longer than planned it took."""
        return (self.end - self.start) - (self.planned_end - self.planned_start)


class _Op(NamedTuple):
    """An op of the plan, with where it stands."""

    rank: int
    at: int
    stage: int
    kind: str
    unit: int
    recompute: bool

    @property
    def text(self) -> str:
        return f"{self.stage}{self.kind}{self.unit}"


def _ops(plan: Plan, rank: int) -> Iterator[_Op]:
    columns = plan.columns(rank)
    units = columns["microbatch"] * plan.num_seq_pieces + columns["piece"]
    names = ("stage", "kind", "recompute")
    rows = zip(*(columns[name].tolist() for name in names), units.tolist(), strict=True)
    for at, (stage, kind, recompute, unit) in enumerate(rows):
        yield _Op(rank, at, stage, _KIND_NAMES[kind], unit, recompute)


@dataclass
class Profile:
    """Measured steps of one plan.

    Examples:
        >>> import pipeloom as pl
        >>> plan = pl.plan("1f1b", pp=1, num_microbatches=1)
        >>> profile = Profile(plan, [Step(1, [[0.0, 2.0]], [[2.0, 5.0]])])
        >>> pl.Costs.from_profile(profile)
        Costs(forward=(2.0,), backward_input=0, backward_weight=0, backward=(3.0,))
    """

    plan: Plan
    """The compute order that ran, without transfers."""
    steps: list[Step] = field(default_factory=list)
    side_by_side: bool = True
    """Whether each rank had a process of its own. If not, they took turns."""

    def add(self, number: int, events: Iterable[OpEvent]) -> None:
        """Take a step's events: all ranks', on one clock.

        Raises:
            ParseError: They are not the plan's ops.
        """
        by_rank: dict[int, list[OpEvent]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event.start, event.end)):
            by_rank[event.rank].append(event)
        begin = min((own[0].start for own in by_rank.values()), default=0.0)
        step = Step(number, [], [])
        for rank in range(self.plan.pp):
            place = {op.text: op.at for op in _ops(self.plan, rank)}
            own = sorted(by_rank[rank], key=lambda event: place.get(event.op, -1))
            if [event.op for event in own] != list(place):
                raise ParseError(
                    f"rank {rank}: the recorded ops are not the {len(place)} of the plan"
                    "\nhint: give the events of one step of this very plan, of all ranks"
                )
            step.start.append([(event.start - begin) * _MS_PER_S for event in own])
            step.end.append([(event.end - begin) * _MS_PER_S for event in own])
        self.steps.append(step)

    def median_step(self) -> Step:
        """The step whose time is the median; of an even number the earlier of the middle two.

        Raises:
            ParseError: No step was measured.
        """
        if not self.steps:
            raise ParseError("the profile has no step\nhint: profile at least one step")
        return sorted(self.steps, key=self.makespan)[(len(self.steps) - 1) // 2]

    @staticmethod
    def makespan(step: Step) -> float:
        """Milliseconds from the first start to the last end."""
        return max(map(max, step.end)) - min(map(min, step.start))

    def drawing(self, step: Step | None = None) -> Drawing:
        """Draw a step (None: the median one); its unit of time is the millisecond.

        The headline says which step it is, and whether its times are a replay.

        Ranks that took turns are drawn as if they had run side by side: with the durations and
        orders that they had, and messages that take no time.
        """
        import numpy as np

        step = self.median_step() if step is None else step
        note = f"run, step {step.number}, ms"
        if not self.side_by_side:
            step = self._replayed(step)
            note += ", replayed: ranks of one process took turns"
        ticks = [
            [np.rint(np.asarray(row) * _NANOSECONDS_PER_MS).astype(np.int64) for row in rows]
            for rows in (step.start, step.end)
        ]
        return Drawing(self.plan, *ticks, ticks_per_unit=_NANOSECONDS_PER_MS, note=note)

    def compare(self, planned: Timeline) -> list[OpTimes]:
        """Compare each op of the median step with its plan, rank by rank."""
        step = self.median_step()
        step = step if self.side_by_side else self._replayed(step)
        found = []
        for rank in range(self.plan.pp):
            plan_start, plan_end = planned.start(rank).tolist(), planned.end(rank).tolist()
            for op in _ops(self.plan, rank):
                times = (plan_start[op.at], plan_end[op.at])
                real = (step.start[rank][op.at], step.end[rank][op.at])
                found.append(OpTimes(op.text, rank, *times, *real))
        return found

    def _replayed(self, step: Step) -> Step:
        orders = [list(_ops(self.plan, rank)) for rank in range(self.plan.pp)]
        events = [
            Timed(op.rank, op.text, step.start[op.rank][op.at], step.end[op.rank][op.at])
            for order in orders
            for op in order
        ]
        found = {
            timed.op: timed
            for timed in replay(events, self.plan.num_stages // self.plan.num_replicas)
        }
        times = [[found[op.text] for op in order] for order in orders]
        start, end = ([[getattr(t, at) for t in row] for row in times] for at in ("start", "end"))
        return Step(step.number, start, end)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON."""
        saved: str = self.plan.__reduce__()[1][0]
        steps = [{"step": s.number, "start": s.start, "end": s.end} for s in self.steps]
        values = {"format": FORMAT, "side_by_side": self.side_by_side, "plan": saved}
        Path(path).write_text(json.dumps(values | {"steps": steps}), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """Read a profile, or that of a run's folder.

        Raises:
            ParseError: The file is no profile.
            OSError: It can't be read.
        """
        file = Path(path)
        if file.is_dir():
            file = file / FILE
            if not file.exists():
                raise ParseError(f"{path} holds no {FILE}\nhint: train with --profile")
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']}, not {FORMAT}")
            steps = [Step(step["step"], step["start"], step["end"]) for step in values["steps"]]
            profile = cls(plan_from_saved(values["plan"]), steps, values["side_by_side"])
            profile._require_shape()
        except (ValueError, KeyError, TypeError) as error:
            hint = "\nhint: give a run of `pipeloom train --profile`, or its profile.json"
            raise ParseError(f"{file} is no profile: {error}{hint}") from None
        return profile

    def _require_shape(self) -> None:
        expected = [self.plan.num_ops_of(rank) for rank in range(self.plan.pp)]
        for step in self.steps:
            for rows in (step.start, step.end):
                if [len(row) for row in rows] != expected:
                    raise ValueError(f"step {step.number} does not cover the plan's ops")


_Name = tuple[int, str, int]


def _name(op: _Op) -> _Name:
    """What `_producer` calls it: I and B bring the same gradient."""
    return (op.stage, "B" if op.kind == "I" else op.kind, op.unit)


def _producer(op: _Op, plan: Plan) -> _Name | None:
    """The op of a neighbouring stage whose result this one reads."""
    per_replica = plan.num_stages // plan.num_replicas
    place = op.stage % per_replica
    if op.kind == "F" and place > 0:
        return (op.stage - 1, "F", op.unit)
    if op.kind in "BI" and place < per_replica - 1:
        return (op.stage + 1, "B", op.unit)
    return None


def measured_costs(profile: Profile | str | PathLike[str]) -> Costs:
    """Measure costs: `Costs.from_profile`.

    An op's cost is the mean over a step's microbatches of its time and of what the rank does after
    the op before it, where it does not wait; then the median over the steps. Latency is how long
    after its producer's end an op starts that had to wait for it.
    """
    profile = profile if isinstance(profile, Profile) else Profile.load(profile)
    profile.median_step()  # refuses a profile without steps
    plan = profile.plan
    orders = [list(_ops(plan, rank)) for rank in range(plan.pp)]
    took: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    delays: list[float] = []
    for step in profile.steps:
        late, gaps = _delays(orders, step, plan) if profile.side_by_side else ([], [])
        delays += late
        overhead = median(gaps) if gaps else 0.0
        own: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
        for op in (op for order in orders for op in order):
            time = step.end[op.rank][op.at] - step.start[op.rank][op.at]
            own[op.kind, op.stage, op.recompute and op.kind in "BI"].append(time + overhead)
        for key, times in own.items():
            took[key].append(fmean(times))
    cost = {key: median(times) for key, times in took.items()}
    return _costs(cost, plan.num_stages, median(delays) if delays else 0)


def _delays(
    orders: Sequence[Sequence[_Op]], step: Step, plan: Plan
) -> tuple[list[float], list[float]]:
    """Of ops that waited: time since their producer's end; of others: since the op before."""
    end = {_name(op): step.end[op.rank][op.at] for order in orders for op in order}
    rank_of = {op.stage: op.rank for order in orders for op in order}
    late, gaps = [], []
    for order in orders:
        for op in order[1:]:
            begin, free = step.start[op.rank][op.at], step.end[op.rank][op.at - 1]
            producer = _producer(op, plan)
            remote = producer is not None and rank_of[producer[0]] != op.rank
            if remote and producer is not None and end[producer] > free:
                late.append(max(0.0, begin - end[producer]))
            elif not remote:
                gaps.append(max(0.0, begin - free))
    return late, gaps


def _costs(cost: dict[tuple[str, int, bool], float], num_stages: int, latency: float) -> Costs:
    stages = range(num_stages)

    def column(kind: str) -> list[float] | None:
        """A kind's cost of each stage, without recomputation where both were measured."""
        if not any(key[0] == kind for key in cost):
            return None
        plain = (cost.get((kind, s, False), cost.get((kind, s, True), 0.0)) for s in stages)
        return list(plain)

    def recomputation(stage: int) -> float:
        both = [(cost.get((k, stage, True)), cost.get((k, stage, False))) for k in "BI"]
        extra = [a - b for a, b in both if a is not None and b is not None]
        return max(0.0, *extra) if extra else 0.0

    values = {
        "forward": column("F"),
        "backward_input": column("I") or 0,
        "backward_weight": column("W") or 0,
        "backward": column("B"),
        "latency": latency,
    }
    if any(recompute for _, _, recompute in cost):
        values["recompute"] = [recomputation(stage) for stage in stages]
    return Costs(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]
