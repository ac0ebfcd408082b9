"""One rank a process, over `torch.distributed`: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import time
from collections import Counter, deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pipeloom.runtime.agreement import NoticeBoard, Watchdog
from pipeloom.runtime.errors import (
    BoundaryError,
    PeerLost,
    PipelineError,
    PipelineTimeout,
    TransferBroken,
    TransferTimeout,
    with_hint,
)
from pipeloom.runtime.reaper import Reaper
from pipeloom.runtime.transport import BACKWARD, Channel, Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from pipeloom.runtime.executor import RankExecutor

__all__ = ["TorchTransport"]

_MAX_DIMS = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_POLL_S = 0.0002


class _Lane(NamedTuple):
    """Where one channel's messages go: a group, the other end's rank in it, a tag."""

    group: Any
    peer: int
    tag: int


class _TorchRecv:
    """A posted receive. Without known shapes the data follows a header that gives its shape."""

    __slots__ = ("_header", "_tensor", "_transport", "_work", "channel", "key")

    def __init__(self, transport: TorchTransport, channel: Channel, key: Key) -> None:
        self.channel = channel
        self.key = key
        self._transport = transport
        self._header: tuple[Tensor, Any] | None = None
        self._tensor: Tensor | None = None
        self._work: Any = None

    def post_data(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(shape, dtype=dtype, device=self._transport.device)
        self._work = self._transport.post_recv(self.channel, self._tensor, data=True)

    def post_header(self) -> None:
        header = torch.empty(4 + _MAX_DIMS, dtype=torch.int64, device=self._transport.device)
        self._header = header, self._transport.post_recv(self.channel, header, data=False)

    def read_header(self, limit_s: float) -> None:
        """Wait for the header and post the receive of the data."""
        assert self._header is not None
        header, work = self._header
        self._transport.complete(work, limit_s)
        stage, microbatch, dtype, dims, *sizes = header.tolist()
        if (stage, microbatch) != self.key:
            raise BoundaryError(
                with_hint(
                    f"channel {self.channel}: the message of {Key(stage, microbatch)} came where "
                    f"that of {self.key} was expected",
                    "the plan's sends and receives do not pair up: run plan.check()",
                )
            )
        self.post_data(torch.Size(sizes[:dims]), _DTYPES[dtype])

    def ready(self) -> bool:
        # gloo's works do not know that they are done before somebody has waited.
        return False

    def wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        if self._work is None:
            self._transport.post_data_up_to(self, deadline)
        self._transport.complete(self._work, deadline - time.monotonic())

    def take(self) -> Tensor:
        tensor = self._tensor
        assert tensor is not None
        self._tensor = self._work = self._header = None
        return tensor


class TorchTransport:
    """This process is one rank; messages go through `torch.distributed`.

    On gloo each channel has a tag of its own, on NCCL a two-rank communicator of its own, all
    created before the first step in one order on every rank.

    Args:
        group: The pipeline's process group; its ranks are the pipeline's. None: the default group.
        device: Device of received tensors. None: the CPU on gloo, the current GPU on NCCL.
        timeout_s: Limit of every wait, in seconds.
    """

    _instances: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError(
                with_hint(
                    "torch.distributed is not initialised",
                    "call torch.distributed.init_process_group(...) first, under torchrun; "
                    "or use the local transport",
                )
            )
        self._group: Any = dist.group.WORLD if group is None else group
        self.pp: int = dist.get_world_size(self._group)
        self.rank: int = dist.get_rank(self._group)
        self.local_ranks: tuple[int, ...] = (self.rank,)
        self.timeout_s = timeout_s
        self.backend: str | None = dist.get_backend(self._group)
        self._polls = self.backend == "nccl"
        if device is None:
            device = f"cuda:{torch.cuda.current_device()}" if self._polls else "cpu"
        self.device = torch.device(device)
        self.board = NoticeBoard(self._store(), self.rank, self.pp)
        self._lanes: dict[tuple[Channel, bool], _Lane] = {}
        self._headers: dict[Channel, deque[_TorchRecv]] = {}
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._agreed: dict[str, str] | None = None
        self._broken = False
        self._reaper = Reaper(polls=self._polls)

    def _store(self) -> Store:
        """A part of the group's store for this transport alone."""
        members = tuple(dist.get_process_group_ranks(self._group))
        number = TorchTransport._instances[members]
        TorchTransport._instances[members] += 1
        prefix = f"pipeloom/{'-'.join(map(str, members))}/{number}"
        return PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    # --- set-up -------------------------------------------------------------------------------

    def open(self, channels: Iterable[Channel]) -> None:
        """Create the lanes of all channels that this rank is an end of.

        Every rank passes the same channels, those of the whole plan, and goes through them in the
        same order; communicators made on first use would be made in different orders, and hang.
        """
        for channel in sorted(channels):
            if (channel, True) in self._lanes:
                continue
            if self.rank not in (channel.source, channel.destination):
                continue
            if self._polls:
                self._open_communicators(channel)
                continue
            number = (channel.source * self.pp + channel.destination) * 2
            number += channel.direction == BACKWARD
            peer = channel.destination if channel.source == self.rank else channel.source
            for data in (True, False):
                self._lanes[channel, data] = _Lane(self._group, peer, 2 * number + data)

    def _open_communicators(self, channel: Channel) -> None:
        ends = [
            dist.get_global_rank(self._group, rank)
            for rank in (channel.source, channel.destination)
        ]
        for data in (True, False):
            pair = dist.new_group(
                sorted(ends),
                timeout=timedelta(seconds=self.timeout_s),
                use_local_synchronization=True,
                group_desc=f"pipeloom {channel} {'data' if data else 'shapes'}",
            )
            dist.all_reduce(torch.zeros(1, device=self.device), group=pair)  # connects it now
            peer = 1 - dist.get_rank(pair)
            self._lanes[channel, data] = _Lane(pair, peer, 0)

    def agree(self, fingerprint: Mapping[str, str]) -> None:
        """Compare with all ranks, unless the same was agreed at the step before."""
        if self._agreed == fingerprint:
            return
        self.board.agree(fingerprint, self.timeout_s)
        self._agreed = dict(fingerprint)

    # --- messages -----------------------------------------------------------------------------

    def send(self, channel: Channel, key: Key, tensor: Tensor, *, announce: bool) -> None:
        """Post the send, after a header if the receiver does not know the shape."""
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if announce:
            self._send_header(channel, key, tensor)
        lane = self._lanes[channel, True]
        try:
            self._reaper.hold(lane.group.send([tensor], lane.peer, lane.tag), tensor, channel)
        except RuntimeError as error:
            raise TransferBroken(str(error)) from error

    def _send_header(self, channel: Channel, key: Key, tensor: Tensor) -> None:
        if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
            raise BoundaryError(
                with_hint(
                    f"{key}: a tensor of {tensor.dtype}, {tensor.dim()} dimensions, can't be sent",
                    f"send one of {', '.join(map(str, _DTYPES))}, at most {_MAX_DIMS} dimensions",
                )
            )
        sizes = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
        header = torch.tensor(
            [*key, _DTYPES.index(tensor.dtype), tensor.dim(), *sizes], device=self.device
        )
        lane = self._lanes[channel, False]
        self._reaper.hold(lane.group.send([header], lane.peer, lane.tag), header, channel)

    def recv(
        self, channel: Channel, key: Key, shape: torch.Size | None, dtype: torch.dtype
    ) -> _TorchRecv:
        """Post the receive of the data, or of the header that announces it."""
        handle = _TorchRecv(self, channel, key)
        if shape is None:
            handle.post_header()
            self._headers.setdefault(channel, deque()).append(handle)
        else:
            handle.post_data(shape, dtype)
        return handle

    def post_recv(self, channel: Channel, buffer: Tensor, *, data: bool) -> Any:
        """Post one receive on a channel's lane."""
        lane = self._lanes[channel, data]
        try:
            return lane.group.recv([buffer], lane.peer, lane.tag)
        except RuntimeError as error:
            raise TransferBroken(str(error)) from error

    def post_data_up_to(self, handle: _TorchRecv, deadline: float) -> None:
        """Read headers in the channel's order until `handle` has its data posted.

        Data is matched in the order in which it is posted, so no message may overtake.
        """
        waiting = self._headers[handle.channel]
        while handle._work is None:
            waiting.popleft().read_header(deadline - time.monotonic())

    def complete(self, work: Any, limit_s: float) -> None:
        """Wait for a work.

        Raises:
            TransferTimeout: It took longer than the limit.
            TransferBroken: The peer is gone.
        """
        started = time.monotonic()
        try:
            if self._polls:  # NCCL's wait only orders streams: wait on the host for the limit
                while not work.is_completed():
                    if time.monotonic() - started > limit_s:
                        raise TransferTimeout
                    time.sleep(_POLL_S)
                work.wait()
            else:
                work.wait(timedelta(seconds=max(limit_s, 0.001)))
        except RuntimeError as error:
            if time.monotonic() - started >= limit_s:
                raise TransferTimeout(str(error)) from error
            raise TransferBroken(str(error)) from error

    # --- running ------------------------------------------------------------------------------

    def drive(self, executors: Sequence[RankExecutor]) -> None:
        """Run this process's rank; every wait has the limit `timeout_s`.

        Raises:
            PipelineTimeout: A wait ran past the limit.
            PeerLost: A peer is gone.
        """
        if self._broken:
            raise PipelineError(
                with_hint(
                    f"rank {self.rank}: an earlier step failed and left messages under way",
                    "start the processes again from a checkpoint",
                )
            )
        (executor,) = executors
        self._broken = True  # until the end is reached
        self._headers.clear()
        watchdog = Watchdog(self.board, executor.report, grace_s=max(1.0, self.timeout_s / 2))
        try:
            for handle in executor.run():
                handle.wait(self.timeout_s)
            self._drain()
            self._broken = False
        except TransferTimeout as error:
            raise self._failure(executor, PipelineTimeout, "waited past the limit of ") from error
        except TransferBroken as error:
            raise self._failure(executor, PeerLost, "lost the connection, limit ") from error
        except BaseException as error:
            error.add_note(executor.report())
            self.board.post_failure(f"{executor.report()}: {type(error).__name__}: {error}")
            raise
        finally:
            watchdog.stop()

    def _drain(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        for work, _, channel in self._reaper.drain(self.timeout_s):
            try:
                self.complete(work, deadline - time.monotonic())
            except (TransferTimeout, TransferBroken) as error:
                raise type(error)(f"send to rank {channel.destination}: {error}") from error

    def _failure(
        self, executor: RankExecutor, kind: type[PipelineError], what: str
    ) -> PipelineError:
        """Tell the others, and make this rank's error."""
        report = executor.report()
        own = f"{report}; {what}{self.timeout_s:g} s"
        others = self.board.reported(patience_s=0.5 if kind is PeerLost else 0.0)
        self.board.post_failure(own)
        return kind(
            with_hint(
                own + others,
                "look first at the rank that reports nothing: it is stuck or dead; raise "
                "timeout_s if its step is merely slow",
            )
        )

    def all_reduce(self, tensors: Mapping[int, Tensor], ranks: Sequence[int] | None = None) -> None:
        """Sum over the ranks, within the time limit."""
        members = tuple(range(self.pp)) if ranks is None else tuple(sorted(ranks))
        if len(members) == 1:
            return
        try:
            work = dist.all_reduce(tensors[self.rank], group=self._subgroup(members), async_op=True)
            self.complete(work, self.timeout_s)
        except (TransferTimeout, TransferBroken, RuntimeError) as error:
            kind = PipelineTimeout if isinstance(error, TransferTimeout) else PeerLost
            own = f"rank {self.rank} in all_reduce over ranks {list(members)}: {error}"
            others = self.board.reported()
            self.board.post_failure(own)
            raise kind(
                with_hint(own + others, "every rank of the pipeline must take part in reductions")
            ) from error

    def _subgroup(self, members: tuple[int, ...]) -> Any:
        if len(members) == self.pp:
            return self._group
        if members not in self._subgroups:
            self._subgroups[members] = dist.new_group(
                [dist.get_global_rank(self._group, rank) for rank in members],
                timeout=timedelta(seconds=self.timeout_s),
                use_local_synchronization=True,
            )
        return self._subgroups[members]
