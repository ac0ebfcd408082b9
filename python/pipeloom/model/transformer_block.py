"""The run of consecutive layers that one chunk holds, and the rules of which they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pipeloom.model.config import config_error
from pipeloom.model.transformer_layer import DropoutKey, TransformerLayer, make_norm
from pipeloom.runtime.recompute import recomputed

if TYPE_CHECKING:
    from pipeloom.model.config import TransformerConfig

TransformerLayerSpec = Callable[["TransformerConfig", int], nn.Module]
"""`spec(config, layer_number)` makes a layer whose forward is `(hidden_states, dropout_key)`."""


def _stage_of(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> tuple[int, int]:
    pp, vp = config.pipeline_model_parallel_size, config.num_chunks
    if not 0 <= pp_rank < pp:
        raise config_error(f"pp_rank={pp_rank} is not in 0..{pp - 1}", f"the model has pp={pp}")
    if vp_stage is None:
        if vp > 1:
            raise config_error(
                f"vp_stage is missing: each rank has vp={vp} chunks",
                f"give vp_stage in 0..{vp - 1}",
            )
        return pp_rank, 0
    if not 0 <= vp_stage < vp:
        raise config_error(f"vp_stage={vp_stage} is not in 0..{vp - 1}", f"the model has vp={vp}")
    return pp_rank, vp_stage


def get_num_layers_to_build(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int = 0
) -> int:
    """Layers of one chunk.

    Args:
        config: The model and its layout.
        vp_stage: The chunk; None only without a virtual pipeline.
        pp_rank: The rank.

    Raises:
        ConfigError: A rank or chunk that the pipeline does not have.
    """
    return config.layout.num_layers(*_stage_of(config, vp_stage, pp_rank))


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int = 0
) -> int:
    """Layers of the whole model before this chunk's first; arguments as above."""
    return config.layout.offset(*_stage_of(config, vp_stage, pp_rank))


def is_pipeline_first_stage(
    config: TransformerConfig,
    *,
    pp_rank: int,
    ignore_virtual: bool = True,
    vp_stage: int | None = None,
) -> bool:
    """Whether the rank (or, not ignoring the virtual pipeline, the chunk) holds the embedding.

    Examples:
        >>> from pipeloom.model.config import TransformerConfig
        >>> config = TransformerConfig(
        ...     num_layers=4,
        ...     hidden_size=8,
        ...     num_attention_heads=2,
        ...     pipeline_model_parallel_size=2,
        ...     virtual_pipeline_model_parallel_size=2,
        ... )
        >>> is_pipeline_first_stage(config, pp_rank=0)
        True
        >>> is_pipeline_first_stage(config, pp_rank=0, ignore_virtual=False, vp_stage=1)
        False
    """
    if ignore_virtual:
        return any(config.layout.pre_process(pp_rank, vp) for vp in range(config.num_chunks))
    return config.layout.pre_process(*_stage_of(config, vp_stage, pp_rank))


def is_pipeline_last_stage(
    config: TransformerConfig,
    *,
    pp_rank: int,
    ignore_virtual: bool = True,
    vp_stage: int | None = None,
) -> bool:
    """Whether the rank (or the chunk) holds the output layer and the loss."""
    if ignore_virtual:
        return any(config.layout.post_process(pp_rank, vp) for vp in range(config.num_chunks))
    return config.layout.post_process(*_stage_of(config, vp_stage, pp_rank))


class TransformerBlock(nn.Module):
    """A chunk's layers, named by their place in the whole model.

    An empty block (a stage of an embedding, of a loss, or of nothing) passes its input on.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pp_rank: int = 0,
        vp_stage: int | None = None,
        post_process: bool = True,
        transformer_layer_spec: TransformerLayerSpec = TransformerLayer,
    ) -> None:
        """Builds the layers of (`pp_rank`, `vp_stage`), with the final norm on the last stage."""
        super().__init__()
        offset = get_transformer_layer_offset(config, vp_stage, pp_rank)
        count = get_num_layers_to_build(config, vp_stage, pp_rank)
        # A dict, not a list: keys are whole-model indices, so names agree in every layout.
        self.layers = nn.ModuleDict(
            {
                str(index): transformer_layer_spec(config, index + 1)
                for index in range(offset, offset + count)
            }
        )
        self.final_layernorm = make_norm(config) if post_process else None

    def forward(
        self,
        hidden_states: Tensor,
        dropout_key: DropoutKey | None = None,
        *,
        checkpoint_activations: bool = False,
    ) -> Tensor:
        """Runs the layers on `[sequence, batch, hidden]`.

        With `checkpoint_activations` only the chunk's input is stored and its layers run again
        in the backward pass.
        """
        if checkpoint_activations and self.layers:
            hidden_states = recomputed(self._run_layers, hidden_states, dropout_key)
        else:
            hidden_states = self._run_layers(hidden_states, dropout_key)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _run_layers(self, hidden_states: Tensor, dropout_key: DropoutKey | None) -> Tensor:
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, dropout_key)
        return hidden_states
