"""What a checkpoint holds besides tensors: `train.json`, which has a checksum of itself."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeloom.training.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT_VERSION = 2
"""Version 1 had no checksum of the file itself."""
STATE_FILE = "train.json"
_CHECKSUM = "checksum_of_this_file"


@dataclass(frozen=True, slots=True)
class TrainState:
    """What a checkpoint holds besides tensors.

    Attributes:
        step: Optimizer steps done.
        consumed_samples: Samples that those steps read: the data position.
        scheduler: State of the learning-rate scheduler.
        architecture: `TransformerConfig.architecture()` of the model.
        arguments: `TrainingArguments.to_dict()` of the run.
        checksums: Size and CRC of each file beside this one, filled in when it is written.
        format_version: Version of the checkpoint format.
    """

    step: int
    consumed_samples: int
    scheduler: dict[str, Any]
    architecture: dict[str, Any]
    arguments: dict[str, Any]
    checksums: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def _checksum_of(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def state_text(state: TrainState) -> str:
    """The state as its file holds it, with a checksum of all that it says."""
    values = dataclasses.asdict(state)
    whole = {**values, _CHECKSUM: _checksum_of(values)}
    return json.dumps(whole, indent=1, sort_keys=True) + "\n"


def read_state(path: Path) -> TrainState:
    """What a checkpoint holds besides tensors.

    Raises:
        CheckpointError: The file is missing, damaged or of a newer version.
    """
    file = path / STATE_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is incomplete: {STATE_FILE} is missing", "use another checkpoint"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}", "use another checkpoint") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{file} is damaged: no format version", "use another checkpoint")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format version {version}, this pipeloom reads up to {FORMAT_VERSION}",
            "load it with the version of pipeloom that wrote it",
        )
    checksum = values.pop(_CHECKSUM, None)
    if (version > 1 or checksum is not None) and checksum != _checksum_of(values):
        raise CheckpointError(
            f"{path} is damaged: {STATE_FILE} has changed since it was written",
            "use another checkpoint",
        )
    try:
        state = TrainState(**values)
    except TypeError as error:
        raise CheckpointError(f"{file} is damaged: {error}", "use another checkpoint") from error
    for spec in dataclasses.fields(TrainState):
        # A dict[...] is checked as dict: what is in it is the checksum's matter.
        kind = dict if spec.type.startswith("dict") else int
        if not isinstance(getattr(state, spec.name), kind):
            raise CheckpointError(
                f"{file} is damaged: {spec.name} is not of type {kind.__name__}",
                "use another checkpoint",
            )
    return state
