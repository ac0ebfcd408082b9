"""What a run says while it goes: a progress bar or lines, and a JSONL file of losses."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, TextIO

from pipeloom.training.retention import write_durably

if TYPE_CHECKING:
    from pathlib import Path

LOSS_FILE = "loss.jsonl"
_SCALARS = ("loss", "valid_loss", "lr", "grad_norm", "tokens_per_s", "bubble")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, or one evaluation, in numbers."""

    step: int
    """Steps done after it."""
    loss: float | None = None
    """Mean loss of the step's tokens, in nats a token."""
    valid_loss: float | None = None
    """Mean loss of held-out tokens, where this step evaluated."""
    lr: float | None = None
    """Learning rate of the step."""
    grad_norm: float | None = None
    """Norm of the gradient over all stages, before clipping."""
    tokens_per_s: float | None = None
    """Tokens trained on in a second."""
    bubble: float | None = None
    """Share of the step in which even the busiest rank has nothing to do, 0..1."""
    bubbles: list[float] | None = None
    """Of each rank, the share of the step in which it runs no op, 0..1."""
    waits_s: list[float] | None = None
    """Of each rank, the seconds between its first and last op in which it runs none."""

    def text(self, steps: int) -> str:
        """The record in one line."""
        parts = [f"step {self.step}/{steps}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.valid_loss is not None:
            parts.append(f"held-out loss {self.valid_loss:.4f}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.bubble is not None:
            parts.append(f"bubble {100 * self.bubble:.1f} %")
        return "  ".join(parts)


def read_losses(folder: Path) -> list[StepRecord]:
    """The records of a run so far, oldest first."""
    file = folder / LOSS_FILE
    if not file.exists():
        return []
    records = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        # A full disk or a kill leaves half a line; the run can do without it.
        with contextlib.suppress(ValueError, TypeError):
            records.append(StepRecord(**json.loads(line)))
    return records


def _line(record: StepRecord) -> str:
    present = {name: value for name, value in asdict(record).items() if value is not None}
    return json.dumps(present) + "\n"


class RunLog:
    """Shows and stores the records of a run; a context manager, closed at any exit.

    Args:
        folder: Folder of the run; None (on all processes but the first) says and stores nothing.
        first_step: Step that the run goes on from; later records of an earlier try are dropped.
        steps: Steps of the whole run.
        log_interval: Steps between lines where there is no progress bar.
        tensorboard: Whether to write TensorBoard's event files too.
        stream: Where it is shown; a bar needs a terminal and rich.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        first_step: int = 0,
        steps: int,
        log_interval: int = 10,
        tensorboard: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """Keeps the records up to `first_step`."""
        self.folder, self.first_step, self.steps = folder, first_step, steps
        self.log_interval = log_interval
        self.stream = sys.stderr if stream is None else stream
        self._file: TextIO | None = None
        self._bar: Any = None
        self._task: Any = None
        self._tensorboard = tensorboard
        self._writer: Any = None

    def __enter__(self) -> Self:
        """Opens the file and the bar."""
        if self.folder is None:
            return self
        kept = [record for record in read_losses(self.folder) if record.step <= self.first_step]
        # Beside its place, so that what was there is lost to no full disk and no kill.
        beside = self.folder / f".{LOSS_FILE}.partial"
        write_durably(beside, "".join(map(_line, kept)))
        beside.replace(self.folder / LOSS_FILE)
        self._file = (self.folder / LOSS_FILE).open("a")
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier try wrote beyond the step that this one goes on from is not shown.
            self._writer = SummaryWriter(
                self.folder / "tensorboard", purge_step=self.first_step + 1
            )
        if self.stream.isatty():
            self._open_bar()
        return self

    def __exit__(self, *_: object) -> None:
        """Closes both."""
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close()

    def _open_bar(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(file=self.stream),
        )
        self._task = self._bar.add_task(
            f"step {self.first_step}/{self.steps}", total=self.steps, completed=self.first_step
        )
        self._bar.start()

    def say(self, text: str) -> None:
        """Shows a line."""
        if self.folder is None:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self.stream, flush=True)

    def record(self, record: StepRecord) -> None:
        """Stores a record and shows it: each on a bar, some as lines."""
        if self.folder is None:
            return
        self._store(record)
        if self._writer is not None:
            for name in _SCALARS:
                value = getattr(record, name)
                if value is not None:
                    self._writer.add_scalar(name, value, record.step)
        if self._bar is not None and record.loss is not None:
            self._bar.update(self._task, description=record.text(self.steps), completed=record.step)
            return
        due = record.step % self.log_interval == 0
        edge = record.step in (self.first_step + 1, self.steps)
        if record.valid_loss is not None or due or edge:
            self.say(record.text(self.steps))

    def _store(self, record: StepRecord) -> None:
        assert self._file is not None
        try:
            self._file.write(_line(record))
            # Whoever watches the file, or kills the run, sees every step.
            self._file.flush()
        except OSError as error:  # which does not say what could not be written
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()  # it would fail again, in place of what is raised here
            raise OSError(error.errno, error.strerror, file.name) from error
