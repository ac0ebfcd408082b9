"""Train a model of two modules in a pipeline of two ranks.

    python examples/two_modules.py                                  # both ranks in this process
    torchrun --nproc-per-node 2 examples/two_modules.py             # one process a rank

Change `front`, `back` and `sum_of_squares` to yours.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.runtime import Pipeline


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss of a microbatch: a sum, the runtime divides by the step's number of elements."""
    return (output - target).square().sum()


def main(steps: int = 60) -> list[float]:
    """Train, and give the losses of each step (none on ranks that do not end the pipeline)."""
    torch.manual_seed(0)  # on every rank: all start from the same model and data
    front = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
    back = nn.Linear(32, 1)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)

    plan = pl.plan("1f1b", pp=2, num_microbatches=4)
    transport = None  # all ranks in this process
    if "RANK" in os.environ:
        from pipeloom.runtime.distributed import TorchTransport

        dist.init_process_group("gloo")
        transport = TorchTransport()
    pipeline = Pipeline(plan, [front, back], sum_of_squares, transport=transport)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=1e-2)

    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = pipeline.step(x, y).loss
        pipeline.clip_grad_norm(1.0)  # over all stages
        optimizer.step()
        if loss is not None:  # only the last stage has one
            losses.append(float(loss))
            if step % 20 == 0:
                print(f"step {step:3d}  loss {losses[-1]:.4f}")
    loss = pipeline.evaluate(x, y).loss
    if loss is not None:
        print(f"evaluation  loss {float(loss):.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
