"""What can go wrong while a plan runs. All of it is a `RuntimeError`."""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "BoundaryError",
    "PeerLost",
    "PipelineError",
    "PipelineTimeout",
    "TransferBroken",
    "TransferTimeout",
    "note_place",
    "with_hint",
]


class PipelineError(RuntimeError):
    """A step could not run, or could not go on. The message names rank, op and peer."""


class PipelineTimeout(PipelineError):  # noqa: N818 - what it is called in a log
    """A wait ran past its limit, or can never end."""


class PeerLost(PipelineError):  # noqa: N818
    """The connection to another rank broke: its process ended or failed."""


class AgreementError(PipelineError):
    """Ranks were given different plans, layouts, shapes, dtypes or versions."""


class BoundaryError(PipelineError):
    """A tensor that crosses a stage boundary is not of the agreed shape, dtype or kind."""


class TransferTimeout(Exception):  # noqa: N818 - an event for the driver, not for callers
    """A transfer was not done within its limit. Transports raise it to whoever drives them."""


class TransferBroken(Exception):  # noqa: N818
    """A transfer can never be done. Transports raise it to whoever drives them."""


def with_hint(message: str, hint: str) -> str:
    """Append the `hint:` line in which every message ends."""
    return f"{message}\nhint: {hint}"


_WRITES = (
    "a leaf Variable that requires grad is being used in an in-place",
    "has been modified by an inplace operation",
)


def note_place(error: BaseException, report: str) -> None:
    """Add to an error of the caller's own code where the rank stood, and a hint if we know one.

    Args:
        error: What a chunk or a loss function raised.
        report: Where the rank stands.
    """
    error.add_note(report)
    if any(text in str(error) for text in _WRITES):
        error.add_note(
            "hint: a chunk may not write to its input; begin with x = x.clone(), or without "
            "inplace=True"
        )
