"""What a run leaves to look at: loss curve, picture of the plan, trace of a real step."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pipeloom
from pipeloom import plot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeloom.training.log import StepRecord
    from pipeloom.training.measure import OpEvent

MICROSECONDS_PER_S = 1_000_000


def draw_loss_curve(records: Sequence[StepRecord], folder: Path, *, unit: str) -> list[Path]:
    """Draws `loss.png` and `loss.svg`; nothing without matplotlib.

    Args:
        records: The whole run's.
        folder: Where the pictures go.
        unit: What the loss is a mean over: `"byte"` or `"token"`.

    Returns:
        The files written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return []
    train = [(r.step, r.loss) for r in records if r.loss is not None]
    valid = [(r.step, r.valid_loss) for r in records if r.valid_loss is not None]
    curves = {
        name: ([step for step, _ in points], [loss for _, loss in points])
        for name, points in (("training", train), ("held out", valid))
        if points
    }
    files = [folder / "loss.png", folder / "loss.svg"]
    for file in files:
        plot.loss_curve(curves, file, unit=f"nats a {unit}")
    return files


def draw_plan(plan: pipeloom.Plan, file: Path) -> Path:
    """Draws the plan as its simulation with unit costs: ranks down, time to the right."""
    file.write_text(plot.svg(plan.simulate(pipeloom.Costs())))
    return file


def write_trace(events: Iterable[OpEvent], plan: pipeloom.Plan, file: Path) -> Path:
    """Writes one executed step as Chrome trace JSON, which Perfetto opens: a row for each rank.

    Times are the host's clock; on a GPU that is when work was queued. Transfers overlap
    computation and are not among the events.
    """
    plan = plan.without_transfers()
    ordered = sorted(events, key=lambda event: event.start)
    origin = ordered[0].start
    own = [[event for event in ordered if event.rank == rank] for rank in range(plan.pp)]
    drawing = plot.measured(
        plan,
        [[event.start - origin for event in row] for row in own],
        [[event.end - origin for event in row] for row in own],
    )
    file.write_text(plot.trace(drawing, microseconds_per_unit=MICROSECONDS_PER_S))
    return file
