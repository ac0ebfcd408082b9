"""Everything that a training run is told: one checked dataclass, and its command-line options."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import pipeloom
from pipeloom import ConfigError

if TYPE_CHECKING:
    from pipeloom import Layout
    from pipeloom.training.corpus import Corpus

Placement = Literal["loop", "v", "wave", "bidirectional"]
# A run that goes on from a checkpoint may change these: they do not change what it computes.
FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "device",
        "transport",
        "data",
        "out",
        "resume",
        "save_interval",
        "eval_interval",
        "eval_microbatches",
        "log_interval",
        "timeout_s",
        "pp",
        "vp",
        "schedule",
        "layout_text",
        "microbatch_group_size",
        "num_microbatches_with_partial_activation_checkpoints",
        "p2p",
        "profile",
    }
)


def _option(default: Any, text: str, **settings: Any) -> Any:
    """A field with what the command line says about it."""
    metadata = {"help": text, **settings}
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class TrainingArguments:
    """The model, the text, the optimizer and the pipeline of a run.

    Every field is an option of `pipeloom train` (`num_layers` is `--num-layers`); the help texts
    below say what each is. Names, ranges and agreements are checked when the object is made.

    Raises:
        ConfigError: A value is out of range; the message names the field.

    Examples:
        >>> args = TrainingArguments(schedule="1f1b", steps=10)
        >>> args.vp, args.tokens_per_step
        (1, 2048)
    """

    # Model
    num_layers: int = _option(8, "transformer layers")
    hidden_size: int = _option(128, "width of the hidden states")
    num_attention_heads: int = _option(4, "attention heads")
    ffn_hidden_size: int | None = _option(None, "width inside the MLP (default 4 x hidden)")
    normalization: Literal["RMSNorm", "LayerNorm"] = _option("RMSNorm", "normalization")
    activation: Literal["gelu", "swiglu"] = _option("gelu", "activation of the MLP")
    tie_embeddings: bool = _option(False, "the output layer uses the embedding's weight")
    hidden_dropout: float = _option(0.0, "dropout, 0 <= p < 1")
    seed: int = _option(1234, "of initial weights, data order and dropout")

    # Data
    data: tuple[str, ...] = _option(
        (), "text files and folders, or a Megatron .bin/.idx (default: Python's library sources)"
    )
    seq_length: int = _option(128, "tokens of a sample")
    micro_batch_size: int = _option(2, "samples of a microbatch")
    num_microbatches: int = _option(8, "microbatches of a step")

    # Optimizer
    steps: int = _option(160, "optimizer steps in all, those before a resume included")
    lr: float = _option(2e-3, "highest learning rate")
    min_lr: float = _option(2e-4, "learning rate after the decay")
    lr_warmup_steps: int = _option(20, "steps of linear warm-up")
    lr_decay_steps: int | None = _option(
        None, "step at which min_lr is reached (default: steps, of the first run if resumed)"
    )
    weight_decay: float = _option(0.1, "decay of matrices")
    adam_beta1: float = _option(0.9, "AdamW's first beta")
    adam_beta2: float = _option(0.95, "AdamW's second beta")
    adam_eps: float = _option(1e-8, "AdamW's epsilon")
    clip_grad: float = _option(1.0, "largest norm of the gradient over all stages; 0: no clipping")

    # Pipeline
    pp: int = _option(2, "pipeline-parallel ranks")
    vp: int | None = _option(None, "chunks on a rank (default: 2 for interleaved_1f1b)")
    schedule: str = _option("interleaved_1f1b", "name of a schedule (`pipeloom schedules`)")
    layout_text: str | None = _option(
        None, "layers of each stage, as in 'Et*3|(tt|)*29,m|L' (default: even)", flag="--layout"
    )
    microbatch_group_size: int | None = _option(None, "microbatches before the next chunk")
    num_microbatches_with_partial_activation_checkpoints: int | None = _option(
        None, "of each warm-up + 1 forward steps, how many keep all activations (default: all)"
    )
    p2p: Literal["auto", "even_odd", "batched", "fifo", "streams"] = _option(
        "auto", "style of sends and receives"
    )
    transport: Literal["auto", "local", "torch"] = _option(
        "auto", "local: one process; torch: torchrun's processes (auto: torch under torchrun)"
    )
    device: Literal["cpu", "cuda"] = _option("cpu", "where the model lives")
    timeout_s: float = _option(300.0, "seconds after which a wait counts as a hang")

    # Run
    out: str | None = _option(None, "folder of the run (default: runs/train-N, the next free N)")
    resume: str | None = _option(None, "run folder or checkpoint to go on from")
    save_interval: int = _option(50, "steps between checkpoints; 0: only at the end")
    eval_interval: int = _option(0, "steps between evaluations; 0: only at the end")
    eval_microbatches: int = _option(16, "microbatches of an evaluation")
    profile: bool = _option(False, "record each op's times on every rank, for `pipeloom show RUN`")
    log_interval: int = _option(10, "steps between lines where there is no progress bar")

    # Known once the corpus has been read.
    vocab_size: int = field(default=257, metadata={"hidden": True})
    is_bytes: bool = field(default=True, metadata={"hidden": True})
    data_fingerprint: str = field(default="", metadata={"hidden": True})
    data_source: str = field(default="", metadata={"hidden": True})

    def __post_init__(self) -> None:
        """Checks ranges, fills in `vp`, and makes sure that a plan exists."""
        self.data = tuple(self.data)
        for name in _AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in _AT_LEAST_ZERO:
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("lr", self.lr > 0, "above 0")
        self._require("min_lr", 0 <= self.min_lr <= self.lr, f"between 0 and lr={self.lr}")
        self._require("timeout_s", self.timeout_s > 0, "above 0")
        self._require("adam_eps", self.adam_eps > 0, "above 0")
        for name in ("adam_beta1", "adam_beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "between 0 and 1")
        for spec in dataclasses.fields(self):
            choices = _choices(spec.name)
            if choices:
                value = getattr(self, spec.name)
                self._require(spec.name, value in choices, f"one of {', '.join(choices)}")
        if self.vp is None and self.schedule == "interleaved_1f1b":
            self.vp = 2
        plan = self.make_plan()
        if plan.num_replicas > 1:
            raise ConfigError(
                f"schedule={self.schedule!r} runs {plan.num_replicas} copies of the model, "
                "which training does not build\nhint: dualpipe_v overlaps likewise with one copy"
            )
        self.vp = plan.vp

    def _require(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"{name}={getattr(self, name)!r} is not {expected}\nhint: set it with --{flag}"
            )

    def make_plan(self) -> pipeloom.Plan:
        """The compute order of a training step."""
        return pipeloom.plan(
            self.schedule,
            pp=self.pp,
            vp=self.vp,
            num_microbatches=self.num_microbatches,
            microbatch_group_size=self.microbatch_group_size,
            num_microbatches_with_partial_activation_checkpoints=(
                self.num_microbatches_with_partial_activation_checkpoints
            ),
        )

    def make_evaluation_plan(self, num_microbatches: int) -> pipeloom.Plan:
        """The compute order of an evaluation, with its own m on the same chunks."""
        if self.placement == "loop":
            return pipeloom.plan(
                "forward_only", pp=self.pp, vp=self.vp, num_microbatches=num_microbatches
            )
        # Forwards alone in the family's own order: it is the one that fits its placement.
        return pipeloom.plan(
            self.schedule,
            pp=self.pp,
            vp=self.vp,
            num_microbatches=num_microbatches,
            forward_only="forward_only" in self._schedule_row.arguments,
        )

    @property
    def _schedule_row(self) -> pipeloom.Schedule:
        return next(row for row in pipeloom.schedules() if row.name == self.schedule)

    @property
    def placement(self) -> Placement:
        """Placement of the schedule's stages, such as `"loop"` or `"v"`."""
        return cast("Placement", self._schedule_row.placement)

    @property
    def layout(self) -> Layout:
        """Layers of each chunk, on the schedule's placement."""
        vp = self.vp or 1
        if self.layout_text is None:
            return pipeloom.Layout.even(
                self.num_layers, pp=self.pp, vp=vp, placement=self.placement
            )
        return pipeloom.Layout.from_string(
            self.layout_text,
            pp=self.pp,
            vp=vp,
            num_layers=self.num_layers,
            placement=self.placement,
        )

    @property
    def untie_embeddings_and_output_weights(self) -> bool:
        """The configuration's name for the opposite of `tie_embeddings`."""
        return not self.tie_embeddings

    @property
    def samples_per_step(self) -> int:
        """Samples that one optimizer step reads."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.samples_per_step * self.seq_length

    def set_corpus(self, corpus: Corpus) -> None:
        """Takes vocabulary size and fingerprint from the text that was read."""
        self.vocab_size, self.is_bytes = corpus.vocab_size, corpus.is_bytes
        self.data_fingerprint, self.data_source = corpus.fingerprint(), corpus.source

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return {**dataclasses.asdict(self), "data": list(self.data)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainingArguments:
        """The inverse of `to_dict`; unknown names are left out.

        Examples:
            >>> args = TrainingArguments(steps=7)
            >>> TrainingArguments.from_dict(args.to_dict()) == args
            True
        """
        known = {spec.name for spec in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


_AT_LEAST_ONE = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"),
    *("num_microbatches", "steps", "pp", "eval_microbatches", "log_interval"),
)
_AT_LEAST_ZERO = (
    *("lr_warmup_steps", "weight_decay", "clip_grad", "save_interval", "eval_interval", "seed"),
)


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(TrainingArguments)


def _choices(name: str) -> tuple[str, ...]:
    kind = _types()[name]
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every field; those not given are absent from the namespace.

    So that a resumed run can tell what its caller asked for from what is only a default.
    """
    for spec in dataclasses.fields(TrainingArguments):
        if spec.metadata.get("hidden"):
            continue
        flag = spec.metadata.get("flag", "--" + spec.name.replace("_", "-"))
        kind = _types()[spec.name]
        settings: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS}
        default = (
            "" if spec.default in (None, dataclasses.MISSING) else f" (default: {spec.default})"
        )
        settings["help"] = (spec.metadata["help"] + default).replace("%", "%%")
        if kind is bool:
            settings |= {"action": "store_true", "help": spec.metadata["help"]}
        elif choices := _choices(spec.name):
            settings |= {"choices": choices}
        elif spec.name == "data":
            settings |= {"nargs": "+", "metavar": "PATH"}
        else:
            plain = next(
                part for part in (int, float, str) if part in (kind, *typing.get_args(kind))
            )
            settings |= {"type": plain, "metavar": plain.__name__.upper()}
        parser.add_argument(flag, **settings)


