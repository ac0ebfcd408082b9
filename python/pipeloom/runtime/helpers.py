"""Threads that work beside a rank, and how they end."""

from __future__ import annotations

import threading

__all__ = ["end"]

_PATIENCE_S = 2.0


def end(thread: threading.Thread | None) -> None:
    """Wait until a thread that was told to end has done so.

    A daemon thread that still drops torch's objects while the interpreter shuts down is cancelled
    inside their C++ destructors, which aborts the process. One that is stuck is left behind.

    Args:
        thread: None, or the caller's own: no-op. A finalizer may run in any thread.
    """
    if thread is not None and thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
