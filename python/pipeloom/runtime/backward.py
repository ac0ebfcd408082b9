"""Backward of one stage: the one place where gradients are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["full_backward", "gradient_edge", "input_gradient"]

# `torch.autograd.backward` spends as long on checking its arguments as a small stage's backward
# takes; shapes were checked when the tensors crossed the boundary.
_run_engine = Variable._execution_engine.run_backward


def gradient_edge(output: Tensor) -> GradientEdge | None:
    """The place in the graph where the gradient of `output` goes in.

    Holding the edge in place of the tensor lets the tensor's memory go as soon as it has been
    sent, unless the graph itself needs it.

    Args:
        output: Output of a stage, any shape.

    Returns:
        The edge, or None if nothing behind `output` wants a gradient.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> edge = gradient_edge(3 * x)
        >>> full_backward(edge, torch.ones(2))
        >>> x.grad
        tensor([3., 3.])
    """
    if not output.requires_grad:
        return None
    node = output.grad_fn
    if node is None:  # the stage gave back its own input
        return torch.autograd.graph.get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def full_backward(edge: GradientEdge | None, gradient: Tensor) -> None:
    """Run `B`: add the gradients of everything behind `edge` to the leaves.

    Args:
        edge: What `gradient_edge` gave for the stage's output, or for its loss. None: no-op.
        gradient: Gradient of that output, of its shape.
    """
    if edge is not None:
        _run_engine(
            (edge,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def input_gradient(stage_input: Tensor) -> Tensor:
    """Take the gradient that `full_backward` left at the stage's input.

    A stage that did not use its input has none; the stage before waits for a message all the
    same, so it is sent zeros.
    """
    gradient = stage_input.grad
    if gradient is None:
        return torch.zeros_like(stage_input)
    stage_input.grad = None
    return gradient
