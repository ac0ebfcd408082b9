"""Checkpoints keyed by the whole model's names, so that any pp, vp and layout can load them.

    run/checkpoints/latest              the name of the newest whole checkpoint
    run/checkpoints/step-000100/        torch.distributed.checkpoint's files, and
                    train.json          what is not a tensor: step, data position, arguments

A checkpoint is written to a folder beside its place and renamed when it is whole.
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from pipeloom.training.errors import CheckpointError
from pipeloom.training.integrity import checksums, damaged_files
from pipeloom.training.retention import (
    LATEST,
    by_step,
    name_of,
    prune,
    replaced,
    step_of,
    sync_folder,
    tidy,
    write_durably,
)
from pipeloom.training.state import STATE_FILE, TrainState, read_state, state_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed.checkpoint.metadata import Metadata

    from pipeloom.training.processes import Processes

_SHOWN = 4


def checkpoint_tensors(
    chunks: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Tensor], list[tuple[str, Tensor]]]:
    """The tensors to store by key, and the copies of them (of a tied weight) by the same key.

    Args:
        chunks: All chunks of this process.
        optimizer: Its state goes with the weights.
    """
    tensors: dict[str, Tensor] = {}
    copies: list[tuple[str, Tensor]] = []

    def add(key: str, tensor: Tensor) -> None:
        if key in tensors:
            copies.append((key, tensor))
        else:
            tensors[key] = tensor

    for chunk in chunks:
        for name, tensor in chunk.state_dict().items():
            add(f"model.{name}", tensor)
        for name, parameter in chunk.named_parameters():
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for kind, tensor in state.items():
                add(f"optimizer.{kind}.{name}", tensor)
    return tensors, copies


def _random_key(process: int) -> str:
    return f"random.process_{process}"


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    # torch warns whenever one process saves by itself, which is what the caller asked for.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save_checkpoint(
    folder: Path,
    *,
    chunks: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    processes: Processes,
    keep: int = 0,
) -> Path:
    """Writes `folder/step-NNNNNN` and then points `latest` to it; all processes call it.

    An interruption at any moment leaves `latest` at a whole checkpoint.

    Args:
        folder: The `checkpoints` of a run.
        chunks: All chunks of this process.
        optimizer: Its state goes with the weights.
        state: What is stored besides tensors.
        processes: Who saves together.
        keep: How many checkpoints stay, this one included; 0: all.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: It can't be written, on a full disk for example; earlier ones are whole.
    """
    name = name_of(state.step)
    final, partial = folder / name, folder / f".{name}.partial"

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(folder)
        partial.mkdir()

    def publish() -> None:
        whole = dataclasses.replace(state, checksums=checksums(partial))
        write_durably(partial / STATE_FILE, state_text(whole))
        sync_folder(partial)
        before = replaced(folder, name)
        if final.exists():  # the same step of the same run, reached again after a resume
            final.rename(before)
        partial.rename(final)
        sync_folder(folder)
        shutil.rmtree(before, ignore_errors=True)
        pointer = folder / f".{LATEST}.partial"
        write_durably(pointer, name + "\n")
        pointer.replace(folder / LATEST)
        sync_folder(folder)
        prune(folder, keep=keep, newest=final, is_complete=_is_complete)

    try:
        processes.on_first(prepare)
        tensors, _ = checkpoint_tensors(chunks, optimizer)
        tensors[_random_key(processes.index)] = torch.get_rng_state()
        with _no_warning_of_one_process():
            state_dict_saver.save(
                tensors,
                storage_writer=FileSystemWriter(partial, single_file_per_rank=True),
                process_group=processes.group,
                no_dist=processes.group is None,
            )
        processes.on_first(publish)
    except BaseException as error:
        if processes.index == 0 and folder.is_dir():
            tidy(folder)
        _raise_interruption(error)
        if isinstance(error, (OSError, CheckpointException)):
            raise CheckpointError(
                f"the checkpoint of step {state.step} can't be written to {folder}: "
                f"{_reasons(error)}",
                f"make room; the newest whole checkpoint is {newest_whole(folder) or 'none yet'}",
            ) from error
        raise
    return final


def _raise_interruption(error: BaseException) -> None:
    """A Ctrl-C or SIGTERM while torch wrote or read is no fault of the files: raise it as it was.

    torch catches whatever its writers and readers raise, and reports it as a failure of theirs.
    """
    if isinstance(error, CheckpointException):
        for cause, _ in error.failures.values():
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None


def _reasons(error: BaseException) -> str:
    """Why torch's checkpointing failed, in one line: its own report is a traceback a process."""
    if not isinstance(error, CheckpointException):
        return str(error)
    reasons = {f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()}
    return "; ".join(sorted(reasons))


def _is_complete(path: Path) -> bool:
    """Whether all files are there in their sizes; what is in them is not read."""
    try:
        return not damaged_files(path, read_state(path).checksums, contents=False)
    except CheckpointError:
        return False


def newest_whole(folder: Path, *, before: Path | None = None) -> Path | None:
    """The newest checkpoint in a folder whose files are all as they were written.

    Args:
        folder: The `checkpoints` of a run.
        before: Only those of steps before this checkpoint's.
    """
    for path in by_step(folder):
        if before is not None and step_of(path) >= step_of(before):
            continue
        try:
            state = read_state(path)
        except CheckpointError:
            continue
        if not damaged_files(path, state.checksums):
            return path
    return None


