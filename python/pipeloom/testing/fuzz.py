"""A hunt for wrong plans: the command ``pipeloom fuzz``.

Each case is drawn from a seed, so a run can be repeated; a case that fails is made as small as
possible and printed as the command that replays it.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.testing import invariants, strategies

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

Case = dict[str, Any]
"""What is planned and how it is tried, as plain values that JSON holds."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Arguments of a plan, accepted or not, and for accepted ones all that is done with them."""
    arguments = draw(strategies.arguments())
    case: Case = {"plan": arguments}
    try:
        plan = pl.plan(**arguments)
    except pl.PlanError:
        return case
    case["costs"] = draw(strategies.cost_arguments(plan))
    case["style"] = draw(st.sampled_from(strategies.STYLES))
    case["prefetch"] = draw(st.integers(1, 3))
    return case


def judge(case: Case) -> None:
    """Tries one case.

    Raises:
        AssertionError: Something that must hold does not.
    """
    if not __debug__:
        raise RuntimeError("python -O drops the checks\nhint: run without -O")
    arguments = case["plan"]
    invariants.refuses_what_deadlocks(arguments)
    try:
        plan = pl.plan(**arguments)
    except pl.ConfigError:
        return
    invariants.is_sound(arguments)
    invariants.equals_twin(arguments)
    invariants.random_access_agrees(plan)
    invariants.marks_agree(plan)
    invariants.round_trips(plan)
    invariants.csv_round_trips(plan)
    if "costs" in case:
        invariants.times_agree(plan, case["costs"])
        for name in ("forward", "backward_input", "latency"):
            invariants.dearer_is_later(plan, case["costs"], name)
    if "style" in case:
        invariants.lowers(plan, case["style"], case["prefetch"])
        lowered = plan.lower(case["style"], prefetch=case["prefetch"])
        invariants.round_trips(lowered)
        invariants.progress_agrees(lowered)


class _Found(Exception):  # noqa: N818 - no error of ours: it carries one
    def __init__(self, case: Case, reason: str) -> None:
        super().__init__(reason)
        self.case, self.reason = case, reason


def _tried(case: Case) -> None:
    try:
        judge(case)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the core is a BaseException
        raise _Found(case, f"{type(error).__name__}: {error}") from error


def hunt(num_cases: int, start: int, on_case: Callable[[int], None]) -> tuple[Case, str] | None:
    """Tries cases until one fails.

    Args:
        num_cases: Most cases to try.
        start: Seed of the cases.
        on_case: Called with the number of cases tried so far.

    Returns:
        The smallest failing case that was found, with the reason; None if all hold.

    Examples:
        >>> hunt(3, 0, lambda count: None)
    """
    count = 0

    @seed(start)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases())
    def all_hold(case: Case) -> None:
        nonlocal count
        count += 1
        on_case(count)
        _tried(case)

    try:
        all_hold()
    except _Found as found:
        return found.case, found.reason
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``pipeloom fuzz``."""
    parser.add_argument(
        "--cases", type=int, default=1000, metavar="N", help="cases to try (default: 1000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="same seed, same cases (default: 0)"
    )
    parser.add_argument("--replay", metavar="CASE", help="try one case, as a failing run prints it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--progress", action="store_true", help="show progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Runs ``pipeloom fuzz``.

    Returns:
        0 if every case holds, 1 if one does not, 130 after Ctrl-C.
    """
    if options.cases < 1:
        raise pl.ConfigError(f"cases={options.cases} is not positive\nhint: give --cases 1000")
    tried, began = 0, time.monotonic()

    def on_case(count: int) -> None:
        nonlocal tried
        tried = count
        if options.progress and count % 50 == 0:
            print(f"\r{count} cases", end="", file=sys.stderr, flush=True)

    interrupted, found = False, None
    try:
        if options.replay is not None:
            found = _replay(options.replay)
            tried = 1
        else:
            found = hunt(options.cases, options.seed, on_case)
    except KeyboardInterrupt:
        interrupted = True
    if options.progress:
        print(file=sys.stderr)
    report = {
        "cases": tried,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began, 3),
        "interrupted": interrupted,
        "failure": None if found is None else _failure(*found),
    }
    print(json.dumps(report) if options.json else _text(report))
    return 130 if interrupted else int(found is not None)


def _replay(text: str) -> tuple[Case, str] | None:
    try:
        case = json.loads(text)
        case["plan"]["schedule"]
    except (ValueError, TypeError, KeyError) as error:
        raise pl.ParseError(
            f"--replay {text[:60]!r} is not a case: {error}\n"
            'hint: give JSON such as {"plan": {"schedule": "1f1b", "pp": 2, "num_microbatches": 4}}'
        ) from error
    try:
        _tried(case)
    except _Found as found:
        return found.case, found.reason
    return None


def _failure(case: Case, reason: str) -> dict[str, Any]:
    replay = shlex.join(["pipeloom", "fuzz", "--replay", json.dumps(case)])
    return {"case": case, "reason": reason, "replay": replay}


def _text(report: dict[str, Any]) -> str:
    head = f"{report['cases']} cases, seed {report['seed']}, {report['seconds']:.1f} s"
    failure = report["failure"]
    if failure is not None:
        return f"{head}: wrong\n{failure['reason']}\nreplay: {failure['replay']}"
    return f"{head}: {'interrupted' if report['interrupted'] else 'all hold'}"
