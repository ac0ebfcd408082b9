"""Ctrl-C that works while the core computes.

Python runs signal handlers between its own instructions, so a Ctrl-C during a long call into the
core would wait for the call's end. The interpreter's C handler, though, writes the signal's number
to a descriptor at once; a thread reads it and, if the main thread does not end by itself, ends the
process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["prompt_interrupts"]

GRACE_S = 0.5
"""How long the main thread has to end by itself."""

_held = threading.Event()


def keep_on_interrupt() -> None:
    """Leave Ctrl-C to the command, which saves its work first (training does)."""
    _held.set()


@contextlib.contextmanager
def prompt_interrupts(status: int) -> Iterator[None]:
    """End the process with `status` soon after a Ctrl-C, whatever the main thread does.

    Args:
        status: Exit status of a process that did not end by itself.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or not usual:
        yield
        return
    _held.clear()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    done = threading.Event()

    def watch() -> None:
        while number := reader.recv(1):
            interrupted = number[0] == signal.SIGINT and not _held.is_set()
            if interrupted and not done.wait(GRACE_S):
                os.write(
                    sys.__stderr__.fileno() if sys.__stderr__ else 2, b"pipeloom: interrupted\n"
                )
                os._exit(status)

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="pipeloom-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()