def arguments_from(namespace: argparse.Namespace) -> TrainingArguments:
    """The run that a command line asks for; a resumed run's own arguments are its defaults.

    Raises:
        ConfigError: A value is out of range, or one that a resumed run may not change.
    """
    given = {
        spec.name: getattr(namespace, spec.name)
        for spec in dataclasses.fields(TrainingArguments)
        if hasattr(namespace, spec.name)
    }
    if given.get("resume") is None:
        return TrainingArguments(**given)
    from pipeloom.training.checkpoint import read_state, resolve_checkpoint

    stored = read_state(resolve_checkpoint(given["resume"])).arguments
    for name, value in given.items():
        before = stored.get(name)
        if name not in FREE_TO_CHANGE and before != value:
            raise ConfigError(
                f"{name}={value!r} differs from the resumed run's {before!r}\n"
                f"hint: leave --{name.replace('_', '-')} out, or start a new run"
            )
    if "steps" in given and stored.get("lr_decay_steps") is None:
        # The learning rate must go on along the curve that it was on.
        stored["lr_decay_steps"] = stored["steps"]
    cut_anew = {"pp", "vp", "schedule"} & given.keys()
    if cut_anew:
        # Numbers that belong to the old pipeline say nothing about the new one.
        for name in ("vp", "microbatch_group_size", "layout_text"):
            stored[name] = None
    stored |= {"out": None}
    return TrainingArguments.from_dict(stored | given)
