"""How long the command line takes to start, in processes of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

SHAPE = ["1f1b", "--pp", "4", "-m", "8"]
LIGHT = {"help": ["--help"], "schedules": ["schedules"]}
"""Commands that load no numpy: within 150 ms."""
HEAVY = {
    "plan": ["plan", *SHAPE],
    "show": ["show", *SHAPE],
    "show_html": ["show", *SHAPE, "--html", "-"],
    "check": ["check", *SHAPE],
    "simulate": ["simulate", *SHAPE],
    "compare": ["compare", "1f1b", "zb_h1", "--pp", "4", "-m", "8"],
    "train_help": ["train", "--help"],
}
"""The rest: within 100 ms more than `import numpy`."""


def once(words: list[str]) -> float:
    """Milliseconds of `python WORDS`."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return 1000 * (time.perf_counter() - begin)


def measure(reps: int) -> list[dict[str, object]]:
    """The rows: medians of rounds in which each command runs once."""
    commands = {name: ["-m", "pipeloom", *argv] for name, argv in (LIGHT | HEAVY).items()}
    commands["numpy"] = ["-c", "import numpy"]
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for round_number in range(reps + 1):
        for name, words in commands.items():
            took = once(words)
            if round_number > 0:  # the first fills the disk's cache
                taken[name].append(took)
    median = {name: statistics.median(times) for name, times in taken.items()}
    rows = []
    for name in LIGHT | HEAVY:
        above = 0.0 if name in LIGHT else median["numpy"]
        goal = 150.0 if name in LIGHT else 100.0
        ours = median[name] - above
        noise = statistics.pstdev(taken[name]) / median[name]
        work = f"start of {name}" + (", above importing numpy" if name in HEAVY else "")
        rows.append(
            {"name": f"start_{name}", "work": work, "goal": goal, "ours": ours, "peer": None,
             "ratio": None, "unit": "ms", "met": ours <= goal, "noise": noise}
        )  # fmt: skip
    return rows
