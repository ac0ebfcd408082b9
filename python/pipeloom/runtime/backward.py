"""Backward of one stage: the one place where gradients are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.autograd.graph import Node

__all__ = [
    "SplitBackward",
    "full_backward",
    "gradient_edge",
    "gradient_edges",
    "input_gradient",
]

# `torch.autograd.backward` spends as long on checking its arguments as a small stage's backward
# takes; shapes were checked when the tensors crossed the boundary. Arguments: roots (edges, or
# tensors), their gradients, whether to keep the graph, to make one of the gradients, the leaves to
# reach (none: all), whether some may be out of reach, whether to add to `grad`.
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
        >>> full_backward((edge,), (torch.ones(2),))
        >>> x.grad
        tensor([3., 3.])
    """
    if not output.requires_grad:
        return None
    node = output.grad_fn
    if node is None:  # the stage gave back its own input
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def gradient_edges(outputs: Iterable[Tensor]) -> tuple[GradientEdge, ...]:
    """The edges of those outputs that want a gradient, in order."""
    edges = [gradient_edge(output) for output in outputs]
    return tuple([edge for edge in edges if edge is not None])


def full_backward(edges: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor]) -> None:
    """Run `B`: add the gradients of everything behind `edges` to the leaves.

    Args:
        edges: What `gradient_edges` gave for the stage's outputs; or the loss itself.
            None of them: no-op.
        gradients: Gradients of those outputs, each of its output's shape.
    """
    if edges:
        _run_engine(tuple(edges), tuple(gradients), False, False, (), True, True)


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

    `I` runs the engine towards the stage's inputs alone; nodes that feed a parameter then compute
    no weight gradient. What flows into those nodes is noted, and `W` runs each of them once more
    towards its parameters alone. No product is computed twice.

    Falls back to a full backward where halves would be wrong or wasteful: in `W` if the stage has
    no input, in `I` if parts of the graph can't be run apart (`_Cuts.whole`) or the caller asks
    for it.

    Args:
        edges: What `gradient_edges` gave for the outputs; or the loss itself.
        inputs: The stage's inputs that want a gradient, leaves; none on the first stage.
        whole_first: Run everything in `I`, for instance because the graph is recomputed each time
            that the engine goes through it.

    Examples:
        >>> import torch
        >>> linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        >>> halves = SplitBackward(gradient_edges([linear(x).tanh()]), [x])
        >>> halves.input_half([torch.ones(1, 2)])
        >>> x.grad is not None, linear.weight.grad
        (True, None)
        >>> halves.weight_half()
        >>> linear.weight.grad is not None
        True
    """

    def __init__(
        self,
        edges: Sequence[GradientEdge | Tensor],
        inputs: Sequence[Tensor],
        *,
        whole_first: bool = False,
    ) -> None:
        self._edges = tuple(
            edge if isinstance(edge, GradientEdge) else get_gradient_edge(edge) for edge in edges
        )
        self._inputs = tuple(inputs)
        self._whole_first = whole_first
        self._gradients: tuple[Tensor, ...] = ()  # of the edges left for `W` to run in full
        self._parts: list[tuple[Node, list[Tensor], _Noted]] = []

    def input_half(self, gradients: Sequence[Tensor]) -> None:
        """Run `I`: add the gradients of the stage's inputs.

        Args:
            gradients: Gradients of the outputs, or the loss's seed.
        """
        edges, gradients, inputs = self._edges, tuple(gradients), self._inputs
        self._inputs = ()  # what `W` does not need goes now
        if not edges:
            return
        cuts = None
        if inputs and not self._whole_first:
            cuts = _cuts([edge.node for edge in edges], inputs)
        if self._whole_first or (cuts is not None and cuts.whole):
            full_backward(edges, gradients)
            self._edges = ()
            return
        for node, parameters in cuts.nodes if cuts is not None else ():
            noted = _Noted()
            self._parts.append((node, parameters, noted))
            node.register_prehook(noted)
        now: list[tuple[GradientEdge, Tensor]] = []
        later: list[tuple[GradientEdge, Tensor]] = []
        for edge, gradient in zip(edges, gradients, strict=True):
            leads = cuts is not None and cuts.leads[edge.node]
            (now if leads else later).append((edge, gradient))
        if now:
            _run_engine(*zip(*now, strict=True), True, False, inputs, True, True)
        self._edges = tuple(edge for edge, _ in later)
        self._gradients = tuple(gradient for _, gradient in later)

    def weight_half(self) -> None:
        """Run `W`: add the gradients of the parameters."""
        full_backward(self._edges, self._gradients)
        for node, parameters, noted in self._parts:
            found = [
                (GradientEdge(node, n), g) for n, g in enumerate(noted.gradients) if g is not None
            ]
            if found:
                edges, gradients = zip(*found, strict=True)
                _run_engine(edges, gradients, False, False, tuple(parameters), True, True)
        self._edges = self._gradients = ()
        self._parts = []


class _Noted:
    """What flows into a node: noted at its first run, and given to it once more at the second.

    It is the node's last hook before a run. Hooks of the caller's, on the node or on a tensor that
    it made, come before it in both runs; what they make of the gradient counts once.
    """

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        self.gradients: tuple[Tensor | None, ...] = ()

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if self.gradients:
            return self.gradients
        self.gradients = gradients
        return None


class _Cuts(NamedTuple):
    """Where a stage's graph feeds parameters."""

    leads: dict[Node, bool]
    """Whether a node leads to an input."""
    nodes: list[tuple[Node, list[Tensor]]]
    """Nodes on the way to an input that also lead to parameters, and those parameters."""
    whole: bool
    """Whether the graph can't be run in parts: a parameter is found from two of them, or a
    compiled backward lies on the way, which runs once and then frees its memory."""


def _cuts(roots: Sequence[Node], inputs: Sequence[Tensor]) -> _Cuts:
    """Walk the graph behind `roots`, children before parents."""
    wanted = {id(stage_input) for stage_input in inputs}
    leads: dict[Node, bool] = {}
    leaves: dict[Node, list[Tensor]] = {}  # parameters of nodes that do not lead to an input
    nodes: list[tuple[Node, list[Tensor]]] = []
    behind: dict[Node, list[Node]] = {}  # asking a node makes new objects: once is enough
    compiled = False
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
            continue
        if node not in behind:
            behind[node] = [child for child, _ in node.next_functions if child is not None]
            stack.extend(child for child in behind[node] if child not in leads)
            continue
        stack.pop()
        children = behind[node]
        variable = None if children else getattr(node, "variable", None)
        if variable is not None:
            leads[node] = id(variable) in wanted
            leaves[node] = [variable]
            continue
        apart = [child for child in children if not leads[child]]
        leads[node] = len(apart) < len(children)
        own = {id(leaf): leaf for child in apart for leaf in leaves[child]}
        if not leads[node]:
            leaves[node] = list(own.values())
        elif own:
            nodes.append((node, list(own.values())))
        compiled |= leads[node] and type(node).__name__ == "CompiledFunctionBackward"
    found = [id(leaf) for _, parameters in nodes for leaf in parameters]
    beside = {root for root in roots if not leads[root]}
    found += {id(leaf) for root in beside for leaf in leaves[root]}
    return _Cuts(leads, nodes, compiled or len(found) != len(set(found)))
