"""What crosses a stage boundary: one tensor, or tuples, lists and dicts of tensors."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeloom.runtime.errors import BoundaryError, with_hint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["call_module", "from_message", "is_plain", "leaves_of", "map_leaves", "to_message"]

_ALIGNMENT = 16  # the largest element, complex128: views need aligned offsets
_LENGTH = struct.Struct("<q")
_PLAIN_VALUES = (bool, int, float, str, type(None))


def is_plain(value: Any) -> bool:
    """Whether a value is one floating-point tensor, which travels as it is.

    Anything else is a structure: only its leaves that want a gradient get one.
    """
    return isinstance(value, Tensor) and value.is_floating_point()


def map_leaves(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor of a structure and build the same structure of results.

    Args:
        function: Takes a tensor.
        value: Tensors in tuples, lists and dicts; numbers, texts and None stay as they are.
            Subclasses of the three, such as named tuples, come out as plain ones.

    Raises:
        BoundaryError: Something else is in it.

    Examples:
        >>> import torch
        >>> map_leaves(lambda tensor: tensor.shape[0], (torch.ones(2), {"a": torch.ones(3)}, None))
        (2, {'a': 3}, None)
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_leaves(function, part) for part in value)
    if isinstance(value, list):
        return [map_leaves(function, part) for part in value]
    if isinstance(value, dict):
        return {key: map_leaves(function, part) for key, part in value.items()}
    if isinstance(value, _PLAIN_VALUES):
        return value
    raise BoundaryError(
        with_hint(
            f"{type(value).__name__} can't cross a stage boundary",
            "give tensors, numbers and texts in tuples, lists and dicts",
        )
    )


def leaves_of(value: Any) -> list[Tensor]:
    """All tensors of a structure, depth first."""
    found: list[Tensor] = []
    map_leaves(found.append, value)
    return found


def call_module(module: nn.Module, given: Any, extra: dict[str, Any]) -> Any:
    """Call a chunk: a tuple gives positional arguments, a dict keyword arguments.

    Examples:
        >>> import torch
        >>> call_module(torch.nn.Bilinear(2, 2, 3), (torch.ones(1, 2), torch.ones(1, 2)), {}).shape
        torch.Size([1, 3])
    """
    if isinstance(given, tuple):
        return module(*given, **extra)
    if isinstance(given, dict):
        return module(**given, **extra)
    return module(given, **extra)


def to_message(value: Any) -> Tensor:
    """Make one tensor of what crosses a boundary, for transports that move bytes.

    A floating-point tensor goes as it is. A structure is packed: the length of its description,
    the description (JSON), then each leaf's bytes, in one uint8 tensor.

    Examples:
        >>> import torch
        >>> packed = to_message({"mask": torch.tensor([True, False]), "scale": 0.5})
        >>> packed.dtype, from_message(packed)
        (torch.uint8, {'mask': tensor([ True, False]), 'scale': 0.5})
    """
    if is_plain(value):
        return _real(value)
    leaves: list[Tensor] = []
    text = json.dumps(_describe(value, leaves)).encode()
    head = _LENGTH.pack(len(text)) + text
    device = leaves[0].device if leaves else torch.device("cpu")
    start = torch.frombuffer(bytearray(_padded(head)), dtype=torch.uint8).to(device)
    parts = [start]
    for leaf in leaves:
        data = _real(leaf.detach()).contiguous()
        # One element counts as contiguous whatever its stride, but `view` reads the stride.
        data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
        parts += [data, data.new_zeros(-len(data) % _ALIGNMENT)]
    return torch.cat(parts)


def from_message(message: Tensor) -> Any:
    """Undo `to_message`. Leaves own their memory, so that one may outlive the others."""
    if message.dtype is not torch.uint8:
        return message
    length = _LENGTH.unpack(bytes(message[: _LENGTH.size].tolist()))[0]
    end = _LENGTH.size + length
    text = bytes(message[_LENGTH.size : end].cpu().numpy())
    offset = end + -end % _ALIGNMENT

    def build(described: Any) -> Any:
        nonlocal offset
        if isinstance(described, list):
            return [build(part) for part in described]
        if not isinstance(described, dict):
            return described
        ((kind, content),) = described.items()
        if kind == "tuple":
            return tuple(build(part) for part in content)
        if kind == "dict":
            return {key: build(part) for key, part in content}
        name, shape, wants_gradient = content
        dtype = getattr(torch, name)
        size = dtype.itemsize * torch.Size(shape).numel()
        data = message[offset : offset + size]
        offset += size + -size % _ALIGNMENT
        return data.clone().view(dtype).reshape(shape).requires_grad_(wants_gradient)

    return build(json.loads(text))


def _real(tensor: Tensor) -> Tensor:
    """The tensor with its memory as it reads: a conjugate or a negative may be a mark alone."""
    return tensor.resolve_conj().resolve_neg()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _describe(value: Any, leaves: list[Tensor]) -> Any:
    """A structure as JSON; its tensors are appended to `leaves`."""
    if isinstance(value, Tensor):
        leaves.append(value)
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, list(value.shape), value.requires_grad]}
    if isinstance(value, tuple):
        return {"tuple": [_describe(part, leaves) for part in value]}
    if isinstance(value, list):
        return [_describe(part, leaves) for part in value]
    if isinstance(value, dict):
        return {"dict": [[key, _describe(part, leaves)] for key, part in value.items()]}
    return value
