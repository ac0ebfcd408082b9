"""A GPT in chunks: the example model of the runtime, which runs any list of `nn.Module`."""

from pipeloom.model.builders import (
    core_transformer_config_from_args,
    get_model,
    gpt_builder,
    model_provider,
)
from pipeloom.model.config import TransformerConfig
from pipeloom.model.gpt_model import GPTModel
from pipeloom.model.transformer_block import (
    TransformerBlock,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from pipeloom.model.transformer_layer import TransformerLayer

__all__ = [
    "GPTModel",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerLayer",
    "core_transformer_config_from_args",
    "get_model",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "gpt_builder",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "model_provider",
]
