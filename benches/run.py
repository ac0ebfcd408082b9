"""Times pipeloom's planner and its peers in one run: `python benches/run.py [--json FILE]`.

A run of minutes; nothing here is a test. See benches/README.md for the last table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import peers
import timing
from pipeloom import _core
from planning import ROWS, Row
from running import GROUPS

UNITS = {"us": 1e6, "ns/op": 1e9}


def measure(row: Row) -> dict[str, object]:
    """One object of the table; times in seconds a call unless the row has a unit of its own."""
    result: dict[str, object] = {"name": row.name, "work": row.work, "goal": row.goal}
    built = row.build()
    if isinstance(built, tuple):
        mine, theirs = timing.side_by_side(*built)
        ours, noise = mine.median * UNITS.get(row.unit, 1), mine.noise
        if theirs is not None:
            ratio = theirs.median / ours
            found = {"ours": ours, "peer": theirs.median, "ratio": ratio, "unit": "s"}
            return result | found | {"met": ratio >= row.goal, "noise": noise}
    else:
        ours, noise = built, 0.0
    ours /= row.per() if row.per else 1
    found = {"ours": ours, "peer": None, "ratio": row.goal / ours if ours else None}
    return result | found | {"unit": row.unit, "met": ours <= row.goal, "noise": noise}


def line(result: dict[str, object]) -> str:
    def seconds(value: object) -> str:
        if not isinstance(value, float):
            return "-"
        for unit, scale in (("s", 1), ("ms", 1e3)):
            if value * scale >= 1:
                return f"{value * scale:.3g} {unit}"
        return f"{value * 1e6:.3g} us"

    own = result["unit"] != "s"
    ours = f"{result['ours']:.3g} {result['unit']}" if own else seconds(result["ours"])
    goal = f"<= {result['goal']:g} {result['unit']}" if own else f">= {result['goal']:g}x"
    cells = (
        str(result["name"]),
        ours,
        seconds(result["peer"]),
        "-" if own else f"{result['ratio']:.{0 if result['ratio'] >= 10 else 2}f}x",
        goal,
        "yes" if result["met"] else "NO",
        f"{result['noise']:.0%}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    names = [row.name for row in ROWS] + [group.name for group in GROUPS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one object a row")
    parser.add_argument("--only", action="append", choices=names, help="rows to run; repeatable")
    parser.add_argument("--reps", type=int, metavar="N", help="steps of each runtime row")
    args = parser.parse_args()
    if _core.build_profile != "release":
        print("the extension is a debug build\nhint: run `make dev`", file=sys.stderr)
        return 2
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, ", end="")
    print(", ".join(f"{p} {peers.installed(p)}" for p in ("torch", "megatron-core")))
    print(
        "| row | ours | peer | ratio | goal | met | noise of ours |\n|---|---|---|---|---|---|---|"
    )
    results = []
    for row in ROWS:
        if args.only and row.name not in args.only:
            continue
        try:
            results.append(measure(row))
        except (peers.MissingPeerError, AttributeError) as error:
            print(f"| {row.name} | skipped: {error} | | | | | |")
            continue
        print(line(results[-1]), flush=True)
    for group in GROUPS:
        if args.only and group.name not in args.only:
            continue
        try:
            rows = group.measure(args.reps or group.reps)
        except peers.MissingPeerError as error:
            print(f"| {group.name} | skipped: {error} | | | | | |")
            continue
        for row in rows:
            print(line(row), flush=True)
        results += rows
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
