"""Microbatches as a function of seed and position alone, so that every layout sees the same."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeloom.runtime.batches import piece_sizes
from pipeloom.training.corpus import load_corpus
from pipeloom.training.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeloom.training.arguments import TrainingArguments


class Microbatch(NamedTuple):
    """What one forward step reads: a microbatch, or a piece of its sequences."""

    step: int
    """The optimizer step."""
    number: int
    """Its place in the step."""
    tokens: Tensor
    """Ids, `[micro_batch_size, seq_length]`."""
    labels: Tensor
    """The id that follows each, same shape."""
    start: int = 0
    """Position of the first in its sample."""


@dataclass(frozen=True)
class TokenDataset:
    """Blocks of `seq_length` tokens, each once in an epoch, in an order drawn from the seed.

    Attributes:
        tokens: All ids, one after another.
        seq_length: Tokens of a sample.
        seed: What the order of each epoch depends on; None keeps the text's own order.

    Examples:
        >>> import numpy as np
        >>> dataset = TokenDataset(np.arange(10), seq_length=3, seed=None)
        >>> len(dataset), dataset.sample(1).tolist(), dataset.sample(3).tolist()
        (3, [3, 4, 5, 6], [0, 1, 2, 3])
    """

    tokens: NDArray[np.generic]
    seq_length: int
    seed: int | None

    def __post_init__(self) -> None:
        """Refuses text that does not fill one sample."""
        if len(self) < 1:
            raise DataError(
                f"the text is too small: {self.tokens.size} tokens do not fill one sample of "
                f"seq_length={self.seq_length} and the token after it",
                "give more text, or a shorter seq_length",
            )

    def __len__(self) -> int:
        """Samples of an epoch."""
        return (int(self.tokens.size) - 1) // self.seq_length

    def sample(self, index: int) -> NDArray[np.int64]:
        """The `seq_length + 1` ids of sample `index`, counted on over all epochs."""
        epoch, place = divmod(index, len(self))
        block = place if self.seed is None else int(_order(len(self), self.seed, epoch)[place])
        start = block * self.seq_length
        return self.tokens[start : start + self.seq_length + 1].astype(np.int64)


@functools.lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


def microbatches(
    dataset: TokenDataset,
    *,
    step: int,
    first_sample: int,
    num_microbatches: int,
    micro_batch_size: int,
    first_number: int = 0,
    num_seq_pieces: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Microbatch]:
    """The microbatches of one step; every chunk gets an iterator of its own.

    Args:
        dataset: Where samples come from.
        step: The optimizer step, for dropout.
        first_sample: Samples that earlier steps used.
        num_microbatches: Microbatches of the step.
        micro_batch_size: Samples of each.
        first_number: Number of the first microbatch: those before are other pipelines'.
        num_seq_pieces: Pieces of each microbatch, given one after another.
        device: Where the ids go.
    """
    sizes = piece_sizes(dataset.seq_length, num_seq_pieces)
    for index in range(num_microbatches):
        start = first_sample + (first_number + index) * micro_batch_size
        rows = np.stack([dataset.sample(start + row) for row in range(micro_batch_size)])
        ids = torch.from_numpy(rows).to(device)
        begin = 0
        for size in sizes:
            end = begin + size
            tokens, labels = ids[:, begin:end], ids[:, begin + 1 : end + 1]
            yield Microbatch(step, first_number + index, tokens, labels, begin)
            begin = end


def train_valid_test_datasets_provider(
    args: TrainingArguments,
) -> tuple[TokenDataset, TokenDataset, None]:
    """Training and held-out text, each in an order drawn from the seed; no test text.

    Sets `args.vocab_size`, `args.is_bytes` and `args.data_fingerprint` from what it read.
    """
    corpus = load_corpus(args.data)
    args.set_corpus(corpus)
    try:
        train = TokenDataset(corpus.train, args.seq_length, args.seed)
        # In an order of its own, so that a short evaluation draws from all held-out files.
        valid = TokenDataset(corpus.valid, args.seq_length, args.seed)
    except DataError as error:
        raise DataError(
            f"{corpus.source}: training part {corpus.train.size} tokens, held-out part "
            f"{corpus.valid.size} tokens; each must fill a sample of "
            f"seq_length={args.seq_length} and the token after it",
            "give more text with --data, or a shorter --seq-length",
        ) from error
    return train, valid, None
