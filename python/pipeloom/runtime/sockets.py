"""Channels between ranks of one host: a Unix socket each.

gloo hands each message through two threads and a handshake, 50 to 120 us on an idle machine; a
socket that the rank's own thread writes and reads takes about 10 us. Messages say what they are, so
that each is checked at no further cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeloom.runtime import helpers
from pipeloom.runtime.errors import BoundaryError, TransferBroken, TransferTimeout, with_hint
from pipeloom.runtime.lanes import HEADER_LEN, decode_header, encode_header
from pipeloom.runtime.structure import from_message
from pipeloom.runtime.transport import BACKWARD, FORWARD, Channel, Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store

__all__ = ["SocketHub", "SocketReceiver", "SocketSender"]

_HEADER = struct.Struct(f"={HEADER_LEN}q")
_HELLO = struct.Struct("=16siii")
_BUFFER_BYTES = 1 << 20
_SPIN_S = 0.0002
"""How long a wait asks before it sleeps, where every rank of the host has a core of its own.

Waking a process takes longer than a small message, and may put it on the core of its peer.
"""


def host_identity() -> str:
    """Equal for two processes iff they can reach each other's abstract Unix sockets."""
    if sys.platform != "linux":
        return f"unreachable {secrets.token_hex(8)}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()} {os.getuid()}"


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as the view."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)


class SocketSender:
    """The sending end. Never blocks: what the kernel does not take at once, a thread sends."""

    def __init__(self, channel: Channel, connection: socket.socket) -> None:
        self.channel = channel
        self._connection = connection
        self._left: queue.SimpleQueue[tuple[memoryview, ...] | None] | None = None
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._done = threading.Condition()
        self._error: OSError | None = None

    def send(self, key: Key, tensor: Tensor, *, announce: bool) -> None:  # noqa: ARG002
        """Send a message, its header first."""
        parts: tuple[memoryview, ...] = (
            memoryview(_HEADER.pack(*encode_header(key, tensor))),
            _bytes_of(tensor),
        )
        if self._error is not None:
            raise TransferBroken(str(self._error)) from self._error
        if not self._pending:
            try:
                sent = self._connection.sendmsg(parts, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise TransferBroken(str(error)) from error
            parts = _after(parts, sent)
            if not parts:
                return
        self._leave(parts)

    def _leave(self, parts: tuple[memoryview, ...]) -> None:
        """Leave bytes to the thread; the views keep the tensor alive."""
        if self._left is None:
            self._left = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=self._run, name=f"pipeloom {self.channel}", daemon=True
            )
            self._thread.start()
        with self._done:
            self._pending += 1
        self._left.put(parts)

    def _run(self) -> None:
        assert self._left is not None
        while (parts := self._left.get()) is not None:
            try:
                for part in parts:
                    self._connection.sendall(part)
            except OSError as error:
                self._error = error
            del parts
            with self._done:
                self._pending -= 1
                self._done.notify_all()

    def close(self) -> None:
        """End the thread; it holds the connection, which must be shut down for a stuck one."""
        if self._left is not None:
            self._left.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        helpers.end(self._thread)

    def drain(self, limit_s: float) -> None:
        """Wait until all has been handed to the kernel."""
        with self._done:
            finished = self._done.wait_for(lambda: not self._pending, limit_s)
        if self._error is not None:
            raise TransferBroken(str(self._error)) from self._error
        if not finished:
            raise TransferTimeout("sends were not received")


def _after(parts: tuple[memoryview, ...], sent: int) -> tuple[memoryview, ...]:
    """What is left of the parts behind their first `sent` bytes."""
    left = []
    for part in parts:
        if sent < len(part):
            left.append(part[sent:])
        sent = max(0, sent - len(part))
    return tuple(left)


