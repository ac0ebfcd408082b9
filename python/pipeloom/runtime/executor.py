"""Runs one rank's program. The same code over every transport."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function

from pipeloom.runtime.backward import (
    SplitBackward,
    full_backward,
    gradient_edges,
    input_gradient,
)
from pipeloom.runtime.errors import BoundaryError, with_hint
from pipeloom.runtime.program import (
    RECV,
    RUN_FORWARD,
    RUN_INPUT_HALF,
    SEND,
    Instruction,
    Program,
)
from pipeloom.runtime.structure import is_plain, leaves_of, map_leaves
from pipeloom.runtime.transport import UNKNOWN_SHAPES, Boundary, RecvHandle, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import GradientEdge

__all__ = ["Event", "ForwardFn", "LossFn", "RankExecutor", "StepOptions"]

LossFn: TypeAlias = "Callable[[Any], Any]"
"""Takes the last stage's output; gives (loss_sum, num_tokens) or (loss_sum, num_tokens, report)."""

ForwardFn: TypeAlias = "Callable[[int, int, Any, bool | None], tuple[Any, LossFn | None]]"
"""Runs a chunk: (chunk, unit, input or None, recompute or None) -> (output, loss_func)."""

_Run: TypeAlias = "Callable[[Instruction, Any], None]"
"""Takes an op and its input: what a stage handed on, or None where that is data, loss or graph."""


class Event(NamedTuple):
    """One executed compute op, by the host's clock."""

    rank: int
    position: int
    """Place in the rank's order."""
    op: str
    """The op in the plan's words, such as `2F0`."""
    start: float
    """Seconds, `time.perf_counter`, after the wait for its input."""
    end: float


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What all ranks of a step share."""

    loss_scale: float = 1.0
    """Seed of every microbatch's backward."""
    boundary: Boundary = UNKNOWN_SHAPES
    record: bool = False
    """Whether to record events."""
    keep_outputs: bool = False
    """Whether to keep the last stage's outputs."""
    on_gradients_ready: Callable[[int, int], None] | None = None
    """Called with (rank, chunk) right after the chunk's last backward of the step."""
    recomputes_once: bool = False
    """Whether forwards that the mask asks for are run again by `recompute.recomputed`."""
    order: str = "plan"
    """`"plan"`: as planned. `"ready"`: ops whose input has arrived first (`runtime.ready`)."""


