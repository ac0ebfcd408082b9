"""The chunks of one rank: `get_model` -> `model_provider` -> `gpt_builder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from pipeloom.model.config import TransformerConfig, config_error
from pipeloom.model.gpt_model import GPTModel
from pipeloom.model.transformer_block import (
    TransformerLayerSpec,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from pipeloom.model.transformer_layer import TransformerLayer


class ModelBuilder(Protocol):
    """Makes one chunk, as `gpt_builder` does."""

    def __call__(
        self,
        args: Any,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        pp_rank: int,
        config: TransformerConfig | None,
    ) -> nn.Module:
        """Returns the chunk at (`pp_rank`, `vp_stage`)."""
        ...


ModelProvider = Callable[..., nn.Module]
"""`partial(model_provider, builder)`, or any function of `ModelBuilder`'s arguments."""

# Arguments that go by the same name in the configuration.
_SAME_NAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "ffn_hidden_size",
    "normalization",
    "activation",
    "untie_embeddings_and_output_weights",
    "hidden_dropout",
    "init_method_std",
    "seed",
    "params_dtype",
    "compute_dtype",
)


def core_transformer_config_from_args(args: Any) -> TransformerConfig:
    """The model's configuration, from the attributes that `args` has; others keep their defaults.

    Args:
        args: Anything with `num_layers`, `hidden_size`, `num_attention_heads`, and optionally the
            other fields of `TransformerConfig`, `pp`, `vp` and `layout`.

    Examples:
        >>> from types import SimpleNamespace
        >>> args = SimpleNamespace(num_layers=4, hidden_size=8, num_attention_heads=2)
        >>> core_transformer_config_from_args(args).pipeline_model_parallel_size
        1
    """
    fields = {name: getattr(args, name) for name in _SAME_NAME if hasattr(args, name)}
    layout = getattr(args, "layout", None)
    pp = getattr(args, "pp", None) if layout is None else layout.pp
    vp = getattr(args, "vp", None) if layout is None else layout.vp
    return TransformerConfig(
        **fields,
        pipeline_model_parallel_size=1 if pp is None else pp,
        # One chunk is no virtual pipeline.
        virtual_pipeline_model_parallel_size=None if vp in (None, 1) else vp,
        pipeline_model_parallel_layout=layout,
    )


def gpt_builder(
    args: Any,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pp_rank: int = 0,
    config: TransformerConfig | None = None,
    transformer_layer_spec: TransformerLayerSpec = TransformerLayer,
) -> GPTModel:
    """Builds a chunk of a GPT.

    Args:
        args: Read by `core_transformer_config_from_args` where `config` is None.
        pre_process: Whether the chunk holds the embedding.
        post_process: Whether the chunk holds the output layer.
        vp_stage: The chunk; None without a virtual pipeline.
        pp_rank: The rank.
        config: The model and its layout.
        transformer_layer_spec: Makes one layer from the configuration and its number.
    """
    config = config or core_transformer_config_from_args(args)
    chunk = 0 if vp_stage is None else vp_stage
    if config.layout.num_mtp_layers(pp_rank, chunk):
        raise config_error(
            f"the layout puts multi-token-prediction layers on rank {pp_rank}, chunk {chunk}; "
            "a GPT chunk has none",
            "leave `m` out of the layout, or pass a model builder that makes them",
        )
    return GPTModel(
        config,
        pp_rank=pp_rank,
        vp_stage=vp_stage,
        pre_process=pre_process,
        post_process=post_process,
        transformer_layer_spec=transformer_layer_spec,
    )


def model_provider(
    model_builder: ModelBuilder,
    args: Any = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pp_rank: int = 0,
    config: TransformerConfig | None = None,
) -> nn.Module:
    """Builds one chunk with `model_builder`; `partial(model_provider, gpt_builder)` makes GPTs."""
    return model_builder(
        args,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
        config=config,
    )


def get_model(
    provider: ModelProvider,
    config: TransformerConfig,
    *,
    pp_rank: int,
    args: Any = None,
    device: torch.device | str = "cpu",
) -> list[nn.Module]:
    """The chunks of one rank, one for each `vp_stage`; without a virtual pipeline one module.

    Args:
        provider: Makes a chunk, for example `partial(model_provider, gpt_builder)`.
        config: The model and its layout.
        pp_rank: The rank.
        args: Handed to the provider.
        device: Where the chunks live.

    Examples:
        >>> from functools import partial
        >>> config = TransformerConfig(
        ...     num_layers=8,
        ...     hidden_size=8,
        ...     num_attention_heads=2,
        ...     pipeline_model_parallel_size=2,
        ...     virtual_pipeline_model_parallel_size=2,
        ... )
        >>> chunks = get_model(partial(model_provider, gpt_builder), config, pp_rank=1)
        >>> [list(chunk.decoder.layers) for chunk in chunks]
        [['2', '3'], ['6', '7']]
    """
    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else list(range(virtual))
    chunks = []
    for vp_stage in stages:
        chunk = provider(
            args,
            pre_process=is_pipeline_first_stage(
                config, pp_rank=pp_rank, ignore_virtual=False, vp_stage=vp_stage
            ),
            post_process=is_pipeline_last_stage(
                config, pp_rank=pp_rank, ignore_virtual=False, vp_stage=vp_stage
            ),
            vp_stage=vp_stage,
            pp_rank=pp_rank,
            config=config,
        )
        chunks.append(chunk.to(device))
    _share_tied_weight(chunks)
    return chunks


def _share_tied_weight(chunks: list[nn.Module]) -> None:
    """Lets first and last stage use one parameter where one rank holds both, as `v` has it."""
    shared: nn.Parameter | None = None
    for chunk in chunks:
        if not isinstance(chunk, GPTModel):
            continue
        weight = chunk.shared_embedding_or_output_weight()
        if shared is None:
            shared = weight
        elif weight is not None:
            assert chunk.embedding is not None
            chunk.embedding.word_embeddings.weight = shared
