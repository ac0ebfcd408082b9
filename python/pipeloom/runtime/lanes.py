"""One end of a channel over a process group: a tag on gloo, a communicator on NCCL."""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeloom.runtime.errors import BoundaryError, TransferBroken, TransferTimeout, with_hint
from pipeloom.runtime.structure import from_message
from pipeloom.runtime.transport import Channel, Key, RecvHandle

if TYPE_CHECKING:
    from torch import Tensor

    from pipeloom.runtime.reaper import Reaper

__all__ = ["GroupLane", "RecvLane", "SendLane", "complete", "decode_header", "encode_header"]

MAX_DIMS = 8
HEADER_LEN = 4 + MAX_DIMS
# uint8 is a packed structure.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
_POLL_S = 0.0002


class SendLane(Protocol):
    """The sending end of a channel."""

    def send(self, key: Key, tensor: Tensor, *, announce: bool) -> None:
        """As `Transport.send`."""
        ...


class RecvLane(Protocol):
    """The receiving end of a channel."""

    def recv(self, key: Key, shape: torch.Size | None, dtype: torch.dtype) -> RecvHandle:
        """As `Transport.recv`."""
        ...


def encode_header(key: Key, tensor: Tensor) -> list[int]:
    """What a message says of itself: key, dtype, shape; `HEADER_LEN` numbers."""
    if tensor.dtype not in _DTYPES or tensor.dim() > MAX_DIMS:
        raise BoundaryError(
            with_hint(
                f"{key}: a tensor of {tensor.dtype}, {tensor.dim()} dimensions, can't be sent",
                f"send one of {', '.join(map(str, _DTYPES[:-1]))}, at most {MAX_DIMS} dimensions",
            )
        )
    sizes = [*tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]
    return [*key, _DTYPES.index(tensor.dtype), tensor.dim(), *sizes]


def decode_header(
    header: list[int] | tuple[int, ...], channel: Channel, key: Key
) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of a message that must be `key`'s.

    Raises:
        BoundaryError: It is another one's.
    """
    stage, microbatch, dtype, dims, *sizes = header
    if (stage, microbatch) != key:
        raise BoundaryError(
            with_hint(
                f"channel {channel}: the message of {Key(stage, microbatch)} came where that of "
                f"{key} was expected",
                "the plan's sends and receives do not pair up: run plan.check()",
            )
        )
    return torch.Size(sizes[:dims]), _DTYPES[dtype]


def complete(work: Any, limit_s: float, *, polls: bool) -> None:
    """Wait for a work of a process group.

    Args:
        work: What the group gave.
        limit_s: In seconds.
        polls: Whether its `wait` only orders GPU streams (NCCL), so that the host must ask.

    Raises:
        TransferTimeout: It took longer than the limit.
        TransferBroken: The peer is gone.
    """
    started = time.monotonic()
    try:
        if not polls:
            work.wait(timedelta(seconds=max(limit_s, 0.001)))
            return
        while not work.is_completed():
            if time.monotonic() - started > limit_s:
                raise TransferTimeout(f"not done after {limit_s:g} s")
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:
        if time.monotonic() - started >= limit_s:
            raise TransferTimeout(str(error)) from error
        raise TransferBroken(str(error)) from error


class GroupLane:
    """Messages of one channel through a process group.

    Args:
        channel: The channel.
        data: (group, the other end's rank in it, tag) of the tensors.
        headers: The same for the shapes that go ahead of them.
        device: Device of received tensors.
        polls: Whether works must be polled.
        reaper: Keeps what was sent alive.
    """

    def __init__(
        self,
        channel: Channel,
        data: tuple[Any, int, int],
        headers: tuple[Any, int, int],
        *,
        device: torch.device,
        polls: bool,
        reaper: Reaper,
    ) -> None:
        self.channel = channel
        self.device = device
        self.polls = polls
        self._data = data
        self._headers = headers
        self._reaper = reaper
        self._announced: deque[_GroupRecv] = deque()

    def send(self, key: Key, tensor: Tensor, *, announce: bool) -> None:
        """Post the send, after a header if the receiver does not know the shape."""
        try:
            if announce:
                header = torch.tensor(encode_header(key, tensor), device=self.device)
                group, peer, tag = self._headers
                self._reaper.hold(group.send([header], peer, tag), header, self.channel)
            group, peer, tag = self._data
            self._reaper.hold(group.send([tensor], peer, tag), tensor, self.channel)
        except RuntimeError as error:
            raise TransferBroken(str(error)) from error

    def recv(self, key: Key, shape: torch.Size | None, dtype: torch.dtype) -> _GroupRecv:
        """Post the receive of the data, or of the header that announces it."""
        handle = _GroupRecv(self, key)
        if shape is None:
            handle.post_header()
            self._announced.append(handle)
        else:
            handle.post_data(shape, dtype)
        return handle

    def post(self, buffer: Tensor, *, data: bool) -> Any:
        """Post one receive."""
        group, peer, tag = self._data if data else self._headers
        try:
            return group.recv([buffer], peer, tag)
        except RuntimeError as error:
            raise TransferBroken(str(error)) from error

    def post_data_up_to(self, handle: _GroupRecv, deadline: float) -> None:
        """Read headers in the channel's order until `handle` has its data posted.

        Data is matched in the order in which it is posted, so no message may overtake.
        """
        while handle.work is None:
            self._announced.popleft().read_header(deadline - time.monotonic())


class _GroupRecv:
    """A posted receive. Without known shapes the data follows a header that gives its shape."""

    __slots__ = ("_header", "_lane", "_tensor", "channel", "key", "work")

    def __init__(self, lane: GroupLane, key: Key) -> None:
        self.channel = lane.channel
        self.key = key
        self.work: Any = None
        self._lane = lane
        self._header: tuple[Tensor, Any] | None = None
        self._tensor: Tensor | None = None

    def post_data(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(shape, dtype=dtype, device=self._lane.device)
        self.work = self._lane.post(self._tensor, data=True)

    def post_header(self) -> None:
        header = torch.empty(HEADER_LEN, dtype=torch.int64, device=self._lane.device)
        self._header = header, self._lane.post(header, data=False)

    def read_header(self, limit_s: float) -> None:
        """Wait for the header and post the receive of the data."""
        assert self._header is not None
        header, work = self._header
        complete(work, limit_s, polls=self._lane.polls)
        self.post_data(*decode_header(header.tolist(), self.channel, self.key))

    def ready(self) -> bool:
        # gloo's works do not know that they are done before somebody has waited.
        return False

    def wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        if self.work is None:
            self._lane.post_data_up_to(self, deadline)
        complete(self.work, deadline - time.monotonic(), polls=self._lane.polls)

    def take(self) -> Any:
        tensor = self._tensor
        assert tensor is not None
        self._tensor = self.work = self._header = None
        return from_message(tensor)
