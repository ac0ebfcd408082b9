"""How well measured costs predict a step: `python benches/prediction.py [--steps N]`.

Trains the small GPT on two gloo processes with `--profile`, simulates each schedule with the costs
that the run measured, and prints prediction and the median measured step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import pipeloom as pl
from pipeloom.profile import Profile

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
WARM_UP = 5
"""Steps before the measured ones: allocators and caches fill."""


def measure(schedule: str, steps: int, folder: Path) -> Profile:
    """Profiles `steps` steps of a schedule."""
    out = folder / schedule
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "pipeloom", "train", "--transport", "torch", "--profile", "--pp", "2"]
    command += ["--schedule", schedule, "--steps", str(steps + WARM_UP), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    profile = Profile.load(out)
    profile.steps = profile.steps[WARM_UP:]
    return profile


def main() -> None:
    """Prints one line a schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="measured steps (default: 20)")
    steps = parser.parse_args().steps
    print(f"{'SCHEDULE':<18}  MEASURED MS  PREDICTED MS  DIFFERENCE")
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            profile = measure(schedule, steps, Path(folder))
            measured = median(map(profile.makespan, profile.steps))
            predicted = profile.plan.simulate(pl.Costs.from_profile(profile)).makespan
            difference = predicted / measured - 1
            print(f"{schedule:<18}  {measured:11.1f}  {predicted:12.1f}  {difference:+10.1%}")


if __name__ == "__main__":
    main()
