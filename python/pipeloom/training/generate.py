"""Samples text from a checkpoint: the chunks of any layout, put together as one model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeloom import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `pipeloom generate`."""
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="FOLDER", help="folder of a run or of a checkpoint")
    add("--prompt", default="", metavar="TEXT", help="text to go on from (default: a new document)")
    add(
        "--max-new-tokens",
        type=int,
        default=400,
        metavar="INT",
        help="tokens to sample (default: 400)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="FLOAT",
        help="0: the likeliest (default: 0.8)",
    )
    add(
        "--top-k",
        type=int,
        default=40,
        metavar="INT",
        help="sample among so many; 0: all (default: 40)",
    )
    add("--seed", type=int, default=1234, metavar="INT", help="of the samples (default: 1234)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs")


_COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Raises:
        ConfigError: A value is out of range.
    """

    max_new_tokens: int = 400
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 1234

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            self._require(name, not getattr(self, name) < least, f"is below {least}")
        self._require("seed", self.seed < 1 << 63, "is not below 2^63")
        # float32 knows no smaller steps: what is drawn would be no number.
        drawable = self.temperature == 0 or _COLDEST <= self.temperature < float("inf")
        self._require("temperature", drawable, f"is not 0, nor at least {_COLDEST} and finite")

    def _require(self, name: str, condition: bool, what: str) -> None:
        if not condition:
            raise ConfigError(
                f"{name}={getattr(self, name)} {what}\nhint: set it with --{name.replace('_', '-')}"
            )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A whole model in one process, with what its run says about it."""

    model: Any
    """The `GPTModel`, in evaluation mode."""
    arguments: dict[str, Any]
    """Arguments of the run."""
    path: Path
    """The checkpoint."""


def load_model(checkpoint: str | Path, *, device: str = "cpu") -> LoadedModel:
    """The whole model of a checkpoint, whatever pipeline wrote it.

    Raises:
        CheckpointError: There is no whole checkpoint, or it is damaged.
    """
    from pipeloom.model import GPTModel, TransformerConfig
    from pipeloom.training.checkpoint import load_checkpoint, require_whole, resolve_checkpoint
    from pipeloom.training.processes import Processes

    path = resolve_checkpoint(checkpoint)
    state = require_whole(path)
    model = GPTModel(TransformerConfig(**state.architecture)).to(device)
    load_checkpoint(path, chunks=[model], optimizer=None, processes=Processes())
    return LoadedModel(model.eval(), state.arguments, path)


def sample_tokens(
    model: Any,
    prompt: Sequence[int],
    *,
    context: int,
    sampling: Sampling,
) -> Iterator[int]:
    """Draws tokens one by one, each given the last `context` ones.

    Args:
        model: Gives logits `[batch, sequence, vocab]` for tokens `[batch, sequence]`.
        prompt: At least one id.
        context: Longest sequence that the model was trained on.
        sampling: How to draw.
    """
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(sampling.max_new_tokens):
        with torch.no_grad():
            tokens = torch.tensor([ids[-context:]], device=device)
            logits = model(tokens)[0, -1].float().cpu()
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            if 0 < sampling.top_k < logits.numel():
                least = logits.topk(sampling.top_k).values[-1]
                logits = logits.masked_fill(logits < least, float("-inf"))
            weights = torch.softmax(logits / sampling.temperature, dim=-1)
            token = int(torch.multinomial(weights, 1, generator=generator))
        ids.append(token)
        yield token


def run_generate(namespace: argparse.Namespace) -> int:
    """Runs `pipeloom generate`; returns the exit status."""
    from pipeloom.training.command import require_torch

    require_torch()
    from pipeloom.training.corpus import END_OF_DOCUMENT
    from pipeloom.training.session import require_gpu

    names = ("max_new_tokens", "temperature", "top_k", "seed")
    sampling = Sampling(**{name: getattr(namespace, name) for name in names})
    if namespace.device == "cuda":
        require_gpu()
    loaded = load_model(namespace.checkpoint, device=namespace.device)
    is_bytes = loaded.arguments["is_bytes"]
    if not is_bytes and namespace.prompt:
        raise ConfigError(
            "--prompt needs a model of bytes; this one was trained on ids of another tokenizer\n"
            "hint: leave --prompt out; ids are printed"
        )
    start = END_OF_DOCUMENT if is_bytes else 0
    # As the bytes that the shell gave, in UTF-8 or not.
    prompt = list(namespace.prompt.encode("utf-8", "surrogateescape")) or [start]
    context = loaded.arguments["seq_length"]
    tokens = sample_tokens(loaded.model, prompt, context=context, sampling=sampling)
    if getattr(namespace, "json", False):
        ids = list(tokens)
        text = _decode(ids) if is_bytes else None
        result = {"checkpoint": str(loaded.path), "prompt": namespace.prompt, "tokens": ids}
        print(json.dumps({**result, "text": text}))
        return 0
    if not is_bytes:
        print(*tokens)
        return 0
    _print_as_it_comes(namespace.prompt, tokens)
    return 0


def _decode(ids: Sequence[int]) -> str:
    return bytes(token if token < 256 else 10 for token in ids).decode(errors="replace")


def _print_as_it_comes(prompt: str, tokens: Iterator[int]) -> None:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    sys.stdout.write(prompt.encode("utf-8", "surrogateescape").decode(errors="replace"))
    for token in tokens:
        # The end of a document is shown as the line that it breaks.
        sys.stdout.write(decoder.decode(bytes([token if token < 256 else 10])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    sys.stdout.flush()
