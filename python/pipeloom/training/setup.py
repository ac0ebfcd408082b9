"""Model, optimizer and learning-rate schedule of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeloom.model.builders import ModelProvider, core_transformer_config_from_args, get_model

if TYPE_CHECKING:
    from pipeloom.training.arguments import TrainingArguments

Chunks = Mapping[int, list[nn.Module]]
"""Rank -> its chunks, for the ranks that this process hosts."""


class OptimizerParamScheduler:
    """Learning rate: linear warm-up, then half a cosine down to the minimum.

    Args:
        optimizer: Whose learning rate is set.
        lr: Highest rate.
        min_lr: Rate from `decay_steps` on.
        warmup_steps: Steps of warm-up.
        decay_steps: Steps, warm-up included, after which `min_lr` is reached.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
        >>> schedule = OptimizerParamScheduler(
        ...     optimizer, lr=1.0, min_lr=0.0, warmup_steps=2, decay_steps=4
        ... )
        >>> [round(schedule.rate(step), 3) for step in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        min_lr: float,
        warmup_steps: int,
        decay_steps: int,
    ) -> None:
        """Sets the rate of step 0."""
        self.optimizer = optimizer
        self.lr, self.min_lr = lr, min_lr
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps
        self.num_steps = 0
        self._apply()

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if step >= self.decay_steps:
            return self.min_lr
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))

    def step(self) -> None:
        """Goes on to the next step's rate."""
        self.num_steps += 1
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """All numbers of the schedule, and where it stands."""
        names = ("lr", "min_lr", "warmup_steps", "decay_steps", "num_steps")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` stood, along its curve."""
        for name, value in state.items():
            setattr(self, name, value)
        self._apply()


def all_chunks(model: Chunks) -> list[nn.Module]:
    """The chunks of all hosted ranks, in rank and chunk order; one that ranks share comes once."""
    chunks = [chunk for rank in sorted(model) for chunk in model[rank]]
    return list({id(chunk): chunk for chunk in chunks}.values())


def parameters_of(chunks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The trainable parameters of the chunks; one that chunks share comes once."""
    unique = {id(value): value for chunk in chunks for value in chunk.parameters()}
    return [value for value in unique.values() if value.requires_grad]


def make_optimizer(args: TrainingArguments, chunks: Iterable[nn.Module]) -> torch.optim.AdamW:
    """One AdamW over the chunks: matrices decay, vectors (norms, biases) do not.

    Its state exists from the start, so that a checkpoint of step 0 is like any other.
    """
    parameters = parameters_of(chunks)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        # A rank of nothing but empty stages has no parameters, and still takes its steps.
        groups if parameters else [{"params": [torch.zeros(0, requires_grad=True)]}],
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def setup_model_and_optimizer(
    model_provider: ModelProvider,
    args: TrainingArguments,
    *,
    local_ranks: Iterable[int],
    device: torch.device | str = "cpu",
) -> tuple[dict[int, list[nn.Module]], torch.optim.AdamW, OptimizerParamScheduler]:
    """Builds the chunks of the hosted ranks, one optimizer over them, and its schedule.

    Args:
        model_provider: For example `partial(model_provider, gpt_builder)`.
        args: The run.
        local_ranks: Ranks of the pipeline that this process hosts.
        device: Where the chunks live.

    Returns:
        Model (rank -> chunks), optimizer and `opt_param_scheduler`.
    """
    config = core_transformer_config_from_args(args)
    built: dict[int, list[nn.Module]] = {}
    model: dict[int, list[nn.Module]] = {}
    for rank in local_ranks:
        model[rank] = []
        # A second replica runs the other way: its chunks on this rank are the mirrored rank's.
        # Where one process has both ranks, the replicas are the same modules.
        for source in (rank, args.pp - 1 - rank)[: args.make_plan().num_replicas]:
            if source not in built:
                built[source] = get_model(
                    model_provider, config, pp_rank=source, args=args, device=device
                )
            model[rank] += built[source]
    optimizer = make_optimizer(args, all_chunks(model))
    scheduler = OptimizerParamScheduler(
        optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        warmup_steps=args.lr_warmup_steps,
        decay_steps=args.lr_decay_steps or args.steps,
    )
    return model, optimizer, scheduler
