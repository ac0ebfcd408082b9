"""A slower link, for tests and benchmarks: messages leave late."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from pipeloom.runtime.errors import PipelineError, with_hint
from pipeloom.runtime.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from pipeloom.runtime.executor import RankExecutor
    from pipeloom.runtime.transport import Channel, Key, RecvHandle, Transport

__all__ = ["DelayedTransport", "jitter"]


def jitter(mean_s: float, *, share: float = 1.0, seed: int = 0) -> Callable[[Channel, Key], float]:
    """Make a delay that varies: some messages are late, by an exponentially distributed time.

    Args:
        mean_s: Mean delay of all messages, in seconds.
        share: Part of the messages that are late; the rest are not delayed.
        seed: With channel and message, all that a delay depends on.

    Examples:
        >>> late = jitter(0.001, share=0.1, seed=3)
        >>> late("any", 1) == late("any", 1)
        True
    """

    def delay_s(channel: Channel, key: Key) -> float:
        draw = random.Random(f"{seed} {channel} {key}")
        return draw.expovariate(share / mean_s) if draw.random() < share else 0.0

    return delay_s


class DelayedTransport:
    """Adds latency to another transport's messages, with jitter if wanted.

    A courier thread holds each message for its delay and then sends it through the transport
    beneath. Messages of a channel stay in order. The sender goes on at once; that is how a
    transfer overlaps computation.

    Args:
        transport: What sends in the end: one that waits by the clock, so not `LocalTransport`.
        delay_s: Seconds that each message is held: a number, or a function of (channel, key),
            such as `jitter` makes.

    Examples:
        >>> from pipeloom.runtime.threads import ThreadedTransport
        >>> DelayedTransport(ThreadedTransport(2), delay_s=0.001).pp
        2
    """

    def __init__(
        self, transport: Transport, *, delay_s: float | Callable[[Channel, Key], float]
    ) -> None:
        if type(transport) is LocalTransport:
            raise PipelineError(
                with_hint(
                    "LocalTransport does not wait by the clock, so its messages can't be delayed",
                    "use ThreadedTransport(pp), or TorchTransport under torchrun",
                )
            )
        if not callable(delay_s) and delay_s < 0:
            raise PipelineError(
                with_hint(
                    f"delay_s={delay_s}, but it must be at least 0",
                    "give seconds, such as delay_s=0.001",
                )
            )
        self._transport = transport
        self.pp = transport.pp
        self.local_ranks = transport.local_ranks
        self.backend = transport.backend
        self.timeout_s = transport.timeout_s
        self.device: torch.device | None = getattr(transport, "device", None)
        self.delay_s = delay_s
        self._courier = _Courier(transport)
        self._due: dict[Channel, float] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        """Open the channels beneath, nothing on the way."""
        self._courier.flush(self.timeout_s)
        self._transport.open(channels)

    def agree(self, fingerprint: Mapping[str, str]) -> None:
        """As the transport beneath."""
        self._transport.agree(fingerprint)

    def withdraw(self, error: BaseException) -> None:
        """As the transport beneath."""
        self._transport.withdraw(error)

    def send(self, channel: Channel, key: Key, value: Any, *, announce: bool) -> None:
        """Leave the message to the courier."""
        given = self.delay_s
        delay = given(channel, key) if callable(given) else given
        due = max(time.monotonic() + delay, self._due.get(channel, 0.0))
        self._due[channel] = due
        self._courier.take(due, (channel, key, value, announce))

    def recv(
        self, channel: Channel, key: Key, shape: torch.Size | None, dtype: torch.dtype
    ) -> RecvHandle:
        """Post a receive."""
        return self._transport.recv(channel, key, shape, dtype)

    def drive(self, executors: Sequence[RankExecutor]) -> None:
        """Run the ranks; each ends when the courier has sent all."""
        flushed = [_Flushed(executor, self._courier, self.timeout_s) for executor in executors]
        self._transport.drive(cast("Any", flushed))

    def all_reduce(self, tensors: Mapping[int, Tensor], ranks: Sequence[int] | None = None) -> None:
        """As the transport beneath, undelayed."""
        self._transport.all_reduce(tensors, ranks)


class _Flushed:
    """An executor whose run ends when its messages have left."""

    def __init__(self, executor: RankExecutor, courier: _Courier, limit_s: float) -> None:
        self.rank = executor.rank
        self.report = executor.report
        self._executor, self._courier, self._limit_s = executor, courier, limit_s

    def run(self) -> Iterator[RecvHandle]:
        yield from self._executor.run()
        self._courier.flush(self._limit_s)


class _Courier:
    """One thread that sends messages when they are due."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, tuple[Channel, Key, Any, bool]]] = []
        self._numbers = itertools.count()  # equal times leave in the order they came
        self._on_the_way = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def take(self, due: float, message: tuple[Channel, Key, Any, bool]) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
                self._thread.start()
            self._on_the_way += 1
            heapq.heappush(self._heap, (due, next(self._numbers), message))
            self._changed.notify_all()

    def flush(self, limit_s: float) -> None:
        """Wait until nothing is on the way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._on_the_way or self._error, limit_s)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap:
                    self._changed.wait()
                wait = self._heap[0][0] - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                _, _, (channel, key, value, announce) = heapq.heappop(self._heap)
            try:
                self._transport.send(channel, key, value, announce=announce)
            except BaseException as error:
                self._error = error
            del value
            with self._changed:
                self._on_the_way -= 1
                self._changed.notify_all()
