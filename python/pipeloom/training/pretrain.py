"""`pretrain`: a run from its arguments to what it leaves."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeloom.profile import FILE as PROFILE_FILE
from pipeloom.training import artifacts, checkpoint
from pipeloom.training.errors import CheckpointError, DivergedError
from pipeloom.training.folder import claimed_run_folder
from pipeloom.training.interrupts import Interrupted, Interrupts
from pipeloom.training.log import RunLog, StepRecord, read_losses
from pipeloom.training.retention import step_of
from pipeloom.training.session import open_session
from pipeloom.training.setup import parameters_of
from pipeloom.training.trainer import ForwardStepFunc, Trainer, forward_step

if TYPE_CHECKING:
    from pathlib import Path

    from pipeloom.model.builders import ModelProvider
    from pipeloom.training.arguments import TrainingArguments
    from pipeloom.training.data import TokenDataset

__all__ = ["TrainingResult", "forward_step", "pretrain"]

DatasetsProvider = Callable[
    ["TrainingArguments"], "tuple[TokenDataset, TokenDataset, TokenDataset | None]"
]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What a run ended with; paths are None or empty where nothing was written."""

    folder: Path
    checkpoint: Path
    losses: list[StepRecord]
    valid_loss: float
    is_bytes: bool
    is_first: bool
    loss_curve: list[Path]
    plan_picture: Path | None
    trace: Path | None
    profile: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON can hold it."""
        return {
            "folder": str(self.folder),
            "checkpoint": str(self.checkpoint),
            "valid_loss": self.valid_loss,
            "losses": [asdict(record) for record in self.losses],
            "loss_curve": [str(path) for path in self.loss_curve],
            "plan_picture": None if self.plan_picture is None else str(self.plan_picture),
            "trace": None if self.trace is None else str(self.trace),
            "profile": None if self.profile is None else str(self.profile),
        }


def pretrain(
    train_valid_test_datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step_func: ForwardStepFunc = forward_step,
    *,
    args: TrainingArguments,
) -> TrainingResult:
    """Trains a model through the pipeline that `args` describe.

    Args:
        train_valid_test_datasets_provider: Gives training, held-out and test data for `args`.
        model_provider: For example `partial(model_provider, gpt_builder)`.
        forward_step_func: Runs one chunk on one microbatch.
        args: The run.

    Returns:
        Losses, and the paths of checkpoint, curve, picture and trace.

    Raises:
        PlanError: Arguments, data or checkpoint are wrong; the message says which and how.
        DivergedError: The loss is no longer finite.
        Interrupted: By Ctrl-C or SIGTERM; a KeyboardInterrupt whose argument says what was kept.
    """
    with (
        open_session(args) as session,
        Interrupts(alone=session.processes.count == 1) as interrupts,
        ExitStack() as stack,
    ):
        source, asked = None, args.resume
        if asked is not None:
            source = session.processes.on_first(lambda: checkpoint.resolve_checkpoint(asked))

        def prepare() -> Trainer:
            # All processes read the text: every one needs tokens or the count of them.
            train_data, valid_data, _ = train_valid_test_datasets_provider(args)
            return Trainer(
                args,
                session,
                model_provider,
                forward_step_func,
                interrupts=interrupts,
                train_data=train_data,
                valid_data=valid_data,
            )

        trainer = session.processes.together(prepare)
        session.processes.agree(trainer.fingerprint)
        if source is not None:
            trainer.resume(source)
        folder = session.processes.on_first(
            lambda: stack.enter_context(claimed_run_folder(args.out, resumed_from=source))
        )
        try:
            return _train(trainer, folder)
        except KeyboardInterrupt as interrupt:
            number = getattr(interrupt, "number", signal.SIGINT)
            kept = _keep(trainer, folder / "checkpoints")
            raise Interrupted(
                number, f"stopped after step {trainer.step}; last checkpoint: {kept or 'none yet'}"
            ) from None


def _keep(trainer: Trainer, folder: Path) -> Path | None:
    """The newest checkpoint after an interruption: one of this moment if this process can.

    A step changes nothing that a checkpoint holds before its last act, so that the moment is that
    of the step before. One process of several can't save alone: their steps may differ.
    """
    last = trainer.last_checkpoint
    saved = last is not None and step_of(last) == trainer.step
    if saved or trainer.step == 0 or not trainer.is_whole or trainer.session.processes.count > 1:
        return last
    # A second signal ends the process at once; what is half written then is not a checkpoint.
    trainer.interrupts.end_at_once()
    try:
        return trainer.save(folder)
    except (KeyboardInterrupt, CheckpointError, DivergedError):
        return last


def _train(trainer: Trainer, folder: Path) -> TrainingResult:
    args, session = trainer.args, trainer.session
    checkpoints = folder / "checkpoints"
    log = RunLog(
        folder if session.is_first else None,
        first_step=trainer.step,
        steps=args.steps,
        log_interval=args.log_interval,
        tensorboard=args.tensorboard,
    )
    with log:
        log.say(_describe(trainer))
        while trainer.step < args.steps:
            record = trainer.train_step()
            log.record(record)
            last = trainer.step == args.steps
            if args.eval_interval and trainer.step % args.eval_interval == 0 and not last:
                log.record(StepRecord(trainer.step, valid_loss=trainer.evaluate()))
            asked = 0 if last else trainer.asked_to_stop()
            due = args.save_interval and trainer.step % args.save_interval == 0
            if asked or (due and not last):
                trainer.save(checkpoints)
            if asked:
                raise Interrupted(asked)
        valid_loss = trainer.evaluate()
        log.record(StepRecord(trainer.step, valid_loss=valid_loss))
        saved = trainer.save(checkpoints)
    records = read_losses(folder) if session.is_first else []
    shown = trainer.events if session.pipelines[0] == 0 else ()
    events = [event for part in session.processes.gather(shown) for event in part]
    curve: list[Path] = []
    picture = trace = profile = None
    unit = "byte" if args.is_bytes else "token"
    if session.is_first:
        curve = artifacts.draw_loss_curve(records, folder, unit=unit)
        picture = artifacts.draw_plan(trainer.plan, folder / "plan.svg")
        if events:
            trace = artifacts.write_trace(events, trainer.plan, folder / "trace.json")
        if trainer.profiler is not None:
            profile = folder / PROFILE_FILE
            trainer.profiler.profile.save(profile)
    return TrainingResult(
        folder,
        saved,
        records,
        valid_loss,
        args.is_bytes,
        session.is_first,
        curve,
        picture,
        trace,
        profile,
    )


def _describe(trainer: Trainer) -> str:
    args = trainer.args
    count = sum(value.numel() for value in parameters_of(trainer.chunks))
    dp = f", dp={args.dp}" if args.dp > 1 else ""
    where = f"pp={args.pp}, vp={args.vp}{dp}, {args.schedule}, {args.num_microbatches} microbatches"
    held = "" if trainer.session.processes.count == 1 else " in this process"
    return f"{args.data_source}\n{count:,} parameters{held}; {where}"
