"""What can go wrong around a training run; each message ends in a hint."""

from __future__ import annotations

from pipeloom import PlanError


def _with_hint(message: str, hint: str) -> str:
    return f"{message}\nhint: {hint}" if hint else message


# The hint is optional so that pickle, which knows only the joined text, can make them anew: an
# error of one process is raised on all.
class DataError(PlanError):
    """The text to train on is missing, empty, binary or too small."""

    def __init__(self, message: str, hint: str = "") -> None:
        """Joins message and hint."""
        super().__init__(_with_hint(message, hint))


class CheckpointError(PlanError):
    """A checkpoint is missing, incomplete, or of another model or run."""

    def __init__(self, message: str, hint: str = "") -> None:
        """Joins message and hint."""
        super().__init__(_with_hint(message, hint))


class DivergedError(RuntimeError):
    """Loss or gradient norm is no longer finite; nothing of that step was kept."""

    def __init__(self, message: str, hint: str = "") -> None:
        """Joins message and hint."""
        super().__init__(_with_hint(message, hint))
