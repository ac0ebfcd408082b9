"""One rank a process, over `torch.distributed`: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from pipeloom.runtime.agreement import NoticeBoard, Watchdog
from pipeloom.runtime.errors import (
    AgreementError,
    BoundaryError,
    PeerLost,
    PipelineError,
    PipelineTimeout,
    TransferBroken,
    TransferTimeout,
    note_place,
    with_hint,
)
from pipeloom.runtime.groups import make_group
from pipeloom.runtime.lanes import GroupLane, RecvLane, SendLane, complete
from pipeloom.runtime.reaper import Reaper
from pipeloom.runtime.sockets import SocketHub, SocketSender
from pipeloom.runtime.structure import to_message
from pipeloom.runtime.transport import BACKWARD, Channel, Key, RecvHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from pipeloom.runtime.executor import RankExecutor

__all__ = ["TorchTransport"]

T = TypeVar("T")


class TorchTransport:
    """This process is one rank; messages go through `torch.distributed`.

    Each channel has a lane of its own: on CPUs a socket if both ranks are on one host, else a tag
    on gloo; on GPUs a two-rank NCCL communicator. All are created before the first step, in one
    order on every rank.

    Args:
        group: The pipeline's process group; its ranks are the pipeline's. None: the default group.
        device: Device of received tensors. None: the CPU on gloo, the current GPU on NCCL.
        timeout_s: Limit of every wait, in seconds.
        sockets: Whether CPU ranks of one host use sockets in place of gloo for their messages.
    """

    _instances: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
        sockets: bool = True,
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
        store = self._store()
        self.board = NoticeBoard(store, self.rank, self.pp)
        self._hub: SocketHub | None = None
        if sockets and self.backend == "gloo" and self.device.type == "cpu":
            self._hub = SocketHub(store, self.rank, self.pp, timeout_s)
        self._neighbours: set[int] | None = None
        self._senders: dict[Channel, SendLane] = {}
        self._receivers: dict[Channel, RecvLane] = {}
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._agreed: dict[str, str] | None = None
        self._broken = False
        self._reaper = Reaper(polls=self._polls)
        self._watchdog = Watchdog(self.board, grace_s=max(1.0, timeout_s / 2))
        self._end = weakref.finalize(self, _close, self._watchdog, self._reaper, self._hub)

    def _store(self) -> Store:
        """A part of the group's store for this transport alone."""
        members = tuple(dist.get_process_group_ranks(self._group))
        number = TorchTransport._instances[members]
        TorchTransport._instances[members] += 1
        self._name = f"pipeloom/{'-'.join(map(str, members))}/{number}"
        return PrefixStore(self._name, dist.distributed_c10d._get_default_store())

    def open(self, channels: Iterable[Channel]) -> None:
        """Create the lanes of all channels that this rank is an end of.

        Every rank passes the same channels, those of the whole plan, and goes through them in the
        same order; communicators made on first use would be made in different orders, and hang.

        Raises:
            PipelineTimeout: A peer did not come.
        """
        new = [
            channel
            for channel in sorted(channels)
            if self.rank in channel[:2]
            and channel not in self._senders
            and channel not in self._receivers
        ]
        if self._neighbours is None and self._hub is not None:
            self._neighbours = self._limited(self._hub.neighbours)
        near = [c for c in new if {c.source, c.destination} - {self.rank} <= self._near()]
        if near and self._hub is not None:
            hub = self._hub
            senders, receivers = self._limited(lambda: hub.connect(near))
            self._senders |= senders
            self._receivers |= receivers
        for channel in new:
            if channel not in near:
                lane = self._group_lane(channel)
                if channel.source == self.rank:
                    self._senders[channel] = lane
                else:
                    self._receivers[channel] = lane

    def _near(self) -> set[int]:
        """The ranks that sockets reach."""
        return self._neighbours or set()

    def _limited(self, call: Callable[[], T]) -> T:
        """Run a set-up call that may wait for peers."""
        try:
            return call()
        except (TransferTimeout, TransferBroken) as error:
            raise PipelineTimeout(
                with_hint(
                    f"rank {self.rank} set up its channels for {self.timeout_s:g} s: {error}"
                    f"{self.board.reported()}",
                    "every rank must start the same plan",
                )
            ) from error

    def _group_lane(self, channel: Channel) -> GroupLane:
        """A lane through the process group: own tags on gloo, own communicators on NCCL."""
        if self._polls:
            data, headers = (self._communicator(channel, what) for what in ("data", "shapes"))
        else:
            number = (channel.source * self.pp + channel.destination) * 2
            number += channel.direction == BACKWARD
            peer = channel.destination if channel.source == self.rank else channel.source
            data, headers = ((self._group, peer, 2 * number + which) for which in (0, 1))
        return GroupLane(
            channel,
            data,
            headers,
            device=self.device,
            polls=self._polls,
            reaper=self._reaper,
        )

    def _communicator(self, channel: Channel, what: str) -> tuple[Any, int, int]:
        pair = self._make_group(
            (channel.source, channel.destination), f"{'-'.join(map(str, channel))}-{what}"
        )
        dist.all_reduce(torch.zeros(1, device=self.device), group=pair)  # connects it now
        return pair, 1 - dist.get_rank(pair), 0

    def agree(self, fingerprint: Mapping[str, str]) -> None:
        """Compare with all ranks, unless the same was agreed at the step before."""
        self._require_whole()
        own = {**fingerprint, "transport": f"{self.backend}, sockets={self._hub is not None}"}
        if self._agreed != own:
            try:
                self.board.agree(own, self.timeout_s)
            except AgreementError:
                self._broken = self.board.failed()  # a rank is gone, not only of another mind
                raise
            self._agreed = own

    def close(self) -> None:
        """Close connections and end threads. Happens by itself when the transport is dropped.

        Steps are refused from then on. Process groups stay: the caller made the pipeline's.
        """
        self._end()

    def _require_whole(self) -> None:
        if not self._end.alive:
            raise PipelineError(
                with_hint(
                    f"rank {self.rank}: the transport is closed",
                    "make a new TorchTransport, on every rank",
                )
            )
        if self._broken:
            raise PipelineError(
                with_hint(
                    f"rank {self.rank}: an earlier step failed and left messages under way",
                    "start the processes again from a checkpoint",
                )
            )

    def withdraw(self, error: BaseException) -> None:
        """Tell the other ranks, whether they agree now or are in the step already."""
        if not self._broken and self._end.alive:
            self._broken = True
            self.board.withdraw(f"{type(error).__name__}: {error}")
            self._hang_up()

    def send(self, channel: Channel, key: Key, value: Any, *, announce: bool) -> None:
        """Send without waiting, after its shape if the receiver does not know it."""
        tensor = to_message(value)
        if tensor.layout is not torch.strided:
            raise BoundaryError(
                with_hint(
                    f"rank {self.rank}: a tensor of layout {tensor.layout} can't be sent",
                    "send x.to_dense(), and make it sparse again behind the boundary",
                )
            )
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self._senders[channel].send(key, tensor, announce=announce)

    def recv(
        self, channel: Channel, key: Key, shape: torch.Size | None, dtype: torch.dtype
    ) -> RecvHandle:
        """Post a receive."""
        return self._receivers[channel].recv(key, shape, dtype)

    def drive(self, executors: Sequence[RankExecutor]) -> None:
        """Run this process's rank; every wait has the limit `timeout_s`.

        Raises:
            PipelineTimeout: A wait ran past the limit.
            PeerLost: A peer is gone.
        """
        self._require_whole()
        (executor,) = executors
        self._broken = True  # until the end is reached
        self._watchdog.start(executor.report)
        try:
            for handle in executor.run():
                handle.wait(self.timeout_s)
            self._drain()
            self._broken = False
        except TransferTimeout as error:
            what = f"it waited past the limit of {self.timeout_s:g} s"
            raise self._failure(executor, PipelineTimeout, what) from error
        except TransferBroken as error:
            raise self._failure(executor, PeerLost, "the connection broke") from error
        except BaseException as error:
            note_place(error, executor.report())
            self.board.post_failure(f"{executor.report()}: {type(error).__name__}: {error}")
            self._hang_up()
            raise
        finally:
            self._watchdog.stop()

    def _hang_up(self) -> None:
        """Close connections, so that peers notice even if the caller keeps this process."""
        if self._hub is not None:
            self._hub.close()

    def _drain(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        for lane in self._senders.values():
            if isinstance(lane, SocketSender):
                lane.drain(deadline - time.monotonic())
        for work, _, channel in self._reaper.drain(self.timeout_s):
            try:
                complete(work, deadline - time.monotonic(), polls=self._polls)
            except (TransferTimeout, TransferBroken) as error:
                raise type(error)(f"send to rank {channel.destination}: {error}") from error

    def _failure(
        self, executor: RankExecutor, kind: type[PipelineError], what: str
    ) -> PipelineError:
        """Tell the others, and make this rank's error."""
        report = executor.report()
        own = f"{report}; {what}"
        others = self.board.reported(patience_s=0.5 if kind is PeerLost else 0.0)
        self.board.post_failure(own)
        self._hang_up()
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
            complete(work, self.timeout_s, polls=self._polls)
        except (TransferTimeout, TransferBroken, RuntimeError) as error:
            kind = PipelineTimeout if isinstance(error, TransferTimeout) else PeerLost
            own = f"rank {self.rank} in all_reduce over ranks {list(members)}: {error}"
            others = self.board.reported()
            self.board.post_failure(own)
            raise kind(
                with_hint(own + others, "every rank of the pipeline must take part in reductions")
            ) from error

    def __getstate__(self) -> Any:
        """Refuse copies and pickles: connections belong to this process."""
        raise TypeError(
            with_hint(
                "a TorchTransport can't be copied or pickled",
                "copy or save the modules; make a transport of its own for another pipeline",
            )
        )

    def _subgroup(self, members: tuple[int, ...]) -> Any:
        if len(members) == self.pp:
            return self._group
        if members not in self._subgroups:
            self._subgroups[members] = self._make_group(members, "-".join(map(str, members)))
        return self._subgroups[members]

    def _make_group(self, ranks: Sequence[int], name: str) -> Any:
        return make_group(
            [dist.get_global_rank(self._group, rank) for rank in ranks],
            name=f"{self._name}/{name}",
            backend=dist.get_backend(self._group),
            timeout_s=self.timeout_s,
        )


def _close(watchdog: Watchdog, reaper: Reaper, hub: SocketHub | None) -> None:
    watchdog.close()
    reaper.close()
    if hub is not None:
        hub.close()
