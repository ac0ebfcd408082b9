"""The folder of a run: one run writes to it at a time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.training.errors import CheckpointError
from pipeloom.training.retention import LATEST

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCK = ".lock"


@contextlib.contextmanager
def claimed_run_folder(out: str | None, *, resumed_from: Path | None) -> Iterator[Path]:
    """The folder of `claim_run_folder`, kept from other runs until the end of the `with`.

    Two runs in one folder would take each other's half-written checkpoints for leftovers and
    delete them. The lock ends with its process, however that ends.

    Raises:
        CheckpointError: Another run writes there, or the folder is not this run's.
    """
    folder = claim_run_folder(out, resumed_from=resumed_from)
    with (folder / _LOCK).open("w") as lock:
        # Where the system or the file system knows no locks, there are none.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another run is writing to {folder}",
                    "wait for its end, or give a folder of its own: --out FOLDER",
                ) from None
        yield folder


def claim_run_folder(out: str | None, *, resumed_from: Path | None) -> Path:
    """The folder that a run writes to, made if need be; never one that holds another run.

    Args:
        out: The folder asked for; None takes that of the resumed run, else the next free
            `runs/train-N`.
        resumed_from: The checkpoint that the run goes on from.

    Raises:
        CheckpointError: The folder holds something that is not this run's.
    """
    if out is None and resumed_from is not None and resumed_from.parent.name == "checkpoints":
        return resumed_from.parent.parent
    if out is None:
        number = 1
        while True:
            folder = Path("runs", f"train-{number}")
            try:
                os.makedirs(folder)  # noqa: PTH103 - fails if it exists, with its parents made
            except FileExistsError:
                number += 1
            else:
                return folder
    folder = Path(out)
    own = resumed_from is not None and resumed_from.resolve().is_relative_to(folder.resolve())
    if not own and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        resumable = (folder / "checkpoints" / LATEST).exists()
        go_on = f", or go on with the run in it: --resume {folder}" if resumable else ""
        raise CheckpointError(
            f"--out {folder} is not an empty folder", f"give another folder{go_on}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
