"""Which checkpoints stay in a run's folder, and what an ended save left there.

Beside `step-NNNNNN` a folder may hold `.step-NNNNNN.partial`, `.before` or `.pruned`: a checkpoint
that was being written, replaced or deleted when its process ended. Only whole ones have the plain
name, so that nobody takes a half one for a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LATEST = "latest"
"""The file that names the newest checkpoint."""
_STEP = re.compile(r"step-(\d+)")


def name_of(step: int) -> str:
    """Folder of the checkpoint of a step.

    Examples:
        >>> name_of(100)
        'step-000100'
    """
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named for; -1 if it is named otherwise.

    Examples:
        >>> from pathlib import Path
        >>> step_of(Path("step-000100")), step_of(Path(".step-000007.before")), step_of(Path("a"))
        (100, 7, -1)
    """
    found = _STEP.search(path.name)
    return -1 if found is None else int(found.group(1))


def by_step(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest step first."""
    return sorted(folder.glob("step-*"), key=step_of, reverse=True)


def replaced(folder: Path, name: str) -> Path:
    """Where a checkpoint lies while another of the same step takes its place."""
    return folder / f".{name}.before"


def tidy(folder: Path) -> None:
    """Delete what an ended process left half done; what it was replacing comes back."""
    for path in folder.glob(".step-*.before"):
        whole = folder / name_of(step_of(path))
        if not whole.exists():
            path.rename(whole)
    for ending in ("partial", "before", "pruned"):
        for path in folder.glob(f".step-*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, *, keep: int, newest: Path, is_complete: Callable[[Path], bool]) -> None:
    """Delete the checkpoints of earlier steps beyond the `keep` newest complete ones.

    `newest` stays in any case, and so do later steps, of an earlier try that a resume began
    before: they go when their step is reached again. A deletion can be interrupted anywhere: what
    is half deleted has another name.

    Args:
        folder: The `checkpoints` of a run.
        keep: How many; 0 keeps all.
        newest: The one just written.
        is_complete: Whether a checkpoint could be loaded; others do not count, and go with the old.
    """
    if keep < 1:
        return
    num_kept = 1
    for path in by_step(folder):
        if step_of(path) >= step_of(newest):
            continue
        if num_kept < keep:
            num_kept += is_complete(path)
            continue
        going = folder / f".{path.name}.pruned"
        # One that can't be deleted is no reason to end the run.
        with contextlib.suppress(OSError):
            path.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def write_durably(file: Path, text: str) -> None:
    """Write a file that a crash of the machine leaves whole."""
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
