"""A GPT, or the chunk of it that one pipeline stage holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from pipeloom.model.transformer_block import TransformerBlock, TransformerLayerSpec
from pipeloom.model.transformer_layer import DropoutKey, TransformerLayer, blank_linear, derive_seed

if TYPE_CHECKING:
    from pipeloom.model.config import TransformerConfig

IGNORED_LABEL = -100
"""A label that carries no loss."""


class LanguageModelEmbedding(nn.Module):
    """Token ids `[batch, sequence]` to hidden states `[sequence, batch, hidden]`."""

    def __init__(self, config: TransformerConfig) -> None:
        """Makes the embedding without initial values."""
        super().__init__()
        embedding = nn.Embedding(config.vocab_size, config.hidden_size, device="meta")
        self.word_embeddings = embedding.to_empty(device="cpu")

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks `tokens` up, sequence first."""
        return F.embedding(tokens.t().contiguous(), self.word_embeddings.weight)


class GPTModel(nn.Module):
    """The chunk at (`pp_rank`, `vp_stage`) of a GPT; without a pipeline, all of it.

    Parameter names are the whole model's, and initial values depend on name and seed alone, so
    chunks of any layout are pieces of one and the same model. With tied weights a last stage
    apart from the first keeps a copy of the embedding under the embedding's name.

    Args:
        config: The model and its layout.
        pp_rank: The rank.
        vp_stage: The chunk; None without a virtual pipeline.
        pre_process: Whether the chunk holds the embedding.
        post_process: Whether the chunk holds the final norm, the output layer and the loss.
        transformer_layer_spec: Makes one layer from the configuration and its global number.

    Examples:
        >>> import torch
        >>> from pipeloom.model.config import TransformerConfig
        >>> model = GPTModel(TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2))
        >>> model(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 257])
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pp_rank: int = 0,
        vp_stage: int | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        transformer_layer_spec: TransformerLayerSpec = TransformerLayer,
    ) -> None:
        """Builds and initializes the chunk."""
        super().__init__()
        self.config, self.vp_stage = config, vp_stage
        self.pre_process, self.post_process = pre_process, post_process
        tied = not config.untie_embeddings_and_output_weights
        self.embedding = None
        if pre_process or (post_process and tied):
            self.embedding = LanguageModelEmbedding(config)
        self.decoder = TransformerBlock(
            config,
            pp_rank=pp_rank,
            vp_stage=vp_stage,
            post_process=post_process,
            transformer_layer_spec=transformer_layer_spec,
        )
        self.output_layer = None
        if post_process and not tied:
            self.output_layer = blank_linear(config.hidden_size, config.vocab_size, bias=False)
        initialize(self, config)
        self.to(dtype=config.pipeline_dtype)
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Gives the hidden states that the previous stage sent (unused where tokens enter)."""
        if isinstance(input_tensor, list):
            assert len(input_tensor) == 1, "a GPT chunk has one input"
            input_tensor = input_tensor[0]
        self.input_tensor = input_tensor

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """The weight that first and last stage share if tied; None where there is none."""
        if self.config.untie_embeddings_and_output_weights or self.embedding is None:
            return None
        weight = self.embedding.word_embeddings.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def forward(
        self,
        tokens: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        dropout_key: DropoutKey | None = None,
        checkpoint_activations: bool = False,
    ) -> Tensor:
        """Runs the chunk.

        Args:
            tokens: `[batch, sequence]` ids; only a chunk with the embedding reads them.
            labels: `[batch, sequence]` next ids, `IGNORED_LABEL` where none counts; only a chunk
                with the output layer reads them.
            dropout_key: (step, microbatch), for dropout; of a piece of a sequence, its first
                position too.
            checkpoint_activations: Store only the input and run the layers again in backward.

        Returns:
            Hidden states `[sequence, batch, hidden]`; on the last stage the loss of each token
            `[batch, sequence]`, or logits `[batch, sequence, vocab]` without labels.
        """
        hidden_states = self._input(tokens)
        half = self.config.compute_dtype == "bfloat16"
        with torch.autocast(hidden_states.device.type, torch.bfloat16, enabled=half):
            return self._run(hidden_states, labels, dropout_key, checkpoint_activations)

    def _run(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        dropout_key: DropoutKey | None,
        checkpoint_activations: bool,
    ) -> Tensor:
        hidden_states = self.decoder(
            hidden_states, dropout_key, checkpoint_activations=checkpoint_activations
        )
        if not self.post_process:
            # A stage of nothing must not send the very memory that it received.
            return (
                hidden_states if hidden_states is not self.input_tensor else hidden_states.clone()
            )
        return self._output(hidden_states, labels)

    def _input(self, tokens: Tensor | None) -> Tensor:
        if self.pre_process:
            assert self.embedding is not None
            assert tokens is not None, "the first stage needs tokens"
            hidden_states: Tensor = self.embedding(tokens)
            return hidden_states
        assert self.input_tensor is not None, "call set_input_tensor before a later stage"
        return self.input_tensor

    def _output(self, hidden_states: Tensor, labels: Tensor | None) -> Tensor:
        if self.output_layer is not None:
            weight = self.output_layer.weight
        else:
            assert self.embedding is not None
            weight = self.embedding.word_embeddings.weight
        logits = F.linear(hidden_states, weight)  # [sequence, batch, vocab]
        if labels is None:
            return logits.transpose(0, 1)
        sequence, batch, vocab = logits.shape
        losses = F.cross_entropy(
            logits.view(-1, vocab).float(),
            labels.t().reshape(-1),
            ignore_index=IGNORED_LABEL,
            reduction="none",
        )
        return losses.view(sequence, batch).t()


@torch.no_grad()
def initialize(model: nn.Module, config: TransformerConfig) -> None:
    """Gives every parameter the values that its name and `config.seed` determine.

    Matrices are normal with `init_method_std`, scaled by `1/sqrt(2 num_layers)` where a branch
    joins the residual stream; norm weights are one and biases zero.
    """
    residual_scale = 1.0 / math.sqrt(2.0 * config.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            joins = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = config.init_method_std * (residual_scale if joins else 1.0)
            # Drawn on the CPU: a GPU has its own stream of random numbers.
            generator = torch.Generator().manual_seed(derive_seed(config.seed, name))
            values = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            parameter.copy_(values)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
