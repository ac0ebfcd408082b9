"""Backward of one stage: the one place where gradients are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

__all__ = ["SplitBackward", "full_backward", "gradient_edge", "input_gradient"]

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


class SplitBackward:
    """The backward of one stage on one microbatch in halves: `I`, then, at any time, `W`.

    `I` runs the engine towards the stage's input alone; nodes that feed a parameter then compute
    no weight gradient. What flows into those nodes is noted, and `W` runs each of them once more
    towards its parameters alone. No product is computed twice.

    Falls back to a full backward where halves would be wrong or wasteful: in `W` if the stage has
    no input, in `I` if a parameter is used at several places of the graph (`whole_first`, which
    the caller can ask for too).

    Args:
        edge: What `gradient_edge` gave for the output or the loss.
        stage_input: The stage's input, a leaf; None on the first stage.
        whole_first: Run everything in `I`, for instance because the graph is recomputed each time
            that the engine goes through it.

    Examples:
        >>> import torch
        >>> linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        >>> halves = SplitBackward(gradient_edge(linear(x).tanh()), x)
        >>> halves.input_half(torch.ones(1, 2))
        >>> x.grad is not None, linear.weight.grad
        (True, None)
        >>> halves.weight_half()
        >>> linear.weight.grad is not None
        True
    """

    def __init__(
        self, edge: GradientEdge | None, stage_input: Tensor | None, *, whole_first: bool = False
    ) -> None:
        self._edge = edge
        self._input = stage_input
        self._whole_first = whole_first
        self._gradient: Tensor | None = None  # left for `W` to run in full
        self._parts: list[tuple[Node, list[Tensor], list[Tensor | None]]] = []

    def input_half(self, gradient: Tensor) -> None:
        """Run `I`: add the gradient of the stage's input.

        Args:
            gradient: Gradient of the output, or the loss's seed.
        """
        edge, stage_input = self._edge, self._input
        if edge is None:
            return
        if self._whole_first:
            full_backward(edge, gradient)
            return
        cuts = None if stage_input is None else _cuts(edge.node, stage_input)
        if cuts is None or not cuts.reaches_input:
            self._gradient = gradient
            return
        if cuts.shared:
            full_backward(edge, gradient)
            return
        hooks = []
        for node, parameters in cuts.nodes:
            incoming: list[Tensor | None] = []
            self._parts.append((node, parameters, incoming))
            hooks.append(node.register_prehook(incoming.extend))
        try:
            _run_engine(
                (edge,), (gradient,), True, False, (stage_input,),
                allow_unreachable=True, accumulate_grad=True,
            )  # fmt: skip
        finally:
            for hook in hooks:
                hook.remove()
        self._edge = None

    def weight_half(self) -> None:
        """Run `W`: add the gradients of the parameters."""
        if self._gradient is not None:
            full_backward(self._edge, self._gradient)
        for node, parameters, incoming in self._parts:
            found = [(GradientEdge(node, n), g) for n, g in enumerate(incoming) if g is not None]
            if found:
                edges, gradients = zip(*found, strict=True)
                _run_engine(
                    edges, gradients, False, False, tuple(parameters),
                    allow_unreachable=True, accumulate_grad=True,
                )  # fmt: skip
        self._edge = self._gradient = self._input = None
        self._parts = []


class _Cuts(NamedTuple):
    """Where a stage's graph feeds parameters."""

    reaches_input: bool
    nodes: list[tuple[Node, list[Tensor]]]
    """Nodes on the way to the input that also lead to parameters, and those parameters."""
    shared: bool
    """Whether a parameter is found from two of them."""


def _cuts(root: Node, stage_input: Tensor) -> _Cuts:
    """Walk the graph behind `root`, children before parents."""
    leads: dict[Node, bool] = {}  # whether a node leads to the input
    leaves: dict[Node, list[Tensor]] = {}  # parameters of nodes that do not
    nodes: list[tuple[Node, list[Tensor]]] = []
    stack = [root]
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        unseen = [child for child in children if child not in leads]
        if unseen:
            stack.extend(unseen)
            continue
        stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leads[node] = variable is stage_input
            leaves[node] = [] if leads[node] else [variable]
            continue
        leads[node] = any(leads[child] for child in children)
        own = [leaf for child in children if not leads[child] for leaf in leaves[child]]
        unique = list({id(leaf): leaf for leaf in own}.values())
        leaves[node] = unique
        if leads[node] and unique:
            nodes.append((node, unique))
    found = [id(leaf) for _, parameters in nodes for leaf in parameters]
    return _Cuts(leads[root], nodes, len(found) != len(set(found)))
