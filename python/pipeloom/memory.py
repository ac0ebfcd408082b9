"""How much memory a GPT or Llama takes on each rank, from its shape and its layout alone.

Numbers are counted, not measured: parameters exactly as `pipeloom.model` builds them, activations
as autograd keeps them with fused attention (docs/checking.md has the table). Kernels' workspaces
and the allocator's fragments come on top.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pipeloom._core import ConfigError, Costs, LayoutError

if TYPE_CHECKING:
    from pipeloom._core import Layout, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The shape of a GPT or Llama, and what its parts take in bytes.

    Args:
        num_layers: Transformer layers.
        hidden_size: Width of the hidden states.
        num_attention_heads: Attention heads.
        vocab_size: Rows of the embedding and of the output layer.
        sequence_length: Tokens of a sequence.
        micro_batch_size: Sequences of a microbatch.
        num_query_groups: Heads of keys and values (Llama's grouped attention); None: as many as
            attention heads.
        ffn_hidden_size: Width inside the MLP; None: 4 x hidden (8/3 x hidden for swiglu).
        activation: `"gelu"` or `"swiglu"`.
        normalization: `"RMSNorm"` (one weight a channel) or `"LayerNorm"` (weight and bias).
        add_bias_linear: Whether the layers' linear maps have biases.
        untie_embeddings_and_output_weights: False: the last stage holds a copy of the embedding.
        parameter_bytes: Bytes of a parameter: 2 for bf16, 4 for fp32.
        gradient_bytes: Bytes of an accumulated gradient.
        optimizer_bytes: Bytes a parameter of the optimizer. AdamW over fp32 parameters: 8; over
            bf16 with an fp32 copy: 12.
        activation_bytes: Bytes of an activation.
        logit_bytes: Bytes of a logit; the loss is taken in fp32.
        num_shards: Ranks that share the optimizer's state (ZeRO-1, a distributed optimizer).
        store_attention_scores: Whether attention keeps its s x s scores (it is not fused).
        num_seq_pieces: Pieces of each sequence; activations and boundaries are then those of a
            piece, the mean of a microbatch's.

    Raises:
        ConfigError: A number that is out of range or does not divide another.

    Examples:
        >>> import pipeloom as pl
        >>> llama = pl.ModelMemory(
        ...     num_layers=32,
        ...     hidden_size=4096,
        ...     num_attention_heads=32,
        ...     vocab_size=32000,
        ...     ffn_hidden_size=11008,
        ...     activation="swiglu",
        ...     sequence_length=4096,
        ... )
        >>> llama.num_parameters()
        6738415616
        >>> layout = pl.Layout.even(32, pp=8)
        >>> plan = pl.plan("1f1b", pp=8, num_microbatches=32, layout=layout)
        >>> report = llama.report(plan, layout)
        >>> report.rank, round(report.max / 2**30, 1)
        (0, 37.5)
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    sequence_length: int
    micro_batch_size: int = 1
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    activation: Literal["gelu", "swiglu"] = "gelu"
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    add_bias_linear: bool = False
    untie_embeddings_and_output_weights: bool = True
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12
    activation_bytes: int = 2
    logit_bytes: int = 4
    num_shards: int = 1
    store_attention_scores: bool = False
    num_seq_pieces: int = 1

    def __post_init__(self) -> None:
        """Checks every number against its range and those that it must divide."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{field.name}={value!r} is not a bool\nhint: give True or False")
            if field.type == "int" or (field.type == "int | None" and value is not None):
                low = 0 if field.name in ("gradient_bytes", "optimizer_bytes") else 1
                # A numpy integer becomes an int: sizes pass 64 bits.
                object.__setattr__(self, field.name, _whole(field.name, value, low))
        for name, given, allowed in (
            ("activation", self.activation, ("gelu", "swiglu")),
            ("normalization", self.normalization, ("RMSNorm", "LayerNorm")),
        ):
            if given not in allowed:
                raise ConfigError(
                    f"{name}={given!r} is unknown\nhint: expected one of {', '.join(allowed)}"
                )
        for name, part, whole, of in (
            ("num_attention_heads", self.num_attention_heads, self.hidden_size, "hidden_size"),
            ("num_query_groups", self._groups, self.num_attention_heads, "num_attention_heads"),
        ):
            if whole % part:
                raise ConfigError(
                    f"{name}={part} does not divide {of}={whole}\nhint: use a divisor of {whole}"
                )

    @staticmethod
    def from_config(config: Any, *, sequence_length: int, **changes: Any) -> ModelMemory:
        """The shape of a `pipeloom.model` (or Megatron-like) configuration.

        Args:
            config: Has `num_layers`, `hidden_size`, `num_attention_heads`, `vocab_size` and, if
                they differ from the defaults here, the other fields of the model's shape.
            sequence_length: Tokens of a sequence.
            changes: Other fields of this class.

        Raises:
            ConfigError: A value that is out of range, or the config lacks one of the first four.
        """
        names = [
            *("num_layers", "hidden_size", "num_attention_heads", "vocab_size"),
            *("num_query_groups", "ffn_hidden_size", "activation", "normalization"),
            *("add_bias_linear", "untie_embeddings_and_output_weights"),
        ]
        given = {name: getattr(config, name) for name in names if hasattr(config, name)}
        missing = [name for name in names[:4] if name not in given | changes]
        if missing:
            raise ConfigError(
                f"config ({type(config).__name__}) has no {', '.join(missing)}\n"
                "hint: give a model's configuration, or these as keyword arguments"
            )
        return ModelMemory(sequence_length=sequence_length, **(given | changes))

    @property
    def _groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def _key_size(self) -> int:
        """Width of all keys, and of all values."""
        return self.hidden_size // self.num_attention_heads * self._groups

    @property
    def _ffn(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        swiglu = self.activation == "swiglu"
        return -(-self.hidden_size // 3) * 8 if swiglu else 4 * self.hidden_size

    @property
    def _tokens(self) -> int:
        return -(-self.sequence_length // self.num_seq_pieces) * self.micro_batch_size

    def _content(self, layout: Layout, stage: int) -> tuple[int, bool, bool]:
        """(layers, with the embedding, with the output layer) of a stage."""
        if layout.num_layers_total != self.num_layers:
            raise LayoutError(
                f"the layout places {layout.num_layers_total} layers, but "
                f"num_layers={self.num_layers}\n"
                "hint: make the layout anew for this model"
            )
        stages = _place(layout)
        if stage not in stages:
            raise LayoutError(
                f"stage={stage!r} is out of range for {len(stages)} stages\n"
                f"hint: stages are 0..{len(stages)}"
            )
        rank, chunk = stages[stage]
        layers = layout.num_layers(rank, chunk) + layout.num_mtp_layers(rank, chunk)
        return layers, layout.pre_process(rank, chunk), layout.post_process(rank, chunk)

    def norm_parameters(self) -> int:
        """Parameters of one normalization."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    def layer_parameters(self) -> int:
        """Parameters of one transformer layer."""
        h, f = self.hidden_size, self._ffn
        qkv, fc1 = h + 2 * self._key_size, f * (2 if self.activation == "swiglu" else 1)
        biases = qkv + h + fc1 + h if self.add_bias_linear else 0
        return h * (qkv + h + fc1) + f * h + biases + 2 * self.norm_parameters()

    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the output layer."""
        return self.vocab_size * self.hidden_size

    def num_parameters(self, layout: Layout | None = None, stage: int | None = None) -> int:
        """Parameters of the model, or of one stage of a layout as it is built.

        A tied output layer is the embedding itself where both are in one stage, else a copy.

        Args:
            layout: Which layers each stage builds.
            stage: A stage of it; None: the whole model, a tied weight once.

        Raises:
            ConfigError: A stage without a layout.
            LayoutError: The layout is not of this model, or has no such stage.
        """
        tied = not self.untie_embeddings_and_output_weights
        if layout is None and stage is not None:
            raise ConfigError(f"stage={stage} needs a layout\nhint: give layout= too, or neither")
        if layout is None or stage is None:
            ends = self.embedding_parameters() * (1 if tied else 2) + self.norm_parameters()
            return self.num_layers * self.layer_parameters() + ends
        layers, pre, post = self._content(layout, stage)
        embeddings = int(pre) + int(post and not (tied and pre))
        return (
            layers * self.layer_parameters()
            + embeddings * self.embedding_parameters()
            + post * self.norm_parameters()
        )

    def static_bytes(self, num_parameters: int) -> int:
        """Bytes of parameters, gradients and the optimizer's state."""
        state = -(-num_parameters * self.optimizer_bytes // self.num_shards)
        return num_parameters * (self.parameter_bytes + self.gradient_bytes) + state

    def boundary_bytes(self) -> int:
        """Bytes of the hidden states that cross a stage boundary: [sequence, batch, hidden]."""
        return self._tokens * self.hidden_size * self.activation_bytes

    def norm_activation_bytes(self) -> int:
        """Bytes that one normalization keeps of a microbatch: its input and each row's statistics.

        A norm that is not fused (RMSNorm on a CPU) keeps its scaled input too.
        """
        statistics = 2 if self.normalization == "LayerNorm" else 1
        return self.boundary_bytes() + 4 * self._tokens * statistics

    def layer_activation_bytes(self) -> int:
        """Bytes that one layer keeps of a microbatch until its backward: what autograd saves.

        The inputs of its norms and linear maps, the fused queries, keys and values, rotated
        queries and keys, the attention's output and row sums, and what the activation function
        reads.
        """
        h, k = self.hidden_size, self._key_size
        attention = h + (h + 2 * k) + (h + k) + 2 * h  # qkv's input, q k v, rotated q k, output
        # fc1's input; gelu's input and output, or of swiglu gate and value, silu(gate), product.
        mlp = h + self._ffn * (4 if self.activation == "swiglu" else 2)
        size = self._tokens * (attention + mlp) * self.activation_bytes
        size += 2 * self.norm_activation_bytes()
        size += 4 * self._tokens * self.num_attention_heads  # the row sums
        if self.store_attention_scores:
            # Piece j looks at the keys of pieces 0..j: (k + 1) / 2 pieces in the mean.
            keys = self.sequence_length * (self.num_seq_pieces + 1) // (2 * self.num_seq_pieces)
            scores = self.num_attention_heads * keys * self._tokens
            size += 2 * scores * self.activation_bytes  # before and after the softmax
        return size

    def stage_activation_bytes(self, layout: Layout, stage: int, *, recompute: bool = False) -> int:
        """Bytes that a stage keeps of a microbatch between its forward and its backward.

        Args:
            layout: Which layers each stage builds.
            stage: The stage.
            recompute: Whether only the stage's input is kept, and its layers run again.

        Raises:
            LayoutError: The layout is not of this model, or has no such stage.
        """
        layers, pre, post = self._content(layout, stage)
        boundary = self.boundary_bytes()
        size = 8 * self._tokens if pre else 0
        if layers and not recompute:
            size += layers * self.layer_activation_bytes()
        elif layers or not pre:
            size += boundary  # the stage's input; else the first layer's norm keeps it
            if self.num_seq_pieces > 1:  # keys and values stay for the later pieces
                size += layers * 2 * self._tokens * self._key_size * self.activation_bytes
        if post:
            # The output layer's input; the softmax of the logits and the labels, for the loss.
            size += self.norm_activation_bytes() + boundary
            size += self._tokens * (self.vocab_size * self.logit_bytes + 8)
        return size

    def costs(self, layout: Layout, *, num_replicas: int = 1, **times: Any) -> Costs:
        """Costs with the memory of this model in bytes, for `plan.simulate`.

        A forward adds the stage's activations and, where it sends, nothing more: the receiver
        holds what was sent. A split backward frees all at its W half. Parameters, gradients and
        optimizer are `static_memory`.

        Args:
            layout: Which layers each stage builds.
            num_replicas: 2 for `chimera` and `dualpipe`, whose ranks hold two copies.
            times: Other arguments of `Costs`: forward, latency, ...

        Raises:
            ConfigError: `num_replicas` is neither 1 nor 2, or a cost is out of range.
            LayoutError: The layout is not of this model.

        Examples:
            >>> import pipeloom as pl
            >>> gpt = pl.ModelMemory(
            ...     num_layers=4,
            ...     hidden_size=8,
            ...     num_attention_heads=2,
            ...     vocab_size=16,
            ...     sequence_length=4,
            ... )
            >>> costs = gpt.costs(pl.Layout.even(4, pp=2), forward=2)
            >>> costs.forward, costs.static_memory
            (2, (30528, 30672))
        """
        if num_replicas not in (1, 2):
            raise ConfigError(
                f"num_replicas={num_replicas!r} is neither 1 nor 2\nhint: give plan.num_replicas"
            )
        stages = range(layout.pp * layout.vp)
        kept = [self.stage_activation_bytes(layout, stage) for stage in stages]
        again = [self.stage_activation_bytes(layout, stage, recompute=True) for stage in stages]
        static = [0] * layout.pp
        for stage in stages:
            rank = _place(layout)[stage][0]
            held = self.static_bytes(self.num_parameters(layout, stage))
            static[rank] += held
            if num_replicas == 2:
                static[layout.pp - 1 - rank] += held
        return Costs(
            memory_forward=kept,
            memory_backward_weight=[-size for size in kept],
            memory_recompute=again,
            static_memory=static,
            boundary_bytes=times.pop("boundary_bytes", self.boundary_bytes()),
            **times,
        )

    def report(self, plan: Plan, layout: Layout, **times: Any) -> MemoryReport:
        """The peak of each rank while a plan runs.

        Args:
            plan: The plan.
            layout: Which layers each stage builds.
            times: Arguments of `Costs` (memory does not depend on them under this rule).

        Raises:
            LayoutError: The layout is not of this model, or places its stages otherwise than the
                plan.
        """
        placed = [_place(layout)[stage][0] for stage in range(layout.pp * layout.vp)]
        ranks = [rank for rank, _ in plan.stages[: plan.num_stages // plan.num_replicas]]
        if placed != ranks or layout.pp != plan.pp:
            raise LayoutError(
                f"the layout is for pp={layout.pp}, vp={layout.vp}, "
                f"placement={layout.placement!r}, but the plan has pp={plan.pp}, vp={plan.vp}, "
                f"placement={plan.placement!r}\n"
                "hint: make the layout with the plan's pp, vp and placement"
            )
        costs = replace(self, num_seq_pieces=plan.num_seq_pieces).costs(
            layout, num_replicas=plan.num_replicas, **times
        )
        timeline = plan.simulate(costs)
        static: Any = costs.static_memory
        peak = tuple(int(timeline.peak_memory(rank)) for rank in range(plan.pp))
        return MemoryReport(static=static, peak=peak)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of each rank while a plan runs, in bytes.

    Attributes:
        static: Parameters, gradients and optimizer of each rank.
        peak: The highest memory of each rank, static memory included.
    """

    static: tuple[int, ...]
    peak: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The rank with the highest peak; the first of equals."""
        return self.peak.index(self.max)

    @property
    def max(self) -> int:
        """The highest peak of any rank: what every rank's device must have."""
        return max(self.peak)


def _whole(name: str, value: Any, low: int) -> int:
    """The value as an int of at least `low`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        raise ConfigError(
            f"{name}={value!r} is not a whole number of at least {low}\nhint: give {name} >= {low}"
        )
    return number


@lru_cache(maxsize=8)
def _place(layout: Layout) -> dict[int, tuple[int, int]]:
    """(rank, chunk) of each stage of one replica."""
    ranks, chunks = range(layout.pp), range(layout.vp)
    return {layout.stage(rank, chunk): (rank, chunk) for rank in ranks for chunk in chunks}
