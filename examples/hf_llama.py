"""Split a Hugging Face Llama over a pipeline and train it, with padded sequences.

    pip install 'pipeloom[torch,hf]'
    python examples/hf_llama.py                                     # all ranks in this process
    torchrun --nproc-per-node 2 examples/hf_llama.py                # one process a rank

The weights are random, from a config: nothing is downloaded. A stage passes on its states with the
attention mask: a dict crosses the boundary, and only the states get a gradient.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import pipeloom as pl
from pipeloom.runtime import Pipeline

IGNORED = -100  # label of padding


class LlamaChunk(nn.Module):
    """Some consecutive layers of a Llama, with the embedding or the output layer at its ends."""

    def __init__(
        self, model: LlamaForCausalLM, layers: list[int], *, first: bool, last: bool
    ) -> None:
        super().__init__()
        llama = model.model
        self.embedding = llama.embed_tokens if first else None
        self.rotary = llama.rotary_emb  # no parameters: every stage has its own
        self.layers = nn.ModuleList(llama.layers[number - 1] for number in layers)
        self.norm, self.head = (llama.norm, model.lm_head) if last else (None, None)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor] | Tensor:
        """Tokens (batch, sequence) or states (batch, sequence, hidden) -> states or logits.

        `mask` (batch, sequence) is true where there is a token.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        length = x.shape[1]
        position_ids = torch.arange(length, device=x.device).unsqueeze(0)
        rotations = self.rotary(x, position_ids=position_ids)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        attended = causal & mask[:, None, None, :]  # (batch, 1, query, key)
        for layer in self.layers:
            x = layer(
                x,
                attention_mask=attended,
                position_ids=position_ids,
                position_embeddings=rotations,
            )
        return {"x": x, "mask": mask} if self.head is None else self.head(self.norm(x))


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the tokens' losses, padding left out."""
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )


def count(labels: Tensor) -> int:
    """Number of losses in the sum."""
    return int((labels != IGNORED).sum())


def build(layout: pl.Layout, seed: int = 0) -> tuple[LlamaForCausalLM, dict[int, list[nn.Module]]]:
    """The whole model, and its chunks by rank; they share parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=layout.num_layers_total, hidden_size=32, intermediate_size=64,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=97, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    chunks = {
        rank: [
            LlamaChunk(
                model,
                layout.layers(rank, vp_stage),
                first=layout.pre_process(rank, vp_stage),
                last=layout.post_process(rank, vp_stage),
            )
            for vp_stage in range(layout.vp)
        ]
        for rank in range(layout.pp)
    }
    return model, chunks


def batch(seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Eight sequences of 9 to 16 tokens, padded on the right: inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (8, 17), generator=generator)
    lengths = torch.randint(9, 17, (8, 1), generator=generator)
    mask = torch.arange(16) < lengths
    return {"x": tokens[:, :-1], "mask": mask}, tokens[:, 1:].masked_fill(~mask, IGNORED)


def main(schedule: str = "zb_v", vp: int = 2, steps: int = 5) -> list[float]:
    """Train on one batch, and give the losses (none on ranks that do not end the pipeline)."""
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4)
    layout = pl.Layout.even(6, pp=2, vp=vp, placement=plan.placement)
    _, chunks = build(layout)
    transport = None
    if "RANK" in os.environ:
        from pipeloom.runtime.distributed import TorchTransport

        dist.init_process_group("gloo")
        transport = TorchTransport()
    pipeline = Pipeline(plan, chunks, loss_sum, transport=transport, count=count)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    inputs, labels = batch()
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(inputs, labels).loss
        pipeline.clip_grad_norm(1.0)
        optimizer.step()
        if loss is not None:
            losses.append(float(loss))
            print(f"step {step}  loss {losses[-1]:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
