"""Gradients across stages: their scale, tied weights, the norm, clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from pipeloom.runtime.errors import with_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Parameter

    from pipeloom.runtime.transport import Transport

__all__ = [
    "GradientStash",
    "TiedWeight",
    "clip_grad_norm",
    "grad_norm",
    "reduce_data_parallel_gradients",
    "reduce_tied_gradients",
]


class GradientStash:
    """Sets earlier gradients aside, so that those of one step can be scaled alone.

    Args:
        parameters: The parameters whose gradients the step adds to.

    Examples:
        >>> import torch
        >>> p = torch.nn.Parameter(torch.ones(1))
        >>> p.grad = torch.tensor([5.0])
        >>> with GradientStash([p]) as stash:
        ...     (4 * p).sum().backward()
        ...     stash.scale(0.5)
        >>> p.grad
        tensor([7.])
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        unique = {id(parameter): parameter for parameter in parameters}
        self._earlier = [(parameter, parameter.grad) for parameter in unique.values()]

    def __enter__(self) -> Self:
        for parameter, _ in self._earlier:
            parameter.grad = None
        return self

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradients that came since."""
        for parameter, _ in self._earlier:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for parameter, earlier in self._earlier:
            if earlier is None:
                continue
            if parameter.grad is not None:
                earlier.add_(parameter.grad)
            parameter.grad = earlier


class TiedWeight:
    """One weight that several ranks hold a copy of, such as a tied embedding.

    Args:
        owners: Each owner's parameter, for the owners in this process, by rank.
        ranks: All owners, whether in this process or not. The lowest counts for the norm.
    """

    def __init__(self, owners: Mapping[int, Parameter], ranks: Sequence[int]) -> None:
        self.owners = dict(owners)
        self.ranks = tuple(sorted(set(ranks)))
        strangers = sorted(set(self.owners) - set(self.ranks))
        if strangers:
            raise ValueError(
                with_hint(
                    f"ranks {strangers} own the tied weight, but ranks={list(self.ranks)}",
                    "name every owner in ranks",
                )
            )


def reduce_tied_gradients(tied: Iterable[TiedWeight], transport: Transport) -> None:
    """Give every owner of a tied weight the sum of its owners' gradients, once a step.

    An owner whose weight got no gradient adds zeros. A frozen owner adds zeros too and stays
    without a gradient, so that owners need not agree on who is frozen. Owners in one process may
    share one parameter: its gradient is then a sum already, and counts once.

    Args:
        tied: The tied weights, in the same order on every rank.
        transport: The pipeline's.
    """
    for weight in tied:
        parts: dict[int, Tensor] = {}
        seen: set[int] = set()
        for rank, parameter in weight.owners.items():
            if parameter.requires_grad and id(parameter) not in seen:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parts[rank] = parameter.grad
                seen.add(id(parameter))
            else:
                parts[rank] = torch.zeros_like(parameter)
        if parts:
            transport.all_reduce(parts, weight.ranks)


def reduce_data_parallel_gradients(parameters: Iterable[Parameter], group: ProcessGroup) -> None:
    """Sum gradients over data-parallel ranks: the loss scale already counts all their tokens.

    A parameter without a gradient here adds zeros, so that ranks need not agree on which have one.

    Args:
        parameters: The same parameters in the same order on every rank of the group.
        group: The data-parallel ranks of one pipeline rank.
    """
    works = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(torch.distributed.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()


def grad_norm(
    parameters: Mapping[int, Iterable[Parameter]],
    transport: Transport,
    *,
    tied: Iterable[TiedWeight] = (),
) -> Tensor:
    """2-norm of the gradients of all stages, the same number on every rank.

    A tied weight counts once, for its lowest rank; a weight that one rank's chunks share counts
    once too. A rank without parameters takes part all the same.

    Args:
        parameters: Each hosted rank's parameters.
        transport: The pipeline's.
        tied: Tied weights, their gradients reduced before.

    Returns:
        The norm, 0-dim, float64: its order of summation must not show.
    """
    seen: set[int] = set()
    for weight in tied:
        here = {id(p) for rank, p in weight.owners.items() if rank != weight.ranks[0]}
        seen |= here - {id(weight.owners.get(weight.ranks[0]))}
    squares = {rank: _square_sum(own, seen) for rank, own in parameters.items()}
    device = getattr(transport, "device", None)
    if device is not None:
        squares = {rank: square.to(device) for rank, square in squares.items()}
    transport.all_reduce(squares)
    return next(iter(squares.values())).sqrt().reshape(())


def clip_grad_norm(
    parameters: Mapping[int, Iterable[Parameter]],
    max_norm: float,
    transport: Transport,
    *,
    tied: Iterable[TiedWeight] = (),
) -> Tensor:
    """Scale all stages' gradients so that their common 2-norm is at most `max_norm`.

    Args:
        parameters: Each hosted rank's parameters.
        max_norm: The bound.
        transport: The pipeline's.
        tied: Tied weights, their gradients reduced before.

    Returns:
        The norm before clipping, 0-dim, the same on every rank.

    Examples:
        >>> import torch
        >>> from pipeloom.runtime.local import LocalTransport
        >>> a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        >>> a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
        >>> clip_grad_norm({0: [a], 1: [b]}, 1.0, LocalTransport(2)).item()
        5.0
        >>> round(b.grad.item(), 4)
        0.8
    """
    if not max_norm >= 0:
        raise ValueError(
            with_hint(f"max_norm={max_norm}, but must be at least 0", "give max_norm=1.0")
        )
    own = {rank: list(params) for rank, params in parameters.items()}
    norm = grad_norm(own, transport, tied=tied)
    factor = max_norm / (float(norm) + 1e-6)
    if factor < 1.0:
        unique = {id(p): p for params in own.values() for p in params if p.grad is not None}
        with torch.no_grad():
            for parameter in unique.values():
                _grad(parameter).mul_(factor)
    return norm


def _grad(parameter: Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient


def _square_sum(parameters: Iterable[Parameter], seen: set[int]) -> Tensor:
    """Sum of squares of the gradients not yet seen, which are added to `seen`."""
    total = torch.zeros(1, dtype=torch.float64)
    for parameter in parameters:
        if id(parameter) in seen or parameter.grad is None:
            continue
        seen.add(id(parameter))
        total = total.to(parameter.device)
        square = parameter.grad.detach().double().square().sum()
        # fully_shard's gradients are shards: their sum is over the ranks that share a parameter.
        total += square.full_tensor() if hasattr(square, "full_tensor") else square
    return total
