"""Ctrl-C, SIGTERM and SIGHUP while a run goes on: they end it where a checkpoint can be kept."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Interrupted", "Interrupts"]


class Interrupted(KeyboardInterrupt):
    """A signal ended the run.

    Attributes:
        number: Which one.
    """

    def __init__(self, number: int, message: str = "") -> None:
        """Takes the signal and what was kept."""
        super().__init__(message)
        self.number = number


class Interrupts:
    """Takes SIGINT, SIGTERM and SIGHUP in the main thread, where nobody else does.

    In a process that trains alone the first one raises `Interrupted` where the run stands, or at
    the end of a `hold`. One of several processes can't end its step without the others: SIGTERM
    and SIGHUP (a terminal that was closed) are noted in `asked` until all are at the end of a step;
    SIGINT raises at once. A second SIGTERM ends the process.

    Args:
        alone: Whether this process trains by itself.

    Examples:
        >>> import signal
        >>> with Interrupts(alone=True) as interrupts:
        ...     try:
        ...         with interrupts.hold():
        ...             signal.raise_signal(signal.SIGTERM)
        ...             print("written to its end")
        ...     except Interrupted as interrupted:
        ...         print("then ended by", signal.Signals(interrupted.number).name)
        written to its end
        then ended by SIGTERM
    """

    def __init__(self, *, alone: bool) -> None:
        """Takes nothing yet."""
        self.alone = alone
        self.asked = 0
        self._pending = 0
        self._held = False
        self._usual: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Takes the signals that have their default handlers."""
        if threading.current_thread() is threading.main_thread():
            defaults = {
                signal.SIGINT: signal.default_int_handler,
                signal.SIGTERM: signal.SIG_DFL,
                signal.SIGHUP: signal.SIG_DFL,
            }
            for number, default in defaults.items():
                if signal.getsignal(number) is default:
                    self._usual[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives them back."""
        for number, handler in self._usual.items():
            signal.signal(number, handler)
        self._usual.clear()

    def _take(self, number: int, _: object) -> None:
        if not self.alone and number != signal.SIGINT:
            if self.asked:
                self.end_at_once()
                os.kill(os.getpid(), number)
            self.asked = number
        elif self._held:
            self._pending = number
        else:
            raise Interrupted(number)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No interruption inside: what is written here is whole or as before."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            number, self._pending = self._pending, 0
            raise Interrupted(number)

    def end_at_once(self) -> None:
        """From now on a signal ends the process, whatever it does."""
        for number in self._usual:
            signal.signal(number, signal.SIG_DFL)
