"""All ranks in one process, a thread each: two ranks use two cores."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from pipeloom.runtime.errors import (
    PipelineError,
    PipelineTimeout,
    TransferBroken,
    TransferTimeout,
    note_place,
    with_hint,
)
from pipeloom.runtime.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeloom.runtime.executor import RankExecutor
    from pipeloom.runtime.transport import Channel, Key

__all__ = ["ThreadedTransport"]


class _Inbox:
    """What one rank's thread waits on: messages of all channels to it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stopped = False
        self.sent: dict[Channel, deque[tuple[Key, Any]]] = {}
        self.posted: dict[Channel, deque[_ThreadRecv]] = {}


class _ThreadRecv:
    """A posted receive. The message is what was sent itself, nothing is copied."""

    __slots__ = ("_inbox", "channel", "key", "value")

    def __init__(self, inbox: _Inbox, channel: Channel, key: Key) -> None:
        self.channel = channel
        self.key = key
        self.value: Any = None
        self._inbox = inbox

    def ready(self) -> bool:
        return self.value is not None

    def wait(self, limit_s: float) -> None:
        self.wait_any((self,), limit_s)

    def wait_any(self, handles: Sequence[_ThreadRecv], limit_s: float) -> None:
        """Wait until one of the handles, all of this rank, has its message."""
        inbox = self._inbox
        with inbox.changed:
            came = inbox.changed.wait_for(
                lambda: inbox.stopped or any(h.value is not None for h in handles), limit_s
            )
            if inbox.stopped:
                raise TransferBroken("another rank has failed")
            if not came:
                raise TransferTimeout("nothing came")

    def take(self) -> Any:
        value, self.value = self.value, None
        return value


class ThreadedTransport(LocalTransport):
    """All ranks of a pipeline in one process, each in a thread of its own.

    PyTorch's kernels leave the interpreter, so ranks compute at the same time. Losses and gradients
    are bitwise those of `LocalTransport`, if no module is on two ranks and no random numbers are
    drawn from the global generator (it is shared by the threads). Hooks such as
    `on_gradients_ready` are called from the rank's thread.

    Args:
        pp: Number of ranks.
        timeout_s: Limit of every wait, in seconds.
        torch_threads: Threads that PyTorch's kernels use in each rank. None: the caller's
            number, shared between the ranks.

    Examples:
        >>> import pipeloom as pl, torch
        >>> from pipeloom.runtime import Pipeline
        >>> stages = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        >>> plan = pl.plan("1f1b", pp=2, num_microbatches=2)
        >>> loss = lambda output, target: (output - target).square().sum()
        >>> pipeline = Pipeline(plan, stages, loss, transport=ThreadedTransport(2))
        >>> pipeline.step(torch.zeros(4, 4), torch.zeros(4, 1)).loss.shape
        torch.Size([])
    """

    def __init__(
        self, pp: int, *, timeout_s: float = 60.0, torch_threads: int | None = None
    ) -> None:
        super().__init__(pp)
        if torch_threads is not None and torch_threads < 1:
            raise ValueError(
                with_hint(
                    f"torch_threads={torch_threads}, but must be at least 1", "give torch_threads=1"
                )
            )
        self.timeout_s = timeout_s
        self.torch_threads = torch_threads
        self._inboxes: list[_Inbox] = []

    def __getstate__(self) -> dict[str, Any]:
        """Copies begin with empty channels: a step opens its own."""
        return {**self.__dict__, "_inboxes": []}

    def open(self, channels: Iterable[Channel]) -> None:
        """Start with empty channels, also after a step that failed."""
        self._inboxes = [_Inbox() for _ in range(self.pp)]
        for channel in channels:
            inbox = self._inboxes[channel.destination]
            inbox.sent[channel] = deque()
            inbox.posted[channel] = deque()

    def send(self, channel: Channel, key: Key, value: Any, *, announce: bool) -> None:  # noqa: ARG002
        """Hand the value to the receive that was posted for it, or keep it until one is."""
        inbox = self._inboxes[channel.destination]
        with inbox.changed:
            posted = inbox.posted[channel]
            if posted:
                _deliver(posted.popleft(), key, value)
                inbox.changed.notify_all()
            else:
                inbox.sent[channel].append((key, value))

    def recv(  # type: ignore[override]  # another kind of handle
        self,
        channel: Channel,
        key: Key,
        shape: torch.Size | None,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> _ThreadRecv:
        """Post a receive of the channel's next message."""
        inbox = self._inboxes[channel.destination]
        handle = _ThreadRecv(inbox, channel, key)
        with inbox.changed:
            sent = inbox.sent[channel]
            if sent:
                _deliver(handle, *sent.popleft())
            else:
                inbox.posted[channel].append(handle)
        return handle

    def drive(self, executors: Sequence[RankExecutor]) -> None:
        """Run each rank in a thread.

        Raises:
            PipelineTimeout: A wait ran past the limit: each rank's report is in the message.
        """
        failures: list[tuple[RankExecutor, BaseException]] = []
        settings = _ThreadSettings(self.torch_threads or max(1, torch.get_num_threads() // self.pp))

        def work(executor: RankExecutor) -> None:
            try:
                settings.apply()
                for handle in executor.run():
                    handle.wait(self.timeout_s)
            except BaseException as error:
                failures.append((executor, error))
                self._stop()

        threads = [
            threading.Thread(target=work, args=(executor,), name=f"pipeloom rank {executor.rank}")
            for executor in executors
        ]
        try:
            for thread in threads:
                thread.start()
        finally:
            try:
                for thread in threads:
                    thread.join()
            except BaseException:  # Ctrl-C: let the ranks end at their next wait
                self._stop()
                raise
        if failures:
            raise self._failure(executors, *failures[0])

    def _stop(self) -> None:
        for inbox in self._inboxes:
            with inbox.changed:
                inbox.stopped = True
                inbox.changed.notify_all()

    def _failure(
        self, executors: Sequence[RankExecutor], first: RankExecutor, error: BaseException
    ) -> BaseException:
        """What the caller sees: the first failure, with where every rank stood."""
        if not isinstance(error, TransferTimeout):
            note_place(error, first.report())
            return error
        reports = "\n".join(executor.report() for executor in executors)
        timeout = PipelineTimeout(
            with_hint(
                f"rank {first.rank} waited past the limit of {self.timeout_s:g} s\n{reports}",
                "raise timeout_s if the step is merely slow; plan.check() shows a plan's deadlocks",
            )
        )
        timeout.__cause__ = error
        return timeout


def _deliver(handle: _ThreadRecv, key: Key, value: Any) -> None:
    if key != handle.key:
        raise PipelineError(
            with_hint(
                f"channel {handle.channel}: the message of {key} came where that of {handle.key} "
                "was expected",
                "the plan's sends and receives do not pair up: run plan.check()",
            )
        )
    handle.value = value


class _ThreadSettings:
    """PyTorch's settings that belong to a thread, taken from the caller's."""

    def __init__(self, torch_threads: int) -> None:
        self._torch_threads = torch_threads
        self._grad = torch.is_grad_enabled()
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device() if on_gpu else None

    def apply(self) -> None:
        torch.set_num_threads(self._torch_threads)
        torch.set_grad_enabled(self._grad)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self._device is not None:
            torch.cuda.set_device(self._device)
