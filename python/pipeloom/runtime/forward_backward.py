"""One step with a caller's `forward_step_func`, chunks and data iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.runtime.backward import full_backward, gradient_edges, input_gradient
from pipeloom.runtime.batches import piece_sizes
from pipeloom.runtime.errors import PipelineError, with_hint
from pipeloom.runtime.executor import LossFn, StepOptions
from pipeloom.runtime.local import LocalTransport
from pipeloom.runtime.pipeline import place_chunks
from pipeloom.runtime.program import compile_plan
from pipeloom.runtime.step import StepResult, run_step
from pipeloom.runtime.transport import Boundary, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pipeloom import Plan

__all__ = ["backward_step", "forward_backward", "forward_step", "forward_step_helper"]


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: nn.Module,
    input_tensor: Tensor | None,
    checkpoint_activations_microbatch: bool | None = None,
) -> tuple[Tensor, LossFn | None]:
    """Run one chunk forward on one microbatch.

    Args:
        forward_step_func: (data_iterator, model[, checkpoint_activations_microbatch]) ->
            (output_tensor, loss_func). The third argument is passed if it is not None.
        data_iterator: The chunk's own iterator.
        model: The chunk; its `set_input_tensor` takes the previous stage's output.
        input_tensor: Previous stage's output. None on the first stage.
        checkpoint_activations_microbatch: Whether to keep only the input and run forward again in
            the backward. None: the plan has no say.

    Returns:
        The output, and the loss function that the last stage uses.
    """
    if input_tensor is not None:
        _set_input_tensor(model)(input_tensor)
    if checkpoint_activations_microbatch is None:
        result = forward_step_func(data_iterator, model)
    else:
        result = forward_step_func(data_iterator, model, checkpoint_activations_microbatch)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            with_hint(
                f"forward_step_func gave {type(result).__name__}, not a pair",
                "return (output_tensor, loss_func)",
            )
        )
    return result


def _set_input_tensor(model: nn.Module) -> Callable[[Tensor], None]:
    inner: Any = model
    while not hasattr(inner, "set_input_tensor"):
        if not hasattr(inner, "module"):  # data-parallel wrappers hold the chunk there
            raise PipelineError(
                with_hint(
                    f"the chunk {type(model).__name__} has no set_input_tensor",
                    "define set_input_tensor(tensor) on it, or use pipeloom.runtime.Pipeline, "
                    "which calls chunks with their input",
                )
            )
        inner = inner.module
    method: Callable[[Tensor], None] = inner.set_input_tensor
    return method


def forward_step_helper(
    forward_step_func: Callable[..., Any],
    model: Sequence[nn.Module],
    data_iterator: Sequence[Any],
    chunk_id: int,
    unit: int,  # noqa: ARG001 - the iterator counts
    input_tensor: Tensor | None,
    checkpoint_activations_microbatch: bool | None,
) -> tuple[Tensor, LossFn | None]:
    """Run a forward of the plan: pick `model[chunk_id]` and `data_iterator[chunk_id]`."""
    return forward_step(
        forward_step_func,
        data_iterator[chunk_id],
        model[chunk_id],
        input_tensor,
        checkpoint_activations_microbatch,
    )


def backward_step(
    input_tensor: Tensor | None, output_tensor: Tensor, output_tensor_grad: Tensor
) -> Tensor | None:
    """Run a full backward of one chunk on one microbatch, by hand.

    Args:
        input_tensor: The chunk's input, a leaf that requires a gradient. None on the first stage.
        output_tensor: Its output, or its loss on the last stage.
        output_tensor_grad: Gradient of that.

    Returns:
        Gradient of the input, of its shape; None on the first stage.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> backward_step(x, 3 * x, torch.ones(2))
        tensor([3., 3.])
    """
    full_backward(gradient_edges([output_tensor]), [output_tensor_grad])
    return None if input_tensor is None else input_gradient(input_tensor)


class _Reordered:
    """An iterator whose items are asked for in another order than its own.

    A plan may run a chunk's microbatches in any order; items are read ahead and kept until then.
    """

    def __init__(self, iterator: Iterator[Any], order: Sequence[int]) -> None:
        self._iterator = iterator
        self._order = iter(order)
        ascending = sorted(order)
        self._place = {microbatch: place for place, microbatch in enumerate(ascending)}
        self._ahead: dict[int, Any] = {}
        self._read = 0

    def __iter__(self) -> _Reordered:
        return self

    def __next__(self) -> Any:
        place = self._place[next(self._order)]
        while self._read <= place:
            self._ahead[self._read] = next(self._iterator)
            self._read += 1
        return self._ahead.pop(place)


def _as_list(value: Any, length: int, name: str) -> list[Any]:
    """One entry a chunk: a list as it is, a single value for a single chunk."""
    if value is None:
        return [None] * length
    if isinstance(value, list | tuple | nn.ModuleList):
        if len(value) != length:
            raise PipelineError(
                with_hint(
                    f"{name} has {len(value)} entries for {length} chunks",
                    f"give {name} one entry a chunk",
                )
            )
        return list(value)
    if length != 1:
        raise PipelineError(
            with_hint(f"{name} is one for {length} chunks", "give a list: each chunk reads its own")
        )
    return [value]


@lru_cache(maxsize=64)
def _plan(
    schedule: str, pp: int, vp: int, microbatches: int, group: int | None, kept: int | None
) -> Plan:
    optional: dict[str, Any] = {}
    if group is not None:
        optional["microbatch_group_size"] = group
    if kept is not None:
        optional["num_microbatches_with_partial_activation_checkpoints"] = kept
    return pl.plan(schedule, pp=pp, vp=vp, num_microbatches=microbatches, **optional)


@lru_cache(maxsize=1)
def _torch_transport() -> Transport:
    from pipeloom.runtime.distributed import TorchTransport

    return TorchTransport()


def _default_transport(model: Any) -> Transport:
    if isinstance(model, Mapping):
        return LocalTransport(len(model))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _torch_transport()
    return LocalTransport(1)


def _boundary(
    plan: Plan,
    models: Mapping[int, Sequence[nn.Module]],
    seq_length: int | None,
    micro_batch_size: int | None,
    hidden_size: int | None,
    dtype: torch.dtype | None,
) -> Boundary:
    """[sequence, batch, hidden], with what is not given taken from the chunks' config.

    Sequences that the plan cuts are cut as `piece_sizes` says.
    """
    chunk: Any = next(iter(models.values()))[0]
    while not hasattr(chunk, "config") and hasattr(chunk, "module"):
        chunk = chunk.module
    config = getattr(chunk, "config", None)
    hidden_size = hidden_size or getattr(config, "hidden_size", None)
    if dtype is None:
        dtype = getattr(config, "pipeline_dtype", None) or getattr(config, "params_dtype", None)
    given = {
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "hidden_size": hidden_size,
    }
    missing = [name for name, size in given.items() if size is None]
    if missing:
        raise PipelineError(
            with_hint(
                f"the boundary's shape [sequence, batch, hidden] is not known: {missing} missing",
                "give them, or variable_shapes=True to send shapes with the data",
            )
        )
    sizes = piece_sizes(int(seq_length or 0), plan.num_seq_pieces)
    shapes = [(size, int(micro_batch_size or 0), int(hidden_size or 0)) for size in sizes]
    if len(set(shapes)) == 1:
        return Boundary(shapes[0], dtype or torch.float32)
    return Boundary(shapes * plan.num_microbatches, dtype or torch.float32)


def forward_backward(
    schedule: str,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int | None,
    micro_batch_size: int | None,
    forward_only: bool = False,
    plan: Plan | None = None,
    transport: Transport | None = None,
    loss_scale: float | None = None,
    total_num_tokens: int | None = None,
    hidden_size: int | None = None,
    dtype: torch.dtype | None = None,
    variable_shapes: bool = False,
    microbatch_group_size: int | None = None,
    num_microbatches_with_partial_activation_checkpoints: int | None = None,
    data_parallel_group: ProcessGroup | None = None,
    on_gradients_ready: Callable[[int, int], None] | None = None,
    record: bool = False,
    fingerprint: Mapping[str, str] | None = None,
) -> StepResult:
    """Run one step of a schedule.

    Args:
        schedule: Name of the schedule to plan, unless `plan` is given.
        forward_step_func: Runs one chunk; see `forward_step`. On the last stage its loss function
            gives (loss_sum, num_tokens) or (loss_sum, num_tokens, report).
        data_iterator: One iterator a chunk (a list), or a mapping from rank to that. Each forward
            of a chunk reads its own iterator, in the order of the microbatches. Where the plan
            cuts sequences, items are pieces, cut into `runtime.batches.piece_sizes`.
        model: The chunks of this rank, or a mapping from rank to chunks: all ranks run here.
        num_microbatches: Number of microbatches of the step.
        seq_length: First dimension of the tensors between stages; of whole sequences where the
            plan cuts them.
        micro_batch_size: Second dimension of the tensors between stages.
        forward_only: Evaluate: no backwards, no gradients.
        plan: Run this one. None: plan `schedule`; plans are kept from call to call.
        transport: None: in this process if `model` is a mapping, else torch.distributed if it is
            initialised.
        loss_scale: Seed of every microbatch's backward.
        total_num_tokens: Tokens of the step over all data-parallel ranks; loss_scale is its
            inverse. With neither, tokens are counted, and gradients scaled at the end.
        hidden_size: Third dimension. None: the chunk's `config.hidden_size`.
        dtype: Of the tensors between stages. None: the config's, else float32.
        variable_shapes: Whether microbatches differ in shape: each tensor is preceded by its own.
        microbatch_group_size: For the interleaved schedule.
        num_microbatches_with_partial_activation_checkpoints: Asks for a recompute mask.
        data_parallel_group: Ranks over which tokens are counted.
        on_gradients_ready: Called with (rank, chunk) after the chunk's last backward.
        record: Whether to record when each op ran.
        fingerprint: What all ranks must agree on beside plan, shapes and versions, by name.

    Returns:
        The step's loss, and each microbatch's loss sum, tokens and report.

    Raises:
        PipelineTimeout: A wait ran past its limit.
        PeerLost: Another rank ended.
    """
    transport = _default_transport(model) if transport is None else transport
    if plan is None:
        first = next(iter(model.values())) if isinstance(model, Mapping) else model
        vp = len(first) if isinstance(first, list | tuple | nn.ModuleList) else 1
        plan = _plan(
            schedule,
            transport.pp,
            vp,
            num_microbatches,
            microbatch_group_size,
            num_microbatches_with_partial_activation_checkpoints,
        )
    if (plan.pp, plan.num_microbatches) != (transport.pp, num_microbatches):
        raise PipelineError(
            with_hint(
                f"the plan has pp={plan.pp}, num_microbatches={plan.num_microbatches}, but the "
                f"call has pp={transport.pp}, num_microbatches={num_microbatches}",
                "plan for this step's numbers",
            )
        )
    ranks = transport.local_ranks
    by_rank = model if isinstance(model, Mapping) else {ranks[0]: model}
    lists = {
        rank: [chunks]
        if isinstance(chunks, nn.Module) and not isinstance(chunks, nn.ModuleList)
        else list(chunks)
        for rank, chunks in by_rank.items()
    }
    models = place_chunks(plan, ranks, lists)
    iterators = data_iterator if isinstance(data_iterator, Mapping) else {ranks[0]: data_iterator}
    compiled = compile_plan(plan, ranks, backend=transport.backend, forward_only=forward_only)
    forwards = {}
    for rank, program in compiled.programs.items():
        own = _as_list(iterators.get(rank), len(models[rank]), "data_iterator")
        for chunk, order in program.chunk_order.items():
            if own[chunk] is not None and list(order) != sorted(order):
                own[chunk] = _Reordered(iter(own[chunk]), order)
        forwards[rank] = partial(forward_step_helper, forward_step_func, models[rank], own)
    if loss_scale is None and total_num_tokens is not None:
        loss_scale = 1.0 / max(total_num_tokens, 1)
    options = StepOptions(
        loss_scale=1.0 if loss_scale is None else loss_scale,
        boundary=Boundary(None)
        if variable_shapes or plan.num_stages == 1
        else _boundary(plan, models, seq_length, micro_batch_size, hidden_size, dtype),
        record=record,
        on_gradients_ready=on_gradients_ready,
    )
    with torch.no_grad() if forward_only else torch.enable_grad():
        return run_step(
            compiled,
            transport,
            forwards,
            options,
            loss_scale=loss_scale,
            fingerprint=fingerprint,
            models=models,
            data_parallel_group=data_parallel_group,
        )
