"""What moves tensors between ranks: the words that every transport shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pipeloom.runtime.errors import BoundaryError, with_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from pipeloom.runtime.executor import RankExecutor

__all__ = ["Boundary", "Channel", "Key", "RecvHandle", "Transport"]

BACKWARD = "backward"
FORWARD = "forward"


class Channel(NamedTuple):
    """A one-way lane between two ranks; messages on it arrive in the order they were sent."""

    source: int
    """Rank that sends."""
    destination: int
    """Rank that receives."""
    direction: str
    """`"forward"` for activations, `"backward"` for gradients."""

    def __str__(self) -> str:
        return f"{self.source}->{self.destination} {self.direction}"


class Key(NamedTuple):
    """Which message: the tensor between stages `stage` and `stage + 1` of one microbatch.

    Where the plan cuts sequences, `microbatch` numbers their pieces as the plan's text does:
    microbatch * num_seq_pieces + piece. The activation and its gradient have the same key on their
    two channels.
    """

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Boundary:
    """Shape and dtype of the tensors that cross stage boundaries.

    Attributes:
        shape: Shape of each of them; or one shape a microbatch; or a function of
            (stage, microbatch) for the tensor behind `stage`. Where the plan cuts sequences, a
            piece takes the place of a microbatch. None: not known up front, so each message is
            preceded by its shape.
        dtype: Their floating-point dtype. With `shape=None` it goes with the message too.
    """

    shape: (
        tuple[int, ...] | Sequence[tuple[int, ...]] | Callable[[int, int], tuple[int, ...]] | None
    )
    dtype: torch.dtype = torch.float32

    def lookup(self) -> Callable[[Key], torch.Size] | None:
        """Give the shape of a key's tensor as a function; None if shapes are not known."""
        shape = self.shape
        if shape is None:
            return None
        if callable(shape):
            return lambda key: torch.Size(shape(key.stage, key.microbatch))
        if all(isinstance(size, int) for size in shape):
            one = torch.Size(shape)  # type: ignore[arg-type]
            return lambda _: one
        each = [torch.Size(sizes) for sizes in shape]  # type: ignore[arg-type]
        return lambda key: each[key.microbatch]

    def describe(self, stages: int, microbatches: int) -> str:
        """Text that is equal on two ranks iff they agree on every shape and dtype."""
        lookup = self.lookup()
        if lookup is None:
            return f"sent with each message, {self.dtype}"
        if not callable(self.shape) and all(isinstance(size, int) for size in self.shape or ()):
            return f"{tuple(self.shape or ())}, {self.dtype}"
        shapes = [
            [tuple(lookup(Key(stage, mb))) for mb in range(microbatches)]
            for stage in range(stages - 1)
        ]
        return f"{shapes}, {self.dtype}"

    def check_count(self, microbatches: int) -> None:
        """Refuse a list of shapes that is not one a microbatch.

        Raises:
            BoundaryError: The list has another length.
        """
        if self.shape is None or callable(self.shape):
            return
        per_microbatch = not all(isinstance(size, int) for size in self.shape)
        if per_microbatch and len(self.shape) != microbatches:
            raise BoundaryError(
                with_hint(
                    f"boundary shape has {len(self.shape)} entries for {microbatches} microbatches",
                    "give one shape, or one shape a microbatch",
                )
            )


UNKNOWN_SHAPES = Boundary(None)
"""Nothing is known up front: each message is preceded by its shape."""


class RecvHandle(Protocol):
    """A receive that has been posted."""

    channel: Channel
    """Where it comes from."""
    key: Key
    """What it brings."""

    def ready(self) -> bool:
        """Whether `take` would give the tensor without waiting. May be False too often."""
        ...

    def wait(self, limit_s: float) -> None:
        """Block until the tensor is there.

        Raises:
            TransferTimeout: It was not there after `limit_s` seconds.
            TransferBroken: It can never come: the peer is gone.
        """
        ...

    def take(self) -> Any:
        """Give away what came. Only after `ready` or `wait`."""
        ...


class Transport(Protocol):
    """Moves tensors between ranks, and runs the ranks that live in this process."""

    pp: int
    """Number of ranks of the pipeline."""
    local_ranks: tuple[int, ...]
    """The ranks that live in this process."""
    backend: str | None
    """`"gloo"`, `"nccl"`, or None in one process: for `plan.lower`."""
    timeout_s: float
    """Limit of every wait."""

    def open(self, channels: Iterable[Channel]) -> None:
        """Create what the channels need, all up front and in one order on every rank."""
        ...

    def agree(self, fingerprint: Mapping[str, str]) -> None:
        """Check that every rank has the same fingerprint.

        Raises:
            AgreementError: On every rank, naming what differs.
        """
        ...

    def withdraw(self, error: BaseException) -> None:
        """Tell the other ranks that this one can't enter the step, so that none waits for it."""
        ...

    def send(self, channel: Channel, key: Key, value: Any, *, announce: bool) -> None:
        """Send without waiting. What is sent is kept alive until its send is done.

        Args:
            channel: The lane.
            key: Which message it is.
            value: A tensor of any shape, or a structure of tensors; not to be written to
                any more.
            announce: Whether the receiver does not know shape and dtype, so that they must be
                sent ahead.
        """
        ...

    def recv(
        self, channel: Channel, key: Key, shape: torch.Size | None, dtype: torch.dtype
    ) -> RecvHandle:
        """Post a receive without waiting.

        Args:
            channel: The lane.
            key: The message that must come next on it.
            shape: Its shape. None: shape and dtype are announced.
            dtype: Its dtype.
        """
        ...

    def drive(self, executors: Sequence[RankExecutor]) -> None:
        """Run the ranks of this process to the end of their programs, sends drained.

        Raises:
            PipelineTimeout: A wait ran past its limit or can't end.
            PeerLost: A peer is gone.
        """
        ...

    def all_reduce(self, tensors: Mapping[int, Tensor], ranks: Sequence[int] | None = None) -> None:
        """Replace each rank's tensor by the sum over `ranks` (None: all), in place.

        Args:
            tensors: One tensor for each rank of this process that is in `ranks`.
            ranks: Who takes part; every one of them must call.
        """
        ...
