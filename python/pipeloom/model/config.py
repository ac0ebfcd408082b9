"""The architecture of a GPT and its place in a pipeline, checked once and then frozen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

import pipeloom
from pipeloom import ConfigError

if TYPE_CHECKING:
    from pipeloom import Layout

NORMALIZATIONS = ("RMSNorm", "LayerNorm")
ACTIVATIONS = ("gelu", "swiglu")
PARAMS_DTYPES = ("float32", "float64", "bfloat16")
COMPUTE_DTYPES = ("float32", "bfloat16")
# Where a model is cut does not change what it computes, so checkpoints ignore these.
_PIPELINE_FIELDS = frozenset(
    {
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
    }
)


def config_error(message: str, hint: str) -> ConfigError:
    """A `ConfigError` in the form of the core's errors: what is wrong, then a hint."""
    return ConfigError(f"{message}\nhint: {hint}")


def require(condition: bool, message: str, hint: str) -> None:
    """Raises `ConfigError` unless `condition` holds."""
    if not condition:
        raise config_error(message, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """What a GPT computes and how it is cut into chunks.

    Attributes:
        num_layers: Transformer layers of the whole model.
        hidden_size: Width of the hidden states.
        num_attention_heads: Attention heads; each is `hidden_size / num_attention_heads` wide.
        vocab_size: Token ids are `0..vocab_size-1`; 257 is bytes and an end-of-document id.
        ffn_hidden_size: Width inside the MLP; None is 4 x hidden (8/3 x hidden for swiglu).
        normalization: `"RMSNorm"` or `"LayerNorm"`, applied before attention and MLP.
        activation: `"gelu"` or `"swiglu"`.
        add_bias_linear: Biases in the layers' linear maps (the output layer never has one).
        layernorm_epsilon: Added to the variance.
        rotary_base: Base of the rotary position frequencies.
        untie_embeddings_and_output_weights: False makes the output layer use the embedding.
        hidden_dropout: Dropout after attention and MLP, a function of seed, layer, step and
            microbatch, so that recomputation and every layout draw the same mask.
        init_method_std: Standard deviation of initial weights.
        seed: With a parameter's name, all that its initial values depend on.
        params_dtype: `"float32"`, `"float64"` or `"bfloat16"`.
        compute_dtype: `"bfloat16"` runs matrix products in it by autocast; weights, gradients,
            the hidden states between layers and the loss keep `params_dtype`.
        pipeline_model_parallel_size: Ranks `pp` of the pipeline.
        virtual_pipeline_model_parallel_size: Chunks `vp` on a rank; None is one.
        pipeline_model_parallel_layout: Layers of each chunk; None is the even layout.

    Raises:
        ConfigError: A value that is out of range, or a layout of another model.

    Examples:
        >>> config = TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4)
        >>> config.ffn_size, config.head_size
        (256, 16)
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int = 257
    ffn_hidden_size: int | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    activation: Literal["gelu", "swiglu"] = "gelu"
    add_bias_linear: bool = False
    layernorm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    untie_embeddings_and_output_weights: bool = True
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    seed: int = 1234
    params_dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: Layout | None = None

    def __post_init__(self) -> None:
        """Checks every field against its range and the fields that it must agree with."""
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            self._require_at_least_one(name)
        if self.ffn_hidden_size is not None:
            self._require_at_least_one("ffn_hidden_size")
        self._require_at_least_one("pipeline_model_parallel_size")
        if self.virtual_pipeline_model_parallel_size is not None:
            self._require_at_least_one("virtual_pipeline_model_parallel_size")
        heads = self.num_attention_heads
        require(
            self.hidden_size % heads == 0 and self.head_size % 2 == 0,
            f"hidden_size={self.hidden_size} does not give num_attention_heads={heads} heads of "
            "an even width",
            f"rotary positions turn pairs of numbers; use a multiple of {2 * heads}",
        )
        self._require_one_of("normalization", NORMALIZATIONS)
        self._require_one_of("activation", ACTIVATIONS)
        self._require_one_of("params_dtype", PARAMS_DTYPES)
        self._require_one_of("compute_dtype", COMPUTE_DTYPES)
        require(
            0.0 <= self.hidden_dropout < 1.0,
            f"hidden_dropout={self.hidden_dropout} is not in 0 <= p < 1",
            "0 turns dropout off",
        )
        for name in ("layernorm_epsilon", "rotary_base", "init_method_std"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value} is not above 0", "leave it out for the default")
        self._check_layout()

    def _require_at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        require(valid, f"{name}={value!r} is not a whole number of at least 1", f"give {name} >= 1")

    def _require_one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        require(
            value in allowed,
            f"{name}={value!r} is unknown",
            f"expected one of {', '.join(allowed)}",
        )

    def _check_layout(self) -> None:
        layout = self.pipeline_model_parallel_layout
        if layout is None:
            return
        require(
            layout.num_layers_total == self.num_layers,
            f"the layout places {layout.num_layers_total} layers, num_layers={self.num_layers}",
            "a layout belongs to one number of layers; make it anew for this model",
        )
        pp, vp = self.pipeline_model_parallel_size, self.num_chunks
        require(
            (layout.pp, layout.vp) == (pp, vp),
            f"the layout is for pp={layout.pp}, vp={layout.vp}, the model for pp={pp}, vp={vp}",
            "pass the layout's own pp and vp as the pipeline and virtual pipeline sizes",
        )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP, with the default filled in."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            # Three matrices in place of two: 8/3 keeps the number of weights, rounded up to 8.
            return -(-self.hidden_size // 3) * 8
        return 4 * self.hidden_size

    @property
    def pipeline_dtype(self) -> torch.dtype:
        """The dtype of the hidden states that cross stage boundaries."""
        dtype: torch.dtype = getattr(torch, self.params_dtype)
        return dtype

    @property
    def num_chunks(self) -> int:
        """Chunks on each rank (`vp`)."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def layout(self) -> Layout:
        """The layout given, else the even one."""
        if self.pipeline_model_parallel_layout is not None:
            return self.pipeline_model_parallel_layout
        return pipeloom.Layout.even(
            self.num_layers, pp=self.pipeline_model_parallel_size, vp=self.num_chunks
        )

    def architecture(self) -> dict[str, Any]:
        """What the whole model is, wherever it is cut: the part that a checkpoint compares.

        Examples:
            >>> a = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
            >>> a.architecture()["num_layers"]
            2
        """
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in _PIPELINE_FIELDS}
