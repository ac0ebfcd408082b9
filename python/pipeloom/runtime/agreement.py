"""What ranks tell each other beside the pipeline: agreement before a step, failures in it.

Both go through the key-value store of the process group, not through its collectives: a read of
the store has a time limit, can name who is missing, and works while the group itself is broken.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

import pipeloom
from pipeloom.runtime import helpers
from pipeloom.runtime.errors import AgreementError, PipelineTimeout, with_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C._distributed_c10d import Store

__all__ = ["NoticeBoard", "Watchdog", "compare", "versions"]

T = TypeVar("T")

_PATIENCE_S = 2.0  # for the store to answer

_WITHDRAWN = "can't take part"
_LOOK = "see that rank's output"

EXIT_STUCK = 70
"""Exit status of a rank that the watchdog had to end."""


def versions() -> dict[str, str]:
    """What every fingerprint holds besides the plan."""
    return {
        "pipeloom version": pipeloom.__version__,
        "torch version": torch.__version__,
        "byte order": sys.byteorder,
    }


def compare(fingerprints: list[dict[str, str]]) -> str | None:
    """Say in which entries the ranks' fingerprints differ; None if they don't.

    Examples:
        >>> print(
        ...     compare(
        ...         [{"plan": "1f1b m=4", "dtype": "f32"}, {"plan": "1f1b m=8", "dtype": "f32"}]
        ...     )
        ... )
        plan: rank 0 has 1f1b m=4; rank 1 has 1f1b m=8
    """
    lines = []
    for name in sorted({name for fingerprint in fingerprints for name in fingerprint}):
        holders: dict[str, list[int]] = {}
        for rank, fingerprint in enumerate(fingerprints):
            holders.setdefault(fingerprint.get(name, "nothing"), []).append(rank)
        if len(holders) > 1:
            says = [
                f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} "
                f"{'has' if len(ranks) == 1 else 'have'} {value}"
                for value, ranks in holders.items()
            ]
            lines.append(f"{name}: {'; '.join(says)}")
    return "\n".join(lines) or None


def _within(limit_s: float, call: Callable[[], T], otherwise: T) -> T:
    """What `call` gives, or `otherwise` if it fails or takes longer than the limit.

    The store's host may be the very rank that is dead or stopped; most of its calls have no limit
    of their own. A call that never returns is left behind in its thread.
    """
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, name="pipeloom-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else otherwise


class NoticeBoard:
    """One pipeline's part of the store.

    Args:
        store: The process group's store, prefixed by the pipeline's own name.
        rank: This rank in the pipeline.
        pp: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, pp: int) -> None:
        self._store = store
        self._rank = rank
        self._pp = pp
        self._rounds = 0

    def agree(self, fingerprint: Mapping[str, str], limit_s: float) -> None:
        """Compare fingerprints with all ranks.

        Raises:
            AgreementError: They differ; the same message on every rank.
            PipelineTimeout: Some rank did not come within the limit.
        """
        keys = [f"agree/{self._rounds}/{rank}" for rank in range(self._pp)]
        self._rounds += 1
        self._store.set(keys[self._rank], json.dumps(dict(fingerprint)))
        try:
            self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:  # torch's stores raise subclasses of it
            missing = _within(
                _PATIENCE_S,
                lambda: str(
                    [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                ),
                "unknown, the store does not answer",
            )
            raise PipelineTimeout(
                with_hint(
                    f"rank {self._rank} waited {limit_s:g} s to agree on the plan, but these ranks "
                    f"did not come: {missing}{self.reported()}",
                    "every rank of the pipeline must enter every step, also evaluation",
                )
            ) from error
        fingerprints = [json.loads(self._store.get(key)) for key in keys]
        for rank, entry in enumerate(fingerprints):
            if _WITHDRAWN in entry:
                what, _, hint = entry[_WITHDRAWN].partition("\nhint: ")
                raise AgreementError(
                    with_hint(f"rank {rank} can't take part in the step: {what}", hint or _LOOK)
                )
        difference = compare(fingerprints)
        if difference:
            raise AgreementError(
                with_hint(
                    f"the ranks of the pipeline do not agree\n{difference}",
                    "start every rank with the same arguments and versions",
                )
            )

    def withdraw(self, text: str) -> None:
        """Tell the other ranks that this one can't enter the step, now or once they come."""
        self.post_failure(f"rank {self._rank} can't take part in the step: {text}")
        key = f"agree/{self._rounds}/{self._rank}"
        _within(_PATIENCE_S, lambda: self._store.set(key, json.dumps({_WITHDRAWN: text})), None)

    def post_failure(self, report: str) -> None:
        """Tell the other ranks why this one ends. Never raises, never blocks for long."""

        def post() -> None:
            self._store.set(f"failed/{self._rank}", report)
            self._store.set("failed/any", str(self._rank))

        _within(_PATIENCE_S, post, None)

    def failed(self) -> bool:
        """Whether any rank has posted a failure.

        A store that is gone says nothing: the rank that hosts it may have finished.
        """
        try:
            return bool(self._store.check(["failed/any"]))
        except RuntimeError:
            return False

    def reported(self, patience_s: float = 0.0) -> str:
        """The other ranks' failures as lines to append to a message; empty if there are none.

        Args:
            patience_s: How long to wait for the first one, in seconds.
        """

        def read() -> str:
            deadline = time.monotonic() + patience_s
            while not self.failed() and time.monotonic() < deadline:
                time.sleep(0.02)
            lines = []
            for rank in range(self._pp):
                key = f"failed/{rank}"
                if rank != self._rank and self._store.check([key]):
                    first = self._store.get(key).decode().split("\n")[0]
                    lines.append(f"\nrank {rank} reported: {first}")
            return "".join(lines)

        silent = "\nthe store that the ranks share does not answer"
        return _within(patience_s + _PATIENCE_S, read, silent)


class Watchdog:
    """Ends this process if another rank has failed and this one can't notice; for all steps.

    A rank that waits notices by itself. One that computes, or hangs in the caller's code, does
    not: after `grace_s` seconds the watchdog prints where it stands and ends the process.

    Args:
        board: Where failures are posted.
        grace_s: Time between another rank's failure and the end, in seconds.
    """

    def __init__(self, board: NoticeBoard, grace_s: float) -> None:
        self._board = board
        self._grace_s = grace_s
        self._report: Callable[[], str] | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self, report: Callable[[], str]) -> None:
        """Watch a step.

        Args:
            report: Gives this rank's report.
        """
        self._report = report
        if self._thread is None:  # one for all steps: making it takes as long as a few small ops
            self._thread = threading.Thread(
                target=self._watch, name="pipeloom-watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop watching, when a step has ended either way."""
        self._report = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        helpers.end(self._thread)

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._grace_s)):
            self._look()

    def _look(self) -> None:
        # The report knows the transport, which must be free to go between two looks.
        report_of = self._report
        if report_of is None or not self._board.failed():
            return
        if self._closed.wait(self._grace_s) or self._report is not report_of:
            return
        report = f"{report_of()}{self._board.reported()}"
        self._board.post_failure(report)
        print(
            f"pipeloom: another rank failed, and this one did not stop within "
            f"{self._grace_s:g} s: {report}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STUCK)
