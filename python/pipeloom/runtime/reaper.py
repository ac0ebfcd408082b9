"""Keeps sent tensors alive until their send is done, and lets them go then."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeloom.runtime import helpers
from pipeloom.runtime.errors import TransferBroken, TransferTimeout

if TYPE_CHECKING:
    from torch import Tensor

    from pipeloom.runtime.transport import Channel

__all__ = ["Reaper"]

_BATCH = 32


class _Send(NamedTuple):
    work: Any
    tensor: Tensor
    channel: Channel


class Reaper:
    """Holds sends in flight; nobody waits for them on the compute path.

    NCCL's works can be asked whether they are done. gloo's can't: they know only after a wait. So
    of those, batches of `_BATCH` go to a thread that waits for them and drops the tensors; a
    thread woken for each send would cost more than a small stage's op.

    Args:
        polls: Whether works can be asked.
    """

    def __init__(self, *, polls: bool) -> None:
        self._polls = polls
        self._held: list[_Send] = []
        self._batches: queue.SimpleQueue[list[_Send] | None] | None = None
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._done = threading.Condition()
        self._error: RuntimeError | None = None

    def hold(self, work: Any, tensor: Tensor, channel: Channel) -> None:
        """Keep the tensor of a posted send."""
        self._held.append(_Send(work, tensor, channel))
        if len(self._held) < _BATCH:
            return
        if self._polls:
            self._held = [send for send in self._held if not send.work.is_completed()]
            return
        if self._batches is None:
            self._batches = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._reap, name="pipeloom-reaper", daemon=True)
            self._thread.start()
        with self._done:
            self._pending += 1
        self._batches.put(self._held)
        self._held = []

    def drain(self, limit_s: float) -> list[_Send]:
        """Give back the sends that somebody must still wait for, at the end of a step.

        Raises:
            TransferTimeout: The thread's sends were not done within the limit, in seconds.
            TransferBroken: One of them failed.
        """
        with self._done:
            finished = self._done.wait_for(
                lambda: self._pending == 0 or self._error is not None, limit_s
            )
            if self._error is not None:
                raise TransferBroken(str(self._error)) from self._error
            if not finished:
                raise TransferTimeout("sends were not received")
        held, self._held = self._held, []
        return held

    def close(self) -> None:
        """End the thread, after what it waits for."""
        if self._batches is not None:
            self._batches.put(None)
            helpers.end(self._thread)

    def _reap(self) -> None:
        assert self._batches is not None
        while (batch := self._batches.get()) is not None:
            try:
                while batch:
                    batch.pop(0).work.wait()
            except RuntimeError as error:
                self._error = error
            with self._done:
                self._pending -= 1
                self._done.notify_all()
