"""`Pipeline`: a plan, any modules, a loss: the runtime's short face."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeloom.runtime.batches import (
    SequenceDim,
    require_pairs,
    split_batch,
    split_named,
    split_sequences,
)
from pipeloom.runtime.chunks import place_chunks
from pipeloom.runtime.data_parallel import sum_tokens
from pipeloom.runtime.errors import PipelineError, with_hint
from pipeloom.runtime.evaluation import evaluation_plan
from pipeloom.runtime.executor import ForwardFn, LossFn, StepOptions
from pipeloom.runtime.gradients import TiedWeight, clip_grad_norm
from pipeloom.runtime.local import LocalTransport
from pipeloom.runtime.program import CompiledPlan, compile_plan
from pipeloom.runtime.recompute import recomputed
from pipeloom.runtime.replicas import replica_weights
from pipeloom.runtime.step import StepResult, entering, run_step
from pipeloom.runtime.structure import call_module
from pipeloom.runtime.transport import Boundary, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from pipeloom import Plan

__all__ = ["Pipeline"]


class Pipeline:
    """Runs the steps of a plan on modules of the caller's.

    The loss rule: `loss_fn` gives the sum over a microbatch; the step's loss is the sum over
    microbatches divided by `count` summed over the step's targets (of all data-parallel ranks), and
    gradients are those of that loss. They add up over steps until the caller zeroes them.

    Args:
        plan: What to run.
        chunks: The modules: all stages in order, or a mapping from rank to its chunks, or this
            rank's chunks. What a chunk gives, the next one takes: a tensor, or a tuple
            (positional arguments) or dict (keyword arguments) of tensors, lists and so on.
        loss_fn: (output, target) -> sum of the microbatch's losses, one number.
        transport: None: all ranks in this process.
        boundary_shape: Shape of the tensors between stages, or one shape a microbatch, or a
            function of (stage, microbatch). None: shapes are sent with the tensors.
        boundary_dtype: Their dtype.
        count: target -> number of losses in the sum. Default: its number of elements.
        data_parallel_group: Ranks that run the same stage on other data.
        fingerprint: What all ranks must agree on beside plan, shapes and versions, such as the
            layout and the model's sizes, by name.
        order: `"plan"`: each rank runs its ops as planned. `"ready"`: the plan is a hint; a rank
            runs the first op whose input has arrived, within the plan's memory (docs/runtime.md).
            Losses and gradients are the same.
        sequence_dim: For plans that cut sequences: dimension of the sequence in the batch, the
            targets and the stage inputs; see `split_sequences`.

    Examples:
        >>> import pipeloom as pl, torch
        >>> _ = torch.manual_seed(0)
        >>> front, back = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        >>> plan = pl.plan("1f1b", pp=1, num_microbatches=2)
        >>> sum_of_squares = lambda output, target: (output - target).square().sum()
        >>> pipeline = Pipeline(plan, [torch.nn.Sequential(front, back)], sum_of_squares)
        >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
        >>> loss = pipeline.step(x, y).loss
        >>> torch.allclose(loss, (back(front(x)) - y).square().mean())
        True
    """

    def __init__(
        self,
        plan: Plan,
        chunks: Mapping[int, Sequence[nn.Module]] | Sequence[nn.Module],
        loss_fn: Callable[[Tensor, Any], Tensor],
        *,
        transport: Transport | None = None,
        boundary_shape: Any = None,
        boundary_dtype: torch.dtype = torch.float32,
        count: Callable[[Any], int] = torch.numel,
        data_parallel_group: ProcessGroup | None = None,
        fingerprint: Mapping[str, str] | None = None,
        order: str = "plan",
        sequence_dim: SequenceDim = 1,
    ) -> None:
        if order not in ("plan", "ready"):
            raise PipelineError(
                with_hint(f"order={order!r} is unknown", 'give order="plan" or order="ready"')
            )
        if not hasattr(plan, "stages"):
            raise PipelineError(
                with_hint(
                    f"plan is of type {type(plan).__name__}, not a plan",
                    'make one: pipeloom.plan("1f1b", pp=2, num_microbatches=4)',
                )
            )
        self.order = order
        self.transport: Transport = LocalTransport(plan.pp) if transport is None else transport
        self.plan = plan
        with entering(self.transport):
            if self.transport.pp != plan.pp:
                ranks = self.transport.pp
                raise PipelineError(
                    with_hint(
                        f"the plan has pp={plan.pp}, but the transport has {ranks} ranks",
                        "plan for as many ranks as the process group has",
                    )
                )
            self.chunks = place_chunks(plan, self.transport.local_ranks, chunks)
        self.loss_fn = loss_fn
        self.boundary = Boundary(boundary_shape, boundary_dtype)
        self.count = count
        self.data_parallel_group = data_parallel_group
        self.fingerprint = fingerprint
        self.sequence_dim = sequence_dim

    def parameters(self) -> Iterable[nn.Parameter]:
        """Parameters of this process's chunks, each once, for an optimizer."""
        return nn.ModuleList(
            [chunk for rank in sorted(self.chunks) for chunk in self.chunks[rank]]
        ).parameters()

    def step(
        self,
        batch: Any = None,
        targets: Any = None,
        *,
        loss_scale: float | None = None,
        stage_inputs: Mapping[int, Mapping[str, Any]] | None = None,
        plan: Plan | None = None,
        record: bool = False,
        on_gradients_ready: Callable[[int, int], None] | None = None,
    ) -> StepResult:
        """Run one training step: all forwards and backwards, no optimizer.

        Args:
            batch: Input of the first stage: a tensor or a dict of tensors, cut along the first
                dimension, or a list of microbatches, or of their pieces. Ranks without a first
                stage pass None.
            targets: Likewise for the loss; ranks without a last stage pass None.
            loss_scale: In place of 1 / count, for instance multiplied by a gradient scaler's.
            stage_inputs: Stage -> keyword arguments of its chunk beside what the stage before
                gives, such as a mask: tensors that are cut like the batch, or lists of one a
                microbatch. A rank passes those of its own stages.
            plan: For this step, in place of the pipeline's: another number of microbatches or
                another schedule over the same stages.
            record: Whether to record when each op ran.
            on_gradients_ready: Called with (rank, chunk) after the chunk's last backward, to start
                its reduction over data-parallel ranks.

        Returns:
            The step's loss and each microbatch's.

        Raises:
            PipelineTimeout: A wait ran past its limit.
            PeerLost: Another rank ended.
        """
        with entering(self.transport):
            compiled = self._compile(plan or self.plan, forward_only=False)
            if compiled.forward_only:
                raise PipelineError(
                    with_hint(
                        f"the plan {compiled.plan.schedule} has no backward: a step trains nothing",
                        "call evaluate, or plan a schedule with backwards, such as 1f1b",
                    )
                )
            parts, goals = self._parts(compiled, batch, targets)
            if loss_scale is None:
                loss_scale = self._scale(goals)
        options = StepOptions(
            loss_scale=loss_scale,
            boundary=self.boundary,
            record=record,
            on_gradients_ready=on_gradients_ready,
            order=self.order,
            recomputes_once=True,
        )
        return self._run(compiled, options, parts, goals, stage_inputs)

    def evaluate(
        self,
        batch: Any = None,
        targets: Any = None,
        *,
        num_microbatches: int | None = None,
        stage_inputs: Mapping[int, Mapping[str, Any]] | None = None,
        keep_outputs: bool = False,
    ) -> StepResult:
        """Run forwards only, without gradients; every rank must call it.

        Args:
            batch: As for `step`.
            targets: As for `step`. None on the last stage: no loss, for use with keep_outputs.
            num_microbatches: Evaluation's own number. None: the plan's. With another, two
                replicas are not used: the first one does all.
            stage_inputs: As for `step`.
            keep_outputs: Whether to return the last stage's outputs.

        Returns:
            Loss and outputs; training's gradients are untouched.
        """
        with entering(self.transport):
            plan = self.plan
            if num_microbatches is not None and num_microbatches != plan.num_microbatches:
                plan = evaluation_plan(plan, num_microbatches)
            compiled = self._compile(plan, forward_only=True)
            parts, goals = self._parts(compiled, batch, targets, needs_targets=not keep_outputs)
            loss_scale = self._scale(goals)
        options = StepOptions(
            loss_scale=loss_scale,
            boundary=self.boundary,
            keep_outputs=keep_outputs,
            order=self.order,
        )
        with torch.no_grad():
            return self._run(compiled, options, parts, goals, stage_inputs)

    def clip_grad_norm(self, max_norm: float, *, tied: Iterable[TiedWeight] = ()) -> Tensor:
        """Scale all stages' gradients so that their common 2-norm is at most `max_norm`.

        Every rank must call it. Replicas count once.

        Args:
            max_norm: The bound.
            tied: Weights that several ranks hold copies of, their gradients reduced before.

        Returns:
            The norm before clipping, 0-dim, the same on every rank.
        """
        own = {
            rank: [p for chunk in chunks for p in chunk.parameters()]
            for rank, chunks in self.chunks.items()
        }
        copies = replica_weights(self.plan, self.chunks)
        return clip_grad_norm(own, max_norm, self.transport, tied=[*tied, *copies])

    def _compile(self, plan: Plan, *, forward_only: bool) -> CompiledPlan:
        stages = list(self.plan.stages)
        if list(plan.stages) != stages[: plan.num_stages]:
            raise PipelineError(
                with_hint(
                    f"the plan {plan.schedule} places stages at {list(plan.stages)}, but the "
                    f"pipeline has them at {stages}: (rank, chunk)",
                    "give a plan with the pipeline's pp, vp and placement",
                )
            )
        return compile_plan(
            plan,
            self.transport.local_ranks,
            backend=self.transport.backend,
            forward_only=forward_only,
        )

    def _parts(
        self, compiled: CompiledPlan, batch: Any, targets: Any, *, needs_targets: bool = True
    ) -> tuple[list[Any], list[Any] | None]:
        parts = [None] * compiled.num_units
        if any(program.hosts_input for program in compiled.programs.values()):
            if batch is None:
                raise PipelineError(
                    with_hint("batch is missing on the rank of the first stage", "pass batch there")
                )
            parts = self._units(compiled, batch, "batch")
        goals = None
        if any(program.hosts_loss for program in compiled.programs.values()):
            if targets is not None:
                goals = self._units(compiled, targets, "targets")
            elif needs_targets:
                raise PipelineError(
                    with_hint(
                        "targets is missing on the rank of the last stage", "pass targets there"
                    )
                )
        if goals is not None and batch is not None:
            require_pairs(batch, targets, compiled.num_microbatches)
        return parts, goals

    def _units(self, compiled: CompiledPlan, value: Any, name: str) -> list[Any]:
        """Microbatches, or their pieces where the plan cuts sequences."""
        pieces = compiled.num_seq_pieces
        if pieces > 1 and isinstance(value, list | tuple) and len(value) == compiled.num_units:
            return list(value)
        parts = split_batch(value, compiled.num_microbatches, name)
        return split_sequences(parts, pieces, self.sequence_dim, name)

    def _scale(self, goals: list[Any] | None) -> float:
        """1 / count of the step. Only ranks of the last stage use it."""
        if goals is None:
            return 1.0
        total = sum(map(self._count_of, goals))
        if self.data_parallel_group is not None:
            counts = torch.tensor([total], dtype=torch.int64)
            counts = counts.to(getattr(self.transport, "device", None))
            sum_tokens(counts, self.data_parallel_group, self.transport.timeout_s)
            total = int(counts)
        return 1.0 / max(total, 1)

    def _count_of(self, target: Any) -> int:
        try:
            counted = self.count(target)
        except TypeError as error:
            raise PipelineError(
                with_hint(
                    f"count fails on a target of type {type(target).__name__}: {error}",
                    "pass count=, which takes a target and gives the number of losses in its sum",
                )
            ) from error
        number = _whole_number(counted)
        if number is None:
            raise PipelineError(
                with_hint(
                    f"count gives {counted}, which is no number of losses",
                    "give a whole number; for weighted losses pass step(..., loss_scale=1 / "
                    "sum of weights)",
                )
            )
        return number

    def _run(
        self,
        compiled: CompiledPlan,
        options: StepOptions,
        parts: list[Any],
        goals: list[Any] | None,
        stage_inputs: Mapping[int, Mapping[str, Any]] | None,
    ) -> StepResult:
        places = list(compiled.plan.stages)
        with entering(self.transport):
            unknown = sorted(set(stage_inputs or {}) - set(range(len(places))))
            if unknown:
                raise PipelineError(
                    with_hint(
                        f"stage_inputs names stages {unknown}, but the plan has {len(places)}",
                        f"number stages from 0 to {len(places) - 1}",
                    )
                )
            extras = {}
            for stage, extra in (stage_inputs or {}).items():
                name = f"stage_inputs[{stage}]"
                named = split_named(extra, compiled.num_microbatches, name)
                extras[stage] = split_sequences(
                    named, compiled.num_seq_pieces, self.sequence_dim, name
                )
        forwards = {}
        for rank, chunks in self.chunks.items():
            own = {place[1]: extras.get(n) for n, place in enumerate(places) if place[0] == rank}
            forwards[rank] = self._forward_of(chunks, parts, goals, own)
        return run_step(
            compiled,
            self.transport,
            forwards,
            options,
            loss_scale=options.loss_scale,
            fingerprint=self.fingerprint,
            models=self.chunks,
        )

    def _forward_of(
        self,
        chunks: list[nn.Module],
        parts: list[Any],
        goals: list[Any] | None,
        extras: dict[int, list[Any] | None],
    ) -> ForwardFn:
        loss_fn, count = self.loss_fn, self._count_of

        def loss_of(target: Any, output: Any) -> tuple[Tensor, int]:
            return loss_fn(output, target), count(target)

        def forward(
            chunk: int, unit: int, stage_input: Any, recompute: bool | None
        ) -> tuple[Any, LossFn | None]:
            given = parts[unit] if stage_input is None else stage_input
            module, own = chunks[chunk], extras[chunk]
            extra = {} if own is None else own[unit]
            if recompute:
                output = recomputed(call_module, module, given, extra)
            else:
                output = call_module(module, given, extra)
            if goals is None:
                return output, None
            return output, partial(loss_of, goals[unit])

        return forward


def _whole_number(value: Any) -> int | None:
    """A count as an integer; None if it is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if number == value and number >= 0 else None
