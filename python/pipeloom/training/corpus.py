"""Where tokens come from: text files read as bytes, or Megatron's `.bin` and `.idx` pair."""

from __future__ import annotations

import hashlib
import os
import struct
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeloom.training.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

END_OF_DOCUMENT = 256
BYTE_VOCAB_SIZE = 257
VALID_FRACTION = 0.05
DEFAULT_MAX_BYTES = 4_000_000
_SNIFFED_BYTES = 8192
_SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids to train on and to hold out.

    Attributes:
        train: Ids of the training documents, one after another.
        valid: Ids of the held-out documents.
        vocab_size: All ids are below it.
        is_bytes: Whether id 0..255 is that byte and 256 ends a document.
        source: One line for people: what was read.
    """

    train: NDArray[np.generic]
    valid: NDArray[np.generic]
    vocab_size: int
    is_bytes: bool
    source: str

    def fingerprint(self) -> str:
        """A hash that tells this text from another: lengths, and both ends of both parts."""
        digest = hashlib.sha256()
        for part in (self.train, self.valid):
            digest.update(f"{part.size} {part.dtype}\n".encode())
            for end in (part[:1_000_000], part[-1_000_000:]):
                digest.update(np.ascontiguousarray(end).tobytes())
        return digest.hexdigest()[:16]


def load_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Reads the corpus at `paths`; without paths, this machine's Python standard library.

    Files go whole to either training or held-out text, by a hash of their name; a single file is
    split before its last twentieth.

    Args:
        paths: Text files and folders of them (folders are searched, hidden and binary files in
            them passed over), or one `.bin` or `.idx` file of a Megatron data set.

    Raises:
        DataError: A path is missing or cannot be read, a named file is empty or binary, or
            nothing is left to read.
    """
    named = [Path(path) for path in paths]
    if any(path.suffix in (".bin", ".idx") for path in named):
        if len(named) > 1:
            raise DataError(
                f"{len(named)} paths with a `.bin` or `.idx` file among them",
                "give one Megatron data set, or text files and folders",
            )
        return _load_indexed(named[0])
    if named:
        documents, source = list(_read_all(named)), ", ".join(map(str, named))
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents, source = list(_standard_library(root)), f"Python's standard library in {root}"
    if not documents:
        raise DataError(f"no text in {source}", "name files or folders that hold text")
    train, valid = _split(documents)
    size = (train.size + valid.size) / 1e6
    source = f"{source}: {len(documents)} files, {size:.2f} MB"
    return Corpus(train, valid, BYTE_VOCAB_SIZE, is_bytes=True, source=source)


def _order(name: str) -> bytes:
    # Neither folder order nor a seed: the same files are held out in every run.
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(folder, name)


def _standard_library(root: Path) -> Iterator[tuple[str, bytes]]:
    paths = {
        str(path.relative_to(root)): path
        for path in _walk(root)
        if path.suffix == ".py" and _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    }
    total = 0
    for name in sorted(paths, key=_order):
        text = _read(paths[name])
        if text:
            total += len(text)
            yield name, text
        if total >= DEFAULT_MAX_BYTES:
            return


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "name a readable file") from error


def _is_binary(text: bytes) -> bool:
    return b"\0" in text[:_SNIFFED_BYTES]


