"""Plan a step, prove it, predict it, export it. Needs numpy alone."""

import tempfile
from pathlib import Path

import pipeloom as pl


def main() -> None:
    """Walk through the planner on four ranks."""
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8)
    print(plan)  # the grid of all ranks

    # Random access: nothing of the order is built.
    assert plan.op(3, 5) == "7B0"
    assert plan.position(3, "7B0") == 5

    # Sends and receives that progress even if every transfer blocks.
    lowered = plan.lower("fifo")
    print(lowered.ops(0)[:6])
    assert lowered.check("all").progress["rendezvous"]

    # The same shape under several schedules.
    costs = pl.Costs(forward=1, backward_input=1, backward_weight=1)
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        timeline = pl.plan(schedule, pp=4, num_microbatches=8).simulate(costs)
        peak = max(timeline.peak_memory(rank) for rank in range(4))
        bubble = f"{timeline.bubble_ratio:.1%}"
        print(f"{schedule:6} makespan {timeline.makespan}  bubble {bubble}  peak {peak}")

    # PyTorch reads the CSV; so do we.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.csv"
        plan.to_csv(path)
        assert pl.Plan.from_csv(path) == plan


if __name__ == "__main__":
    main()