class SocketReceiver:
    """The receiving end: messages are read in the channel's order by whoever waits for one.

    Args:
        channel: The channel.
        connection: Its socket.
        limit_s: How long a message that has begun to come may take, in seconds.
        spin_s: How long to ask for a message before sleeping until it comes.
    """

    def __init__(
        self, channel: Channel, connection: socket.socket, limit_s: float, spin_s: float = 0.0
    ) -> None:
        self.channel = channel
        self._connection = connection
        self._limit_s = limit_s
        self._spin_s = spin_s
        self._posted: deque[_SocketRecv] = deque()
        self._header = memoryview(bytearray(_HEADER.size))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def recv(self, key: Key, shape: torch.Size | None, dtype: torch.dtype) -> _SocketRecv:
        """Post a receive; nothing is read yet."""
        handle = _SocketRecv(self, key, shape, dtype)
        self._posted.append(handle)
        return handle

    def arrived(self, handle: _SocketRecv) -> bool:
        """Whether the message has come; one that has begun to come is read to its end."""
        while handle.tensor is None:
            if not self._poll.poll(0):
                return False
            self._read(time.monotonic() + self._limit_s)
        return True

    def read_up_to(self, handle: _SocketRecv, limit_s: float) -> None:
        """Read messages until that of `handle` is there."""
        now = time.monotonic()
        deadline, asleep = now + limit_s, now + self._spin_s
        while not self.arrived(handle):
            if time.monotonic() < asleep:
                os.sched_yield()
            elif not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TransferTimeout("nothing came")

    def fileno(self) -> int:
        """For `poll`."""
        return self._connection.fileno()

    def _read(self, deadline: float) -> None:
        """Read the next message: what has come of it at once, then the rest."""
        head, header, wanted = self._posted[0], self._header, self._posted[0].shape
        tensor, view = None, header[:0]
        if wanted is not None:
            tensor = torch.empty(wanted, dtype=head.dtype)
            view = _bytes_of(tensor)
        left = self._fill((header, view), deadline, upto=len(view))
        shape, dtype = decode_header(_HEADER.unpack(header), self.channel, head.key)
        if wanted is None:
            tensor = torch.empty(shape, dtype=dtype)
            left = (_bytes_of(tensor),)
        elif (shape, dtype) != (wanted, head.dtype):
            raise BoundaryError(
                with_hint(
                    f"channel {self.channel}, {head.key}: shape {tuple(shape)}, {dtype} came "
                    f"where {tuple(wanted)}, {head.dtype} was agreed",
                    "give the boundary's true shape on every rank",
                )
            )
        self._fill(left, deadline)
        head.tensor = tensor
        self._posted.popleft()

    def _fill(
        self, parts: tuple[memoryview, ...], deadline: float, *, upto: int = 0
    ) -> tuple[memoryview, ...]:
        """Read into `parts` until at most `upto` bytes are left, and give those parts."""
        while sum(map(len, parts)) > upto:
            try:
                count = self._connection.recvmsg_into(parts)[0]
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise TransferTimeout("nothing came") from error
                continue
            except OSError as error:
                raise TransferBroken(str(error)) from error
            if count == 0:
                raise TransferBroken("the peer closed the connection")
            parts = _after(parts, count)
        return parts


class _SocketRecv:
    """A posted receive."""

    __slots__ = ("_receiver", "channel", "dtype", "key", "shape", "tensor")

    def __init__(
        self, receiver: SocketReceiver, key: Key, shape: torch.Size | None, dtype: torch.dtype
    ) -> None:
        self.channel = receiver.channel
        self.key = key
        self.shape = shape
        self.dtype = dtype
        self.tensor: Tensor | None = None
        self._receiver = receiver

    def ready(self) -> bool:
        return self.tensor is not None or self._receiver.arrived(self)

    def wait(self, limit_s: float) -> None:
        self._receiver.read_up_to(self, limit_s)

    def wait_any(self, handles: Sequence[_SocketRecv], limit_s: float) -> None:
        """Wait until one of the handles has something to read."""
        poll = select.poll()
        for handle in handles:
            poll.register(handle._receiver, select.POLLIN)
        if not poll.poll(limit_s * 1000):
            raise TransferTimeout("nothing came")

    def take(self) -> Any:
        tensor = self.tensor
        assert tensor is not None
        self.tensor = None
        return from_message(tensor)


