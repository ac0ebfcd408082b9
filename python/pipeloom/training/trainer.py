"""The state of a run in one process: a step, an evaluation, a checkpoint, a resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import pipeloom
from pipeloom import ConfigError
from pipeloom.model.builders import core_transformer_config_from_args
from pipeloom.training import checkpoint
from pipeloom.training.data import Microbatch, TokenDataset, microbatches
from pipeloom.training.errors import CheckpointError, DivergedError
from pipeloom.training.log import StepRecord
from pipeloom.training.measure import replay, work_and_waiting
from pipeloom.training.profiling import StepProfiler
from pipeloom.training.setup import all_chunks, parameters_of, setup_model_and_optimizer
from pipeloom.training.state import TrainState

if TYPE_CHECKING:
    from pathlib import Path

    from pipeloom.model.builders import ModelProvider
    from pipeloom.model.gpt_model import GPTModel
    from pipeloom.runtime.step import StepResult
    from pipeloom.training.arguments import TrainingArguments
    from pipeloom.training.interrupts import Interrupts
    from pipeloom.training.measure import OpEvent
    from pipeloom.training.session import Session

LossFunc = Callable[[Tensor], tuple[Tensor, int]]
ForwardStepFunc = Callable[..., tuple[Tensor, LossFunc | None]]


def loss_func(losses: Tensor) -> tuple[Tensor, int]:
    """Sum of the token losses `[batch, sequence]`, and how many they are."""
    return losses.sum(), losses.numel()


def forward_step(
    data_iterator: Iterator[Microbatch],
    model_chunk: GPTModel,
    checkpoint_activations_microbatch: bool | None = None,
) -> tuple[Tensor, LossFunc]:
    """Runs one chunk on its next microbatch.

    Args:
        data_iterator: The chunk's own; each chunk reads every microbatch, or every piece.
        model_chunk: Where the runtime has set the input tensor.
        checkpoint_activations_microbatch: Whether to store only the chunk's input.

    Returns:
        The chunk's output, and what turns the last stage's into loss sum and token count.
    """
    batch = next(data_iterator)
    output = model_chunk(
        batch.tokens,
        batch.labels,
        dropout_key=(batch.step, batch.number, batch.start),
        checkpoint_activations=bool(checkpoint_activations_microbatch),
    )
    return output, loss_func


class Trainer:
    """The state of a run in this process."""

    def __init__(
        self,
        args: TrainingArguments,
        session: Session,
        provider: ModelProvider,
        forward_step_func: ForwardStepFunc,
        *,
        interrupts: Interrupts,
        train_data: TokenDataset,
        valid_data: TokenDataset,
    ) -> None:
        """Builds the model, its optimizer, and the plans of training and evaluation."""
        self.args, self.session, self.forward_step_func = args, session, forward_step_func
        self.train_data, self.valid_data = train_data, valid_data
        self.interrupts = interrupts
        self.config = core_transformer_config_from_args(args)
        self.model, self.optimizer, self.opt_param_scheduler = setup_model_and_optimizer(
            provider, args, local_ranks=session.transport.local_ranks, device=session.device
        )
        self.chunks = all_chunks(self.model)
        self.plan = args.make_plan()
        # What ranks must agree on besides the plan, or they would train different models.
        self.fingerprint = {
            "model": repr(self.config.architecture()),
            "layout": self.config.layout.to_string(),
            "data": f"{args.data_fingerprint}, seq_length={args.seq_length}, seed={args.seed}",
        }
        self.step = self.consumed_samples = 0
        # False while the optimizer writes: a checkpoint of that moment would be of no step.
        self.is_whole = True
        self.events: Sequence[OpEvent] = ()
        self.profiler = StepProfiler(self.plan, session) if args.profile else None
        self.last_checkpoint: Path | None = None
        self.tied = self._tied_weights()

    def _tied_weights(self) -> list[Any]:
        from pipeloom.runtime.gradients import TiedWeight

        layout, pp, vp = self.config.layout, self.args.pp, self.config.num_chunks
        places = [(rank, chunk) for rank in range(pp) for chunk in range(vp)]
        ranks = {r for r, c in places if layout.pre_process(r, c) or layout.post_process(r, c)}
        if self.config.untie_embeddings_and_output_weights or len(ranks) == 1:
            return []
        owners = {}
        for rank, chunks in self.model.items():
            for chunk in chunks:
                shared = getattr(chunk, "shared_embedding_or_output_weight", lambda: None)()
                if shared is not None:
                    owners[rank] = shared
        return [TiedWeight(owners, sorted(ranks))]

    def _run(
        self, plan: pipeloom.Plan, dataset: TokenDataset, *, first_sample: int, forward_only: bool
    ) -> tuple[float, Sequence[OpEvent]]:
        """One pass over a plan; the mean token loss, which every process learns.

        Data-parallel pipelines train on a part each, and evaluate on the same text each.
        """
        parts = self.session.pipelines[:1] if forward_only else self.session.pipelines
        results = {}
        for part in parts:
            results[part] = self._run_part(
                plan,
                dataset,
                first_sample=first_sample,
                part=0 if forward_only else part,
                forward_only=forward_only,
            )
        losses = {p: float(r.loss) for p, r in results.items() if r.loss is not None}
        known: dict[int, float] = {}
        for some in self.session.processes.gather(losses):
            known |= some
        # Each pipeline's share of the mean, added in their order; in evaluation each has it all.
        shares = [known[part] for part in sorted(known)][: 1 if forward_only else None]
        return sum(shares[1:], shares[0]), results[parts[0]].events

    def _run_part(
        self,
        plan: pipeloom.Plan,
        dataset: TokenDataset,
        *,
        first_sample: int,
        part: int,
        forward_only: bool,
    ) -> StepResult:
        """One pass of one data-parallel pipeline."""
        args, num_microbatches = self.args, plan.num_microbatches
        per_replica = num_microbatches // plan.num_replicas
        # Evaluation does without a second replica.
        vp = self.plan.vp
        model = {rank: own[: vp * plan.num_replicas] for rank, own in self.model.items()}

        def read(replica: int) -> Iterator[Microbatch]:
            return microbatches(
                dataset,
                step=self.step,
                first_sample=first_sample,
                num_microbatches=per_replica,
                micro_batch_size=args.micro_batch_size,
                first_number=part * num_microbatches + replica * per_replica,
                num_seq_pieces=plan.num_seq_pieces,
                device=self.session.device,
            )

        parts = 1 if forward_only else args.dp
        step = pipeloom.get_forward_backward_func(args.pp, args.vp)
        result: StepResult = step(
            forward_step_func=self.forward_step_func,
            data_iterator={
                rank: [read(chunk // vp) for chunk in range(len(own))]
                for rank, own in model.items()
            },
            model=model,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
            plan=plan if args.p2p == "auto" else plan.lower(args.p2p),
            transport=self.session.transport,
            total_num_tokens=(parts * num_microbatches * args.micro_batch_size * args.seq_length),
            record=True,
            fingerprint=self.fingerprint,
        )
        return result

    def train_step(self) -> StepRecord:
        """One optimizer step.

        Raises:
            DivergedError: Loss or gradient norm is not finite; the weights are as before.
        """
        from pipeloom.runtime.gradients import clip_grad_norm, reduce_tied_gradients
        from pipeloom.runtime.replicas import replica_weights

        args, transport = self.args, self.session.transport
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss, self.events = self._run(
            self.plan, self.train_data, first_sample=self.consumed_samples, forward_only=False
        )
        ran = time.perf_counter()
        if self.profiler is not None:
            self.profiler.take(self.step + 1, self.events)
        self._reduce_over_pipelines()
        reduce_tied_gradients(self.tied, transport)
        bound = args.clip_grad if args.clip_grad > 0 else math.inf
        parameters = {rank: parameters_of(own) for rank, own in self.model.items()}
        copies = replica_weights(self.plan, self.model)
        norm = float(clip_grad_norm(parameters, bound, transport, tied=[*self.tied, *copies]))
        for name, value in (("loss", loss), ("gradient norm", norm)):
            self._require_finite(name, value)
        lr = self.opt_param_scheduler.rate(self.step)
        with self.interrupts.hold():
            self.is_whole = False
            self.optimizer.step()
            self.opt_param_scheduler.step()
            self.step += 1
            self.consumed_samples += args.samples_per_step
            self.is_whole = True
        return StepRecord(
            self.step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens_per_s=args.tokens_per_step / (time.perf_counter() - begin),
            **self._idle(ran - begin),
        )

    def _reduce_over_pipelines(self) -> None:
        """Gives every pipeline the sum of their gradients."""
        if self.session.replicas is None:
            return
        from pipeloom.runtime.errors import PeerLost, with_hint
        from pipeloom.runtime.gradients import reduce_data_parallel_gradients

        try:
            reduce_data_parallel_gradients(parameters_of(self.chunks), self.session.replicas)
        except RuntimeError as error:
            raise PeerLost(
                with_hint(
                    f"rank {self.session.processes.index} lost a rank of another pipeline while "
                    f"gradients were reduced: {error}",
                    "look first at the rank that reports nothing; go on with --resume",
                )
            ) from error

    def _require_finite_weights(self) -> None:
        """No checkpoint holds a weight that is no number: it would be the last good one by name."""
        with torch.no_grad():
            own = all(bool(value.isfinite().all()) for value in parameters_of(self.chunks))
        if all(self.session.processes.gather(own)):
            return
        raise DivergedError(
            f"a weight is not finite after step {self.step}; no checkpoint of it is kept",
            f"lower --lr (now {self.args.lr}); last good checkpoint: "
            f"{self.last_checkpoint or 'none yet'}",
        )

    def _require_finite(self, name: str, value: float) -> None:
        if math.isfinite(value):
            return
        kept = self.last_checkpoint
        raise DivergedError(
            f"{name} is {value} at step {self.step + 1}; the run ends before that step",
            f"lower --lr (now {self.args.lr}); last good checkpoint: {kept or 'none yet'}",
        )

    def _idle(self, seconds: float) -> dict[str, Any]:
        """The record's numbers of idle time, for a step that took so long."""
        if self.session.processes.count == 1:
            # Ranks took turns.
            per_replica = self.plan.num_stages // self.plan.num_replicas
            events: Sequence[OpEvent] = replay(self.events, per_replica)
            seconds = max((event.end for event in events), default=0.0)
        else:
            events = self.events
        own = work_and_waiting(events) if self.session.pipelines[0] == 0 else {}
        parts = self.session.processes.gather((seconds, own))
        span = max(part[0] for part in parts)
        ranks = sorted(pair for _, own in parts for pair in own.items())
        if span <= 0:
            return {}
        bubbles = [1.0 - work / span for _, (work, _) in ranks]
        waits = [waiting for _, (_, waiting) in ranks]
        return {"bubble": min(bubbles, default=0.0), "bubbles": bubbles, "waits_s": waits}

    def evaluate(self) -> float:
        """Mean loss of held-out tokens, the same ones each time; training state is untouched.

        Raises:
            DivergedError: It is not finite, so that the weights are of no use.
        """
        samples = min(
            self.args.eval_microbatches * self.args.micro_batch_size, len(self.valid_data)
        )
        num_microbatches = max(1, samples // self.args.micro_batch_size)
        plan = self.args.make_evaluation_plan(num_microbatches)
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad():
                loss, _ = self._run(plan, self.valid_data, first_sample=0, forward_only=True)
        finally:
            for chunk in self.chunks:
                chunk.train()
        if not math.isfinite(loss):
            raise DivergedError(
                f"held-out loss is {loss} after step {self.step}; the run ends there",
                f"lower --lr (now {self.args.lr}); last good checkpoint: "
                f"{self.last_checkpoint or 'none yet'}",
            )
        return loss

    def asked_to_stop(self) -> int:
        """The signal that asks any process to stop after this step; 0: none does.

        All processes call it after each step, since none can leave without the others.
        """
        asked: list[int] = self.session.processes.gather(self.interrupts.asked)
        return max(asked)

    def save(self, folder: Path) -> Path:
        """Writes a checkpoint of this moment."""
        self._require_finite_weights()
        state = TrainState(
            step=self.step,
            consumed_samples=self.consumed_samples,
            scheduler=self.opt_param_scheduler.state_dict(),
            architecture=self.config.architecture(),
            arguments=self.args.to_dict(),
        )
        self.last_checkpoint = checkpoint.save_checkpoint(
            folder,
            chunks=self.chunks,
            optimizer=self.optimizer,
            state=state,
            processes=self.session.processes,
            keep=self.args.keep_checkpoints,
        )
        return self.last_checkpoint

    def resume(self, path: Path) -> None:
        """Goes on exactly where the run that wrote `path` stood, in whatever pipeline.

        Raises:
            ConfigError: All of `--steps` are done.
            CheckpointError: Another model, another text, or files that are not whole.
        """
        state = self.session.processes.on_first(lambda: checkpoint.require_whole(path))
        if state.step >= self.args.steps:
            raise ConfigError(
                f"steps={self.args.steps}: the run has done {state.step} steps already\n"
                f"hint: --steps counts those before the resume; give more than {state.step}"
            )
        checkpoint.require_same_architecture(state.architecture, self.config.architecture())
        stored = state.arguments.get("data_fingerprint")
        if stored != self.args.data_fingerprint:
            raise CheckpointError(
                f"{path} was trained on another text: {state.arguments.get('data_source')} had "
                f"fingerprint {stored}, {self.args.data_source} has {self.args.data_fingerprint}",
                "give the same --data, unchanged, or start a new run",
            )
        checkpoint.load_checkpoint(
            path,
            chunks=self.chunks,
            optimizer=self.optimizer,
            processes=self.session.processes,
        )
        self.opt_param_scheduler.load_state_dict(state.scheduler)
        self.step, self.consumed_samples = state.step, state.consumed_samples
        self.last_checkpoint = path
