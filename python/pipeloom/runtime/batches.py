"""Cuts a step's data into microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeloom.runtime.errors import PipelineError, with_hint
from pipeloom.runtime.structure import leaves_of, map_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["require_pairs", "split_batch", "split_named"]


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
        batch: What `split_batch` cut, if it is a tensor; else nothing is compared.
        targets: Likewise. It may have several rows for each of the batch's, as flattened labels
            have.
        num_microbatches: Into how many both are cut.

    Raises:
        PipelineError: Microbatch n of the targets does not belong to that of the batch.
    """
    if not (isinstance(batch, Tensor) and isinstance(targets, Tensor)):
        return
    rows, goals = len(batch), len(targets)
    even = rows % num_microbatches == 0 and goals % num_microbatches == 0
    if rows != goals and not even:
        raise PipelineError(
            with_hint(
                f"batch has {rows} samples and targets has {goals}: cut into {num_microbatches} "
                "microbatches, they would not belong together",
                "give one target a sample, or lists of one entry a microbatch",
            )
        )


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