def state_of(path: Path) -> TrainState:
    """The state of a checkpoint.

    Raises:
        CheckpointError: It can't be read; the hint names the checkpoint before.
    """
    try:
        return read_state(path)
    except CheckpointError as error:
        raise _damaged(path, str(error).split("\nhint: ")[0]) from error


def require_whole(path: Path) -> TrainState:
    """The state of a checkpoint whose files are all as they were written.

    Raises:
        CheckpointError: A file is missing or has changed; the hint names the checkpoint before.
    """
    state = state_of(path)
    faults = damaged_files(path, state.checksums)
    if faults:
        raise _damaged(path, f"{path} is damaged: {'; '.join(faults)}")
    return state


def _damaged(path: Path, what: str) -> CheckpointError:
    earlier = newest_whole(path.parent, before=path)
    return CheckpointError(
        what, "start a new run" if earlier is None else f"go on from the one before: {earlier}"
    )


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `path` means: itself, or the latest of a run's or checkpoints' folder.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder", "name a run's folder")
    if (path / STATE_FILE).exists() or (path / ".metadata").exists():
        return path
    for folder in (path, path / "checkpoints"):
        pointer = folder / LATEST
        if not pointer.exists() and not by_step(folder):
            continue
        name = _pointed(pointer)
        # Where it was put if a process ended just while it was replaced.
        places = (folder / name, replaced(folder, name)) if name else ()
        found = next((place for place in places if place.is_dir()), None)
        if found is not None:
            return found
        whole = newest_whole(folder)
        raise CheckpointError(
            f"{pointer} names {name}, which is missing" if name else f"{pointer} names none",
            "start a new run" if whole is None else f"the newest whole checkpoint is {whole}",
        )
    raise CheckpointError(
        f"{path} holds no whole checkpoint",
        "a run writes its first one after --save-interval steps; name the run's folder",
    )


def _pointed(pointer: Path) -> str:
    """The name of a checkpoint in the file; nothing if there is none in it."""
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if step_of(Path(name)) >= 0 and "/" not in name else ""


def read_metadata(path: Path) -> Metadata:
    """Names and shapes of the stored tensors.

    Raises:
        CheckpointError: They cannot be read.
    """
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(
            f"{path} is incomplete: its .metadata cannot be read ({error})",
            "use another checkpoint",
        ) from error


def require_same_architecture(stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model.

    Raises:
        CheckpointError: Naming each field that differs.
    """
    different = [
        f"{name}: stored {stored.get(name)!r}, this model {given.get(name)!r}"
        for name in sorted(stored.keys() | given.keys())
        if stored.get(name) != given.get(name)
    ]
    if different:
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(different)}",
            "build the model with the stored values, or start a new run",
        )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def _require_same_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Metadata, processes: Processes, kind: str
) -> None:
    stored = {
        key: tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(kind) and hasattr(entry, "size")
    }
    wanted: dict[str, tuple[int, ...]] = {}
    for part in processes.gather({key: tuple(value.shape) for key, value in tensors.items()}):
        wanted |= {key: shape for key, shape in part.items() if key.startswith(kind)}
    faults = []
    if missing := wanted.keys() - stored.keys():
        faults.append(f"missing: {_some(missing)}")
    if unexpected := stored.keys() - wanted.keys():
        faults.append(f"unexpected: {_some(unexpected)}")
    faults += [
        f"shape of {key}: stored {list(stored[key])}, this model {list(wanted[key])}"
        for key in sorted(wanted.keys() & stored.keys())
        if wanted[key] != stored[key]
    ][:_SHOWN]
    if faults:
        raise CheckpointError(
            f"{path} does not fit this model: {'; '.join(faults)}",
            "load it with the model that wrote it, or start a new run",
        )


def load_checkpoint(
    path: Path,
    *,
    chunks: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    processes: Processes,
) -> None:
    """Fills weights, optimizer state and random state from the checkpoint at `path`.

    All processes call it. Every name must be there with its shape, and none be left over.

    Args:
        path: Folder of one checkpoint (see `resolve_checkpoint`).
        chunks: All chunks of this process, under any pp, vp and layout.
        optimizer: Its state is filled too; None loads weights only.
        processes: Who loads together.

    Raises:
        CheckpointError: Names are missing or unexpected, shapes differ, or files are damaged.
    """
    tensors, copies = checkpoint_tensors(chunks, optimizer)
    metadata = read_metadata(path)
    for kind in ("model.",) if optimizer is None else ("model.", "optimizer."):
        _require_same_tensors(path, tensors, metadata, processes, kind)
    wanted = dict(tensors)
    random_key = _random_key(processes.index)
    if optimizer is not None and random_key in metadata.state_dict_metadata:
        wanted[random_key] = torch.get_rng_state()
    try:
        with _no_warning_of_one_process():
            state_dict_loader.load(
                wanted,
                storage_reader=FileSystemReader(path),
                process_group=processes.group,
                no_dist=processes.group is None,
            )
    except CheckpointException as error:  # which is no Exception, and holds each process's
        _raise_interruption(error)
        raise CheckpointError(
            f"{path} cannot be read: {_reasons(error)}",
            "a file of it is missing or damaged; use another checkpoint",
        ) from error
    with torch.no_grad():
        for key, copy in copies:
            copy.copy_(tensors[key])
    if random_key in wanted:
        torch.set_rng_state(wanted[random_key])
