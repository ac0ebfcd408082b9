"""Cuts a step's data into microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pipeloom.runtime.errors import PipelineError, with_hint
from pipeloom.runtime.structure import leaves_of, map_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["piece_sizes", "require_pairs", "split_batch", "split_named", "split_sequences"]

SequenceDim: TypeAlias = "int | Mapping[str, int | None] | None"
"""Where the sequence is: a dimension, None for none, or that by name."""


def split_batch(batch: Any, num_microbatches: int, name: str = "batch") -> list[Any]:
    """Cut a batch into microbatches along its first dimension; sizes may differ by one.

    Args:
        batch: A tensor; or a dict, of which every tensor is cut and all else repeated; or a list
            or tuple of microbatches, which is taken as it is.
        num_microbatches: How many.
        name: What the caller calls it, for messages.

    Examples:
        >>> import torch
        >>> [len(part) for part in split_batch(torch.arange(8), 3)]
        [3, 3, 2]
        >>> split_batch({"x": torch.arange(2), "causal": True}, 2)
        [{'x': tensor([0]), 'causal': True}, {'x': tensor([1]), 'causal': True}]
    """
    if isinstance(batch, dict):
        leaves = leaves_of(batch)
        sizes = sorted({len(leaf) if leaf.dim() else 0 for leaf in leaves})
        if len(sizes) > 1:
            raise PipelineError(
                with_hint(
                    f"{name} has tensors with first dimensions {sizes}",
                    "give all tensors of a dict one number of samples, or give a list of "
                    "microbatches",
                )
            )
        _check_size(sizes[0] if sizes else num_microbatches, num_microbatches, name)
        cut = [torch.tensor_split(leaf, num_microbatches) for leaf in leaves]
        parts = []
        for n in range(num_microbatches):
            own = iter([pieces[n] for pieces in cut])
            parts.append(map_leaves(partial(_take, own), batch))
        return parts
    if isinstance(batch, Tensor):
        _check_size(len(batch) if batch.dim() else 0, num_microbatches, name)
        return list(torch.tensor_split(batch, num_microbatches))
    if not isinstance(batch, Iterable) or isinstance(batch, str | bytes):
        raise PipelineError(
            with_hint(
                f"{name} is of type {type(batch).__name__}",
                "give a tensor, a dict of tensors, or a list with one entry a microbatch",
            )
        )
    parts = list(batch)
    if len(parts) != num_microbatches:
        raise PipelineError(
            with_hint(
                f"{name} has {len(parts)} microbatches, but the plan has {num_microbatches}",
                "give a tensor, or a list with one entry a microbatch",
            )
        )
    return parts


def require_pairs(batch: Any, targets: Any, num_microbatches: int) -> None:
    """Refuse a batch and targets that would be cut apart: their rows belong together.

    Args:
        batch: What `split_batch` cut: a tensor or a dict; of lists nothing is compared.
        targets: Likewise. It may have several rows for each of the batch's, as flattened labels
            have.
        num_microbatches: Into how many both are cut.

    Raises:
        PipelineError: Microbatch n of the targets does not belong to that of the batch.
    """
    rows, goals = _rows(batch), _rows(targets)
    if rows is None or goals is None:
        return
    even = rows % num_microbatches == 0 and goals % num_microbatches == 0
    if rows != goals and not even:
        raise PipelineError(
            with_hint(
                f"batch has {rows} samples and targets has {goals}: cut into {num_microbatches} "
                "microbatches, they would not belong together",
                "give one target a sample, or lists of one entry a microbatch",
            )
        )


def _rows(value: Any) -> int | None:
    """How many rows `split_batch` cuts; None if it cuts none."""
    if isinstance(value, Tensor):
        return len(value)
    leaves = leaves_of(value) if isinstance(value, dict) else []
    return len(leaves[0]) if leaves else None


def split_named(
    values: Mapping[str, Any], num_microbatches: int, name: str
) -> list[dict[str, Any]]:
    """Cut each of some named inputs.

    Args:
        values: Each is what `split_batch` takes, or a number or text that every microbatch gets.
        num_microbatches: How many.
        name: What the caller calls them, for messages.

    Examples:
        >>> split_named({"position": [0, 5], "causal": True}, 2, "inputs")
        [{'position': 0, 'causal': True}, {'position': 5, 'causal': True}]
    """
    if not isinstance(values, Mapping):
        raise PipelineError(
            with_hint(
                f"{name} is of type {type(values).__name__}",
                "give a dict from the chunk's argument names to their values",
            )
        )
    parts: list[dict[str, Any]] = [{} for _ in range(num_microbatches)]
    for key, value in values.items():
        if isinstance(value, Tensor | dict | list | tuple):
            pieces = split_batch(value, num_microbatches, f"{name}[{key!r}]")
        else:
            pieces = [value] * num_microbatches
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece
    return parts


def _take(pieces: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(pieces)


def _check_size(samples: int, num_microbatches: int, name: str) -> None:
    if samples < num_microbatches:
        raise PipelineError(
            with_hint(
                f"{name} has {samples} samples for {num_microbatches} microbatches",
                "give at least one sample a microbatch, or plan fewer microbatches",
            )
        )


def piece_sizes(length: int, num_pieces: int) -> list[int]:
    """Positions of each piece of a sequence; the first ones may have one more.

    Examples:
        >>> piece_sizes(10, 4)
        [3, 3, 2, 2]
    """
    short, longer = divmod(length, num_pieces)
    return [short + (piece < longer) for piece in range(num_pieces)]


def split_sequences(
    parts: list[Any], num_pieces: int, sequence_dim: SequenceDim = 1, name: str = "batch"
) -> list[Any]:
    """Cut the sequences of microbatches into pieces.

    Args:
        parts: One entry a microbatch: a tensor, or tuples, lists and dicts of them. Numbers and
            texts go to every piece.
        num_pieces: Pieces of each.
        sequence_dim: Dimension of the sequence in every tensor; None: it has none, and every piece
            gets it whole. Or a mapping from a dict's key to that; a key that it lacks has 1.
        name: What the caller calls them, for messages.

    Returns:
        One entry a piece, all of a microbatch's before the next one's.

    Examples:
        >>> import torch
        >>> x = {"tokens": torch.arange(10).view(2, 5), "weight": torch.ones(2)}
        >>> pieces = split_sequences([x], 2, {"weight": None})
        >>> [tuple(piece["tokens"].shape) for piece in pieces]
        [(2, 3), (2, 2)]
    """
    if num_pieces == 1:
        return parts
    pieces = []
    for part in parts:
        lengths: dict[int, str] = {}
        pieces += _cut(part, num_pieces, sequence_dim, name, lengths)
        if len(lengths) > 1:
            shown = ", ".join(f"{size} in {where}" for size, where in lengths.items())
            raise PipelineError(
                with_hint(
                    f"one microbatch has sequences of different lengths: {shown}",
                    "sequence_dim={name: None} gives a tensor whole to every piece; or cut "
                    "it yourself: a list with one entry a piece",
                )
            )
    return pieces


def _cut(
    value: Any, num_pieces: int, dim: SequenceDim, name: str, lengths: dict[int, str]
) -> list[Any]:
    """The pieces of one value; notes where each length of a sequence was seen."""
    if isinstance(value, dict):
        own = {
            key: _cut(
                part,
                num_pieces,
                dim if dim is None or isinstance(dim, int) else dim.get(key, 1),
                f"{name}[{key!r}]",
                lengths,
            )
            for key, part in value.items()
        }
        return [{key: cut[piece] for key, cut in own.items()} for piece in range(num_pieces)]
    if isinstance(value, tuple | list):
        cuts = [_cut(part, num_pieces, dim, name, lengths) for part in value]
        return [type(value)(cut[piece] for cut in cuts) for piece in range(num_pieces)]
    where = dim if dim is None or isinstance(dim, int) else 1
    if not isinstance(value, Tensor) or where is None:
        return [value] * num_pieces
    if not -value.dim() <= where < value.dim():
        raise PipelineError(
            with_hint(
                f"{name} has a tensor of shape {tuple(value.shape)}, which has no dimension "
                f"{where} to cut into {num_pieces} pieces",
                "say where the sequence is: sequence_dim=0, or {name: dim} for the entries of a "
                "dict, None for those that every piece gets whole",
            )
        )
    length = value.shape[where]
    if length < num_pieces:
        raise PipelineError(
            with_hint(
                f"{name} has sequences of length {length} (dimension {where} of "
                f"{tuple(value.shape)}) for {num_pieces} pieces",
                "give longer sequences, name their dimension with sequence_dim, or plan fewer "
                "num_seq_pieces",
            )
        )
    lengths.setdefault(length, name)
    return list(torch.split(value, piece_sizes(length, num_pieces), where))
