"""Whether files are still what was written: torch's reader does not notice a flipped byte."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_BLOCK_BYTES = 1 << 22


def checksum(file: Path) -> list[int]:
    """Size in bytes, and CRC-32."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def checksums(folder: Path) -> dict[str, list[int]]:
    """Of every file in a folder, by name."""
    return {file.name: checksum(file) for file in sorted(folder.iterdir()) if file.is_file()}


def damaged_files(
    folder: Path, written: Mapping[str, Sequence[int]], *, contents: bool = True
) -> list[str]:
    """What is wrong with each file that is not as it was written; empty if all are.

    Args:
        folder: Where they are.
        written: What `checksums` said then.
        contents: Whether to read the files, and not only their sizes.
    """
    faults = []
    for name, (size, crc) in sorted(written.items()):
        file = folder / name
        if not file.is_file():
            faults.append(f"{name} is missing")
            continue
        here = file.stat().st_size
        if here != size:
            faults.append(f"{name} has {here} bytes, {size} were written")
        elif contents and checksum(file) != [size, crc]:
            faults.append(f"{name} has changed since it was written")
    return faults