class RankExecutor:
    """The state of one rank during one step."""

    def __init__(
        self,
        program: Program,
        transport: Transport,
        forward: ForwardFn,
        options: StepOptions,
        *,
        training: bool,
    ) -> None:
        self.program = program
        self.boundary = options.boundary
        self.rank = program.rank
        # By unit.
        self.losses: dict[int, Tensor] = {}
        self.num_tokens: dict[int, Any] = {}
        self.reports: dict[int, Any] = {}
        self.outputs: dict[int, Tensor] = {}
        self.events: list[Event] = []
        self.at: Instruction | None = None
        self.waiting_for: RecvHandle | None = None
        self._transport = transport
        self._chunk_forward = forward
        self._options = options
        self._training = training
        self._shape_of = options.boundary.lookup()
        self._dtype = options.boundary.dtype
        self._seed: tuple[Tensor, ...] = ()
        cells = program.num_cells
        # Tables by cell. A slot is emptied by the one op that reads it.
        self._inbox: list[Any] = [None] * cells  # activation, or the receive that brings it
        self._gradients: list[Any] = [None] * cells  # output gradient, or its receive
        self._inputs: list[Any] = [None] * cells  # leaves that get gradients, until the backward
        self._edges: list[Any] = [None] * cells  # where the backward goes in
        self._outbox: list[Any] = [None] * cells  # result that a SEND will take

    def run(self) -> Iterator[RecvHandle]:
        """Run the program, yielding a receive when it can't go on before that has arrived.

        Whoever drives the generator resumes it when the yielded handle can be taken.
        """
        transport, dtype = self._transport, self._options.boundary.dtype
        shape_of = self._shape_of
        announce = shape_of is None
        inbox, gradients, outbox = self._inbox, self._gradients, self._outbox
        compute = self._computations()
        for op in self.program.instructions:
            self.at = op
            action = op.action
            if action == SEND:
                transport.send(op.channel, op.key, outbox[op.cell], announce=announce)  # type: ignore[arg-type]
                outbox[op.cell] = None
                continue
            table = inbox if op.reads_inbox else gradients
            if action == RECV:
                shape = shape_of(op.key) if shape_of is not None else None
                table[op.cell] = transport.recv(op.channel, op.key, shape, dtype)  # type: ignore[arg-type]
                continue
            source = table[op.cell]
            table[op.cell] = None
            if op.received:
                self.waiting_for = source
                if not source.ready():
                    yield source
                self.waiting_for = None
                source = source.take()
            compute[action](op, source)
        self.at = None

    def _computations(self) -> tuple[_Run, ...]:
        """What runs each kind of compute op, by action. To be held while running, not longer.

        They hold the executor: kept in it, it would live until cycles are collected, and the
        caller's batch with it.
        """
        runs: list[_Run] = [self._forward, self._backward, self._backward, self._weight_half]
        if self._options.record:
            runs = [partial(self._recorded, run) for run in runs]
        if _profiler_enabled():
            runs = [partial(self._named, run) for run in runs]
        return tuple(runs)

    def _recorded(self, run: _Run, op: Instruction, source: Any) -> None:
        start = perf_counter()
        run(op, source)
        self.events.append(Event(self.rank, op.position, op.text, start, perf_counter()))

    def _named(self, run: _Run, op: Instruction, source: Any) -> None:
        with record_function(f"rank {self.rank} {op.text}"):
            run(op, source)

    def _forward(self, op: Instruction, stage_input: Any) -> None:
        if stage_input is not None and self._training:
            self._inputs[op.cell] = _open(stage_input)
        plain = stage_input is None or is_plain(stage_input)
        shared = () if plain or not self._training else _unguarded(stage_input)
        output, loss_func = self._chunk_forward(op.chunk, op.unit, stage_input, op.recompute)
        if shared and any(leaf._version != version for leaf, version in shared):
            raise BoundaryError(
                with_hint(
                    f"rank {self.rank}, {op.text}: the chunk wrote to its input, which belongs to "
                    "the stage before",
                    "begin with x = x.clone()",
                )
            )
        if op.inner_end:
            self._take_loss(op, output, loss_func)
        elif op.hand_to >= 0:
            self._inbox[op.hand_to] = self._hand_over(op, output)
        else:
            self._outbox[op.cell] = self._hand_over(op, output)

    def _hand_over(self, op: Instruction, output: Any) -> Any:
        """Keep the output's place in the graph; give what the next stage gets."""
        self._check_boundary(op, output)
        if is_plain(output):
            if self._training:
                self._edges[op.cell] = gradient_edges((output,))
            return output.detach()
        if self._training:
            self._edges[op.cell] = gradient_edges(leaves_of(output))
        return map_leaves(_detached, output)

    def _take_loss(self, op: Instruction, output: Any, loss_func: LossFn | None) -> None:
        unit = op.unit
        if self._options.keep_outputs:
            self.outputs[unit] = map_leaves(Tensor.detach, output)
        if loss_func is None:
            if self._training:
                raise TypeError(
                    with_hint(
                        f"the last stage gave no loss function for {op.text}",
                        "return (output_tensor, loss_func) from forward_step_func",
                    )
                )
            return
        loss, *rest = _as_tuple(loss_func(output))
        self._check_loss(op, loss)
        self.losses[unit] = loss.detach()
        self.num_tokens[unit] = rest[0] if rest else 1  # on a GPU int() would wait
        if len(rest) > 1:
            self.reports[unit] = rest[1]
        if self._training:
            # One number: kept itself, as the engine takes it faster than its edge.
            self._edges[op.cell] = (loss,) if loss.requires_grad else ()
            if not self._seed or self._seed[0].shape != loss.shape:
                self._seed = (torch.full_like(loss, self._options.loss_scale),)

    def _check_loss(self, op: Instruction, loss: Any) -> None:
        """Refuse what is no number, and a number that would train nothing."""
        if not isinstance(loss, Tensor):
            what = f"is of type {type(loss).__name__}, not a tensor of one number"
        elif loss.numel() != 1:
            what = f"has shape {tuple(loss.shape)}, not one number"
        elif self._training and not loss.requires_grad and self._inputs[op.cell] != ():
            # Of a structure, no leaf may want a gradient: then there is nothing to train before.
            what = "has no gradient: nothing would be trained"
        else:
            return
        raise BoundaryError(
            with_hint(
                f"the loss of {op.text} {what}",
                "give the sum of the microbatch's token losses, neither detached nor made anew",
            )
        )

    def _backward(self, op: Instruction, gradient: Any) -> None:
        cell = op.cell
        edges, self._edges[cell] = self._edges[cell], None
        inputs, self._inputs[cell] = self._inputs[cell], None
        leaves = () if inputs is None else _as_tuple(inputs)
        incoming = self._seed if op.outer else _as_tuple(gradient)
        self._differentiate(op, edges, incoming, leaves)
        if op.last_of_chunk:
            self._gradients_ready(op)
        if op.inner_end:
            return
        result: Any = tuple(map(input_gradient, leaves))
        if isinstance(inputs, Tensor):
            (result,) = result
        if op.hand_to >= 0:
            self._gradients[op.hand_to] = result
        else:
            self._outbox[cell] = result

    def _differentiate(
        self,
        op: Instruction,
        edges: Sequence[GradientEdge | Tensor],
        gradients: Sequence[Tensor],
        leaves: Sequence[Tensor],
    ) -> None:
        """Run the engine: all of it, or towards `leaves` with a rest that waits for `W`."""
        if op.action != RUN_INPUT_HALF:
            full_backward(edges, gradients)
            return
        # torch's checkpoint runs the forward again for every run of the engine: one must do.
        whole = bool(op.recompute) and not self._options.recomputes_once
        halves = SplitBackward(edges, leaves, whole_first=whole)
        halves.input_half(gradients)
        self._edges[op.cell] = halves

    def _weight_half(self, op: Instruction, _: None) -> None:
        halves, self._edges[op.cell] = self._edges[op.cell], None
        halves.weight_half()
        if op.last_of_chunk:
            self._gradients_ready(op)

    def _gradients_ready(self, op: Instruction) -> None:
        if self._options.on_gradients_ready is not None:
            self._options.on_gradients_ready(self.rank, op.chunk)

    def _check_boundary(self, op: Instruction, output: Any) -> None:
        """Refuse an output that the next stage does not expect."""
        if not isinstance(output, Tensor):
            if self._shape_of is None and isinstance(output, tuple | list | dict):
                return
            known = "one tensor of known shape"
            raise BoundaryError(
                with_hint(
                    f"rank {self.rank}, {op.text}: the output is a {type(output).__name__}, but "
                    f"the agreed boundary is {'tensors' if self._shape_of is None else known}",
                    "give tensors, alone or in tuples, lists and dicts; leave boundary_shape "
                    "None for these: they travel with their shapes",
                )
            )
        if self._shape_of is None:
            if output.is_floating_point():
                return
            expected = "a floating-point tensor, or a tuple, list or dict"
        else:
            shape = self._shape_of(op.key)
            if output.dtype is self._dtype and output.shape == shape:
                return
            expected = f"shape {tuple(shape)}, {self._dtype}"
        raise BoundaryError(
            with_hint(
                f"rank {self.rank}, {op.text}: the output has shape {tuple(output.shape)}, "
                f"{output.dtype}, but the agreed boundary is {expected}",
                "give the boundary's true shape and dtype, one shape a microbatch if they differ, "
                "or none (boundary_shape=None, variable_shapes=True) to send it with the data",
            )
        )

    def report(self) -> str:
        """Say where the rank stands and what it waits for."""
        op = self.at
        total = len(self.program.instructions)
        if op is None:
            return f"rank {self.rank} has finished its {total} ops"
        place = f"rank {self.rank} stands at {op.text} (op {op.position} of {total})"
        if self.waiting_for is None:
            return f"{place}, computing"
        forward = op.action == RUN_FORWARD
        what, word = ("the activation", "RECV_F") if forward else ("the gradient", "RECV_B")
        peer = self.waiting_for.channel.source
        piece = f", piece {op.piece}" if self.program.num_seq_pieces > 1 else ""
        return (
            f"{place} and waits for {what} of microbatch {op.microbatch}{piece} "
            f"({op.stage}{word}{op.unit}) from rank {peer}"
        )


def _unguarded(structure: Any) -> tuple[tuple[Tensor, int], ...]:
    """Leaves that autograd lets a chunk write to, with their versions.

    In one process they are the other stage's own memory, such as a mask that it keeps.
    """
    return tuple((x, x._version) for x in leaves_of(structure) if not x.requires_grad)


def _open(stage_input: Any) -> Tensor | tuple[Tensor, ...]:
    """The leaves of an input that get a gradient.

    That is the one tensor, or those of a structure that had one in the stage before.
    """
    if is_plain(stage_input):
        tensor: Tensor = stage_input
        return tensor.requires_grad_()
    return tuple(leaf for leaf in leaves_of(stage_input) if leaf.requires_grad)


def _detached(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
