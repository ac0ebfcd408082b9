"""Split a Hugging Face GPT-2 over a pipeline and train it; the loss is that of the whole model.

    pip install 'pipeloom[torch,hf]'
    python examples/hf_gpt2.py                                      # all ranks in this process
    torchrun --nproc-per-node 2 examples/hf_gpt2.py                 # one process a rank

The weights are random, from a config: nothing is downloaded. GPT-2 ties its output layer to its
embedding, so the first and the last stage hold one weight.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import pipeloom as pl
from pipeloom.runtime import Pipeline, TiedWeight, reduce_tied_gradients


class Gpt2Chunk(nn.Module):
    """Some consecutive blocks of a GPT-2, with the embedding or the output layer at its ends."""

    def __init__(
        self, model: GPT2LMHeadModel, layers: list[int], *, first: bool, last: bool
    ) -> None:
        super().__init__()
        gpt = model.transformer
        self.tokens, self.positions = (gpt.wte, gpt.wpe) if first else (None, None)
        self.blocks = nn.ModuleList(gpt.h[number - 1] for number in layers)
        self.norm, self.head = (gpt.ln_f, model.lm_head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, sequence) or states (batch, sequence, hidden) -> states or logits."""
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the tokens' losses."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def build(layout: pl.Layout, seed: int = 0) -> tuple[GPT2LMHeadModel, dict[int, list[nn.Module]]]:
    """The whole model, and its chunks by rank; they share parameters."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=layout.num_layers_total, n_embd=32, n_head=4, vocab_size=97, n_positions=32,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    chunks = {
        rank: [
            Gpt2Chunk(
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


def tied_embedding(model: GPT2LMHeadModel, layout: pl.Layout, ranks: tuple[int, ...]) -> TiedWeight:
    """The embedding, held by the ranks of the first and of the last stage."""
    stages = [(rank, vp_stage) for rank in range(layout.pp) for vp_stage in range(layout.vp)]
    owners = [
        rank for rank, v in stages if layout.pre_process(rank, v) or layout.post_process(rank, v)
    ]
    weight = model.transformer.wte.weight
    return TiedWeight({rank: weight for rank in owners if rank in ranks}, owners)


def main(schedule: str = "interleaved_1f1b", vp: int = 2, steps: int = 5) -> list[float]:
    """Train on one batch, and give the losses (none on ranks that do not end the pipeline)."""
    plan = pl.plan(schedule, pp=2, vp=vp, num_microbatches=4)
    layout = pl.Layout.even(6, pp=2, vp=vp, placement=plan.placement)
    model, chunks = build(layout)
    transport = None
    if "RANK" in os.environ:
        from pipeloom.runtime.distributed import TorchTransport

        dist.init_process_group("gloo")
        transport = TorchTransport()
    pipeline = Pipeline(plan, chunks, loss_sum, transport=transport)
    tied = [tied_embedding(model, layout, pipeline.transport.local_ranks)]
    tied = [weight for weight in tied if weight.owners]
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)

    tokens = torch.randint(0, 97, (8, 17))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(tokens[:, :-1], tokens[:, 1:]).loss
        reduce_tied_gradients(tied, pipeline.transport)
        pipeline.clip_grad_norm(1.0, tied=tied)
        optimizer.step()
        if loss is not None:
            losses.append(float(loss))
            print(f"step {step}  loss {losses[-1]:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