def _read_all(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    # A file that is named twice is read once: its copy could be the text that is held out.
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            yield from _read_folder(path, seen)
        elif not path.exists():
            pair = Path(f"{path}.bin")
            hint = f"name one of the pair: {pair}" if pair.is_file() else "check the path"
            raise DataError(f"--data {path}: no such file or folder", hint)
        else:
            text = _read(path)
            if not text:
                raise DataError(f"--data {path} is empty", "name a file with text in it")
            if _is_binary(text):
                raise DataError(
                    f"--data {path} is binary: it holds NUL bytes", "name text files only"
                )
            if _is_new(path, seen):
                yield path.name, text


def _is_new(path: Path, seen: set[Path]) -> bool:
    """Whether the file is not among those seen, to which it is added."""
    path = path.resolve()
    new = path not in seen
    seen.add(path)
    return new


def _read_folder(folder: Path, seen: set[Path]) -> Iterator[tuple[str, bytes]]:
    num_files = num_read = 0
    for path in _walk(folder):
        if not path.is_file():
            continue
        num_files += 1
        text = _read(path)
        if text and not _is_binary(text):
            num_read += 1
            if _is_new(path, seen):
                yield str(path.relative_to(folder)), text
    if num_read == 0:
        raise DataError(
            f"--data {folder} holds no text: {num_files} files, all empty or binary",
            "name a folder with text files",
        )


def _join(documents: Iterable[bytes]) -> NDArray[np.generic]:
    parts: list[NDArray[np.uint16]] = []
    for text in documents:
        parts.append(np.frombuffer(text, np.uint8).astype(np.uint16))
        parts.append(np.array([END_OF_DOCUMENT], np.uint16))
    return np.concatenate(parts)


def _split(documents: list[tuple[str, bytes]]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    if len(documents) == 1:
        text = documents[0][1]
        cut = len(text) - max(1, int(len(text) * VALID_FRACTION))
        return _join([text[:cut]]), _join([text[cut:]])
    documents = sorted(documents, key=lambda document: (_order(document[0]), document[1]))
    wanted = VALID_FRACTION * sum(len(text) for _, text in documents)
    held_out, size = 0, 0
    while size < wanted and held_out < len(documents) - 1:
        size += len(documents[held_out][1])
        held_out += 1
    texts = [text for _, text in documents]
    return _join(texts[held_out:]), _join(texts[:held_out])


def _load_indexed(path: Path) -> Corpus:
    """Reads Megatron's memory-mapped pair: an index of sequence lengths, and their ids."""
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    for part in (index, data):
        if not part.is_file():
            raise DataError(
                f"--data {path}: {part} is missing", "both files of the pair are needed"
            )
    header = _read(index)
    fixed = len(_INDEX_MAGIC) + struct.calcsize("<QBQQ")
    if not header.startswith(_INDEX_MAGIC) or len(header) < fixed:
        raise DataError(f"{index} is no Megatron index", "expected a file that begins with MMIDIDX")
    version, code, num_sequences, num_documents = struct.unpack_from(
        "<QBQQ", header, len(_INDEX_MAGIC)
    )
    if version != 1 or code not in _INDEX_DTYPES:
        raise DataError(
            f"{index} has version {version}, type code {code}",
            "version 1 with ids of whole numbers can be read",
        )
    # A length and an offset of each sequence, and the first sequence of each document.
    if len(header) < fixed + (4 + 8) * num_sequences + 8 * num_documents:
        raise DataError(f"{index} is cut short", "write the data set again")
    lengths = np.frombuffer(header, "<i4", num_sequences, fixed).astype(np.int64)
    dtype = np.dtype(_INDEX_DTYPES[code])
    offsets = np.frombuffer(header, "<i8", num_sequences, fixed + 4 * num_sequences)
    begins = (np.cumsum(lengths) - lengths) * dtype.itemsize
    if (lengths < 0).any() or (offsets != begins).any():
        raise DataError(
            f"{index} is damaged: its sequences do not follow one another",
            "write the data set again",
        )
    total = int(lengths.sum())
    if total == 0 or data.stat().st_size != total * dtype.itemsize:
        raise DataError(
            f"{data} has {data.stat().st_size} bytes, its index counts {total} ids of "
            f"{dtype.itemsize} bytes",
            "both files must come from one run of the tool that wrote them",
        )
    ids = np.memmap(data, dtype, mode="r")
    least = int(ids.min())
    if least < 0:
        raise DataError(f"{data} holds the id {least}", "ids are whole numbers from 0 on")
    # Between two sequences, with something on both sides; within the only one.
    ends = np.cumsum(lengths[lengths > 0])
    wanted = (1 - VALID_FRACTION) * total
    cut = int(ends[min(int(np.searchsorted(ends, wanted)), ends.size - 2)])
    if ends.size == 1:
        cut = int(wanted)
    vocab_size = int(ids.max()) + 1
    source = f"{data}: {num_sequences} sequences, {total} ids below {vocab_size}"
    return Corpus(ids[:cut], ids[cut:], vocab_size, is_bytes=False, source=source)
