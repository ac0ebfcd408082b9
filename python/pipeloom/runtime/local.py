"""All ranks in one process: the default, for a laptop, a debugger, a test."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from pipeloom.runtime.errors import (
    PipelineError,
    PipelineTimeout,
    TransferTimeout,
    note_place,
    with_hint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from pipeloom.runtime.executor import RankExecutor
    from pipeloom.runtime.transport import Channel, Key, RecvHandle

__all__ = ["LocalTransport"]


class _LocalRecv:
    """A posted receive. The message is what was sent itself, nothing is copied."""

    __slots__ = ("_polls", "_value", "channel", "key")

    def __init__(self, channel: Channel, key: Key, polls: int) -> None:
        self.channel = channel
        self.key = key
        self._value: Any = None
        self._polls = polls

    @property
    def arrived(self) -> bool:
        return self._value is not None

    def deliver(self, key: Key, value: Any) -> None:
        if key != self.key:
            raise PipelineError(
                with_hint(
                    f"channel {self.channel}: the message of {key} came where that of {self.key} "
                    "was expected",
                    "the plan's sends and receives do not pair up: run plan.check()",
                )
            )
        self._value = value

    def ready(self) -> bool:
        if self._value is None:
            return False
        if self._polls:  # a seeded transport delivers late
            self._polls -= 1
            return False
        return True

    def wait(self, limit_s: float) -> None:
        if self._value is None:
            raise TransferTimeout(f"nothing was sent within {limit_s} s")

    def take(self) -> Any:
        value, self._value = self._value, None
        return value


class LocalTransport:
    """All ranks of a pipeline in one process and one thread.

    Ranks are run in turn, each until it needs a message that has not been sent. That is
    deterministic; with a seed, turns and delivery are shuffled by it, and results stay the same.

    Args:
        pp: Number of ranks.
        seed: Shuffles turns and delivery. None: ranks take turns in order.

    Examples:
        >>> LocalTransport(4).local_ranks
        (0, 1, 2, 3)
    """

    backend: str | None = None

    def __init__(self, pp: int, *, seed: int | None = None) -> None:
        if pp < 1:
            raise ValueError(with_hint(f"pp={pp}, but must be at least 1", "give a positive pp"))
        self.pp = pp
        self.local_ranks = tuple(range(pp))
        self.timeout_s = 0.0
        self._random = None if seed is None else random.Random(seed)
        self._sent: dict[Channel, deque[tuple[Key, Any]]] = {}
        self._posted: dict[Channel, deque[_LocalRecv]] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        """Start with empty channels, also after a step that failed."""
        channels = tuple(channels)
        self._sent = {channel: deque() for channel in channels}
        self._posted = {channel: deque() for channel in channels}

    def agree(self, fingerprint: Mapping[str, str]) -> None:
        """One process agrees with itself."""

    def withdraw(self, error: BaseException) -> None:
        """There is nobody to tell."""

    def send(self, channel: Channel, key: Key, value: Any, *, announce: bool) -> None:  # noqa: ARG002
        """Hand the value to the receive that was posted for it, or keep it until one is."""
        posted = self._posted[channel]
        if posted:
            posted.popleft().deliver(key, value)
        else:
            self._sent[channel].append((key, value))

    def recv(
        self,
        channel: Channel,
        key: Key,
        shape: torch.Size | None,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> _LocalRecv:
        """Post a receive of the channel's next message."""
        handle = _LocalRecv(channel, key, self._random.randrange(3) if self._random else 0)
        sent = self._sent[channel]
        if sent:
            handle.deliver(*sent.popleft())
        else:
            self._posted[channel].append(handle)
        return handle

    def drive(self, executors: Sequence[RankExecutor]) -> None:
        """Run all ranks in turn.

        Raises:
            PipelineTimeout: No rank can go on: each one's report is in the message.
        """
        running = {executor.rank: executor.run() for executor in executors}
        standing = {executor.rank: executor for executor in executors}
        waiting: dict[int, RecvHandle | None] = dict.fromkeys(running)
        while running:
            moved = False
            ranks = list(running)
            if self._random:
                self._random.shuffle(ranks)
            for rank in ranks:
                handle = waiting[rank]
                if handle is not None and not handle.ready():
                    moved |= handle.arrived  # type: ignore[attr-defined]
                    continue
                moved = True
                try:
                    waiting[rank] = next(running[rank], None)
                except Exception as error:
                    note_place(error, standing[rank].report())
                    raise
                if waiting[rank] is None:
                    del running[rank]
            if not moved:
                raise PipelineTimeout(
                    with_hint(
                        "deadlock: no rank can go on\n"
                        + "\n".join(executor.report() for executor in executors),
                        "the plan can't progress: plan.check() shows the cycle",
                    )
                )

    def all_reduce(self, tensors: Mapping[int, Tensor], ranks: Sequence[int] | None = None) -> None:
        """Sum over the ranks in rank order."""
        members = [tensors[rank] for rank in (self.local_ranks if ranks is None else sorted(ranks))]
        with torch.no_grad():
            total = members[0].clone()
            for tensor in members[1:]:
                total += tensor.to(total.device)
            for tensor in members:
                tensor.copy_(total)
