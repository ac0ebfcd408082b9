"""`pipeloom train`: train a pipeline-parallel GPT."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pipeloom.cli.interrupt import keep_on_interrupt

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom train
  pipeloom train --schedule zb_v --pp 4 --steps 50 --data README.md docs
  pipeloom train --config run.toml --lr 1e-3 --dtype bfloat16
  pipeloom train --resume runs/train-1 --steps 300 --pp 4 --schedule 1f1b
  torchrun --nproc-per-node 2 --module pipeloom train
  torchrun --nproc-per-node 4 --module pipeloom train --dp 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from pipeloom.training.options import add_train_arguments

    add_train_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train; a Ctrl-C keeps the checkpoint."""
    from pipeloom.training.command import SIGNALLED, run_train

    def on_start() -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            # Alone, a run saves where it stands. One of several can't, and may sit in a wait for
            # peers that no signal reaches, so it ends as other commands do; its last checkpoint is
            # whole. While torch loads, there is nothing to save.
            keep_on_interrupt()

    status = run_train(arguments, on_start=on_start)
    if status > SIGNALLED:
        # All is written; taking torch and its threads down would take another second.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