class SocketHub:
    """Makes the sockets of one rank: it listens, and connects to other ranks' addresses.

    Args:
        store: Where ranks find each other's addresses; its prefix is this pipeline's alone.
        rank: This rank in the pipeline.
        pp: Number of ranks.
        timeout_s: Limit for peers to come, and of reads later on, in seconds.
    """

    def __init__(self, store: Store, rank: int, pp: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._pp = pp
        self._timeout_s = timeout_s
        self._token = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._spin_s = 0.0
        self._arrived: dict[Channel, socket.socket] = {}
        self._open: list[socket.socket] = []
        self._senders: list[SocketSender] = []

    def neighbours(self) -> set[int]:
        """The ranks on this host. All ranks must call."""
        identity = host_identity()
        if sys.platform == "linux":
            name = f"\0pipeloom-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(name)
            self._listener.listen(1024)
            self._listener.settimeout(self._timeout_s)
            self._store.set(f"address/{self._rank}", name[1:])
        # Names of abstract sockets are public on the host; the token is not.
        self._store.set(f"token/{self._rank}", self._token.hex())
        self._store.set(f"host/{self._rank}", identity)
        keys = [f"host/{rank}" for rank in range(self._pp)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise TransferTimeout("not all ranks said where they run") from error
        here = {rank for rank, key in enumerate(keys) if self._store.get(key).decode() == identity}
        if sys.platform == "linux" and len(here) <= len(os.sched_getaffinity(0)):
            self._spin_s = _SPIN_S
        return here - {self._rank}

    def connect(
        self, channels: Iterable[Channel]
    ) -> tuple[dict[Channel, SocketSender], dict[Channel, SocketReceiver]]:
        """Connect channels that this rank is an end of, both ends on this host.

        Raises:
            TransferTimeout: A peer did not come.
        """
        channels = sorted(channels)
        # All connections are made before any is awaited: no circle of ranks can wait.
        senders = {
            channel: SocketSender(channel, self._dial(channel))
            for channel in channels
            if channel.source == self._rank
        }
        self._senders += senders.values()
        receivers = {
            channel: SocketReceiver(channel, self._accept(channel), self._timeout_s, self._spin_s)
            for channel in channels
            if channel.destination == self._rank
        }
        return senders, receivers

    def _dial(self, channel: Channel) -> socket.socket:
        peer = channel.destination
        connection = self._tune(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = self._store.get(f"address/{peer}").decode()
        token = bytes.fromhex(self._store.get(f"token/{peer}").decode())
        connection.connect(f"\0{name}")
        backward = channel.direction == BACKWARD
        connection.sendall(_HELLO.pack(token, channel.source, peer, backward))
        return connection

    def _accept(self, wanted: Channel) -> socket.socket:
        assert self._listener is not None
        while wanted not in self._arrived:
            try:
                connection, _ = self._listener.accept()
                self._tune(connection)
                token, source, peer, backward = _HELLO.unpack(
                    connection.recv(_HELLO.size, socket.MSG_WAITALL)
                )
            except (OSError, struct.error) as error:
                raise TransferTimeout(f"rank {wanted.source} did not connect") from error
            if secrets.compare_digest(token, self._token):
                channel = Channel(source, peer, BACKWARD if backward else FORWARD)
                self._arrived[channel] = connection
            else:
                connection.close()
        return self._arrived.pop(wanted)

    def _tune(self, connection: socket.socket) -> socket.socket:
        """Let reads come back now and then to look at the clock; enlarge the buffer.

        A read that the kernel limits is one call; Python's own time-outs make two of it.
        """
        connection.setblocking(True)
        tick_us = int(min(1.0, max(0.01, self._timeout_s / 20)) * 1e6)
        tick = struct.pack("ll", tick_us // 1_000_000, tick_us % 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._open.append(connection)
        return connection

    def close(self) -> None:
        """Close everything, so that peers notice, and end what still sends."""
        for sender in self._senders:
            sender.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for sender in self._senders:
            sender.join()
        self._senders.clear()
        for connection in self._open:
            connection.close()
        self._open.clear()
        if self._listener is not None:
            self._listener.close()
