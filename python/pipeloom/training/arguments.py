"""Everything that a training run is told: one checked dataclass."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pipeloom
from pipeloom import ConfigError

if TYPE_CHECKING:
    from pipeloom import Layout
    from pipeloom.training.corpus import Corpus

Placement = Literal["loop", "v", "wave", "bidirectional"]

_LONGEST_WAIT_S = 1e9  # 31 years; torch counts nanoseconds in 64 bits


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
    hidden_size: int = _option(64, "width of the hidden states")
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
    num_microbatches: int = _option(8, "microbatches of a step of one pipeline")

    # Optimizer
    steps: int = _option(240, "optimizer steps in all, those before a resume included")
    lr: float = _option(6e-3, "highest learning rate")
    min_lr: float = _option(3e-4, "learning rate after the decay")
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
    plan: str | None = _option(
        None, "run this file: a saved plan, or PyTorch's CSV; pp, vp and m are its own", meta="FILE"
    )
    pp: int = _option(2, "pipeline-parallel ranks")
    vp: int | None = _option(None, "chunks on a rank (default: 2 for interleaved_1f1b)")
    schedule: str = _option("interleaved_1f1b", "name of a schedule (`pipeloom schedules`)")
    layout_text: str | None = _option(
        None, "layers of each stage, as in 'Et*3|(tt|)*29,m|L' (default: even)", option="layout"
    )
    microbatch_group_size: int | None = _option(None, "microbatches before the next chunk")
    num_seq_pieces: int | None = _option(None, "pieces of each sequence, for seq1f1b")
    num_microbatches_with_partial_activation_checkpoints: int | None = _option(
        None, "of each warm-up + 1 forward steps, how many keep all activations (default: all)"
    )
    recompute: bool = _option(
        False, "keep only each chunk's input, and run every forward again before its backward"
    )
    dp: int = _option(
        1, "data-parallel pipelines, in pp x dp processes; a step reads dp x as many microbatches"
    )
    p2p: Literal["auto", "even_odd", "batched", "fifo", "streams"] = _option(
        "auto", "style of sends and receives"
    )
    transport: Literal["auto", "local", "torch"] = _option(
        "auto", "local: one process; torch: torchrun's processes (auto: torch under torchrun)"
    )
    device: Literal["cpu", "cuda"] = _option("cpu", "where the model lives")
    dtype: Literal["float32", "bfloat16"] = _option(
        "float32", "of matrix products; weights, gradients and the loss are float32 in any case"
    )
    timeout_s: float = _option(300.0, "seconds after which a wait counts as a hang")

    # Run
    out: str | None = _option(None, "folder of the run (default: runs/train-N, the next free N)")
    resume: str | None = _option(None, "run folder or checkpoint to go on from")
    save_interval: int = _option(50, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _option(0, "newest checkpoints to keep; 0: all")
    eval_interval: int = _option(0, "steps between evaluations; 0: only at the end")
    eval_microbatches: int = _option(16, "microbatches of an evaluation")
    profile: bool = _option(False, "record each op's times on every rank, for `pipeloom show RUN`")
    log_interval: int = _option(10, "steps between lines where there is no progress bar")
    tensorboard: bool = _option(False, "also write TensorBoard's event files, to OUT/tensorboard")

    # Known once the corpus has been read.
    vocab_size: int = field(default=257, metadata={"hidden": True})
    is_bytes: bool = field(default=True, metadata={"hidden": True})
    data_fingerprint: str = field(default="", metadata={"hidden": True})
    data_source: str = field(default="", metadata={"hidden": True})

    def __post_init__(self) -> None:
        """Checks types and ranges, and makes sure that a plan exists."""
        if isinstance(self.data, list):
            self.data = tuple(self.data)
        for spec in dataclasses.fields(self):
            self._check_type(spec.name)
        for name in _AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        if self.lr_decay_steps is not None:
            self._require("lr_decay_steps", self.lr_decay_steps >= 1, "at least 1")
        for name in _AT_LEAST_ZERO:
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("lr", self.lr > 0, "above 0")
        self._require("min_lr", 0 <= self.min_lr <= self.lr, f"between 0 and lr={self.lr}")
        self._require("timeout_s", 0 < self.timeout_s <= _LONGEST_WAIT_S, "in 0 < s <= 1e9")
        self._require("adam_eps", self.adam_eps > 0, "above 0")
        for name in ("adam_beta1", "adam_beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "between 0 and 1")
        for name in ("lr", "weight_decay", "adam_eps", "clip_grad"):
            self._require(name, math.isfinite(getattr(self, name)), "finite")
        for name in ("out", "resume", "plan"):
            self._require(name, getattr(self, name) != "", "a path")
        self._require("data", "" not in self.data, "a list of paths")
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "tensorboard=True needs the package tensorboard, which is not installed\n"
                "hint: pip install tensorboard, or leave --tensorboard out: loss.jsonl has it all"
            )
        self._plan = self._make_plan()
        self._check_plan(self._plan)
        self.schedule, self.pp, self.vp = self._plan.schedule, self._plan.pp, self._plan.vp
        self.num_microbatches = self._plan.num_microbatches

    def _require(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            spec = next(spec for spec in dataclasses.fields(self) if spec.name == name)
            option = spec.metadata.get("option", name)
            raise ConfigError(
                f"{option}={getattr(self, name)!r} is not {expected}\n"
                f"hint: set it with --{option.replace('_', '-')}"
            )

    def _check_type(self, name: str) -> None:
        kind, value = _types()[name], getattr(self, name)
        if choices := choices_of(name):
            self._require(name, value in choices, f"one of {', '.join(choices)}")
        elif typing.get_origin(kind) is tuple:
            valid = isinstance(value, tuple) and all(isinstance(part, str) for part in value)
            self._require(name, valid, "a list of paths")
        else:
            allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
            # A whole number will do for a float; True and False are no numbers.
            kinds = (*allowed, int) if float in allowed else allowed
            valid = isinstance(value, kinds) and (bool in allowed or not isinstance(value, bool))
            self._require(name, valid, f"of type {' or '.join(map(_name_of, allowed))}")

    def _make_plan(self) -> pipeloom.Plan:
        partial = self.num_microbatches_with_partial_activation_checkpoints
        if self.recompute and partial is not None:
            raise ConfigError(
                "recompute=True runs every forward again, but "
                f"num_microbatches_with_partial_activation_checkpoints={partial} keeps some\n"
                "hint: give one of the two"
            )
        partial = 0 if self.recompute else partial
        if self.plan is None:
            vp = 2 if self.vp is None and self.schedule == "interleaved_1f1b" else self.vp
            return pipeloom.plan(
                self.schedule,
                pp=self.pp,
                vp=vp,
                num_microbatches=self.num_microbatches,
                microbatch_group_size=self.microbatch_group_size,
                num_seq_pieces=self.num_seq_pieces,
                num_microbatches_with_partial_activation_checkpoints=partial,
            )
        for name, value in (
            ("microbatch_group_size", self.microbatch_group_size),
            ("num_seq_pieces", self.num_seq_pieces),
            ("recompute", partial),
        ):
            if value is not None:
                raise ConfigError(
                    f"plan={self.plan!r} holds its own order, so {name} has no use\n"
                    "hint: make the plan with it (pipeloom plan ... --save FILE)"
                )
        from pipeloom.cli.options import read_plan

        return read_plan(Path(self.plan))

    def _check_plan(self, plan: pipeloom.Plan) -> None:
        """Refuses the plans that training can't run, by name."""
        what = f"schedule={self.schedule!r}" if self.plan is None else f"plan={self.plan!r}"
        if plan.num_replicas > 1 and self.tie_embeddings:
            raise ConfigError(
                f"{what} runs {plan.num_replicas} copies of the model, and with "
                "tie_embeddings=True each rank at an end would hold both ends' copies of one "
                "weight\nhint: leave --tie-embeddings out, or dualpipe_v has one copy"
            )
        if plan.forward_only or plan.schedule == "forward_only":
            raise ConfigError(f"{what} has no backward, so it trains nothing\nhint: 1f1b has")
        if plan.num_seq_pieces > self.seq_length:
            raise ConfigError(
                f"{what} cuts sequences into num_seq_pieces={plan.num_seq_pieces} pieces, but "
                f"they have seq_length={self.seq_length}\nhint: give each piece at least one token"
            )
        if plan.style is not None and self.p2p != "auto":
            raise ConfigError(
                f"{what} has its own sends and receives ({plan.style}), so p2p={self.p2p!r} has "
                "no use\nhint: leave --p2p out"
            )

    def make_plan(self) -> pipeloom.Plan:
        """The order of a training step."""
        return self._plan

    def make_evaluation_plan(self, num_microbatches: int) -> pipeloom.Plan:
        """The compute order of an evaluation, with its own m on the same chunks and pieces."""
        from pipeloom.runtime.evaluation import evaluation_plan

        return evaluation_plan(self._plan, num_microbatches)

    @property
    def layout(self) -> Layout:
        """Layers of each chunk, on the plan's placement."""
        placement, vp = cast("Placement", self._plan.placement), self._plan.vp
        if self.layout_text is None:
            return pipeloom.Layout.even(self.num_layers, pp=self.pp, vp=vp, placement=placement)
        return pipeloom.Layout.from_string(
            self.layout_text,
            pp=self.pp,
            vp=vp,
            num_layers=self.num_layers,
            placement=placement,
        )

    @property
    def untie_embeddings_and_output_weights(self) -> bool:
        """The configuration's name for the opposite of `tie_embeddings`."""
        return not self.tie_embeddings

    @property
    def compute_dtype(self) -> str:
        """The configuration's name for `dtype`."""
        return self.dtype

    @property
    def samples_per_step(self) -> int:
        """Samples that one optimizer step reads, over all data-parallel pipelines."""
        return self.micro_batch_size * self.num_microbatches * self.dp

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
        names = [spec.name for spec in dataclasses.fields(self)]
        return {**{name: getattr(self, name) for name in names}, "data": list(self.data)}

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
    *("num_microbatches", "steps", "pp", "dp", "eval_microbatches", "log_interval"),
)
_AT_LEAST_ZERO = (
    *("lr_warmup_steps", "weight_decay", "clip_grad", "save_interval", "keep_checkpoints"),
    *("eval_interval", "seed"),
)


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(TrainingArguments)


def _name_of(kind: Any) -> str:
    return "None" if kind is types.NoneType else str(kind.__name__)


def choices_of(name: str) -> tuple[str, ...]:
    """The values that a field may have, if they are a list; else nothing.

    Examples:
        >>> choices_of("device"), choices_of("steps")
        (('cpu', 'cuda'), ())
    """
    kind = _types()[name]
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def type_of(name: str) -> type:
    """What an option's word is converted to: `bool`, `int`, `float` or `str`.

    Examples:
        >>> type_of("steps"), type_of("vp"), type_of("out")
        (<class 'int'>, <class 'int'>, <class 'str'>)
    """
    kind = _types()[name]
    allowed = (kind, *typing.get_args(kind))
    return next(part for part in (bool, int, float, str) if part in allowed)
