"""`pipeloom train`: options in, a run, and where to find what it left."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

from pipeloom import ConfigError
from pipeloom.training.errors import DivergedError
from pipeloom.training.options import arguments_from

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pipeloom.training.pretrain import TrainingResult

SIGNALLED = 128
"""Plus the signal is the status of a run that one ended: 130 is Ctrl-C, 143 SIGTERM, 129 SIGHUP."""
FAILED = 1


def require_torch() -> None:
    """Makes ready for torch, or says clearly that it is not installed.

    Raises:
        ConfigError: With the line that installs it.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "training and generating need PyTorch, which is not installed\n"
            "hint: pip install 'pipeloom[train]'"
        )
    # torch's threads spin while they wait, which makes a step ten times slower on cores that
    # other programs use too; on free cores, waiting asleep costs nothing that shows.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def run_train(namespace: argparse.Namespace, *, on_start: Callable[[], None] = lambda: None) -> int:
    """Runs `pipeloom train`; returns the exit status.

    Args:
        namespace: The options.
        on_start: Called when all is loaded and the options are found good.
    """
    require_torch()
    from functools import partial

    from pipeloom.model import gpt_builder, model_provider
    from pipeloom.runtime.errors import PipelineError
    from pipeloom.training.data import train_valid_test_datasets_provider
    from pipeloom.training.pretrain import pretrain

    args = arguments_from(namespace)
    on_start()
    try:
        result = pretrain(
            train_valid_test_datasets_provider, partial(model_provider, gpt_builder), args=args
        )
    except KeyboardInterrupt as interrupt:
        kept = str(interrupt) or "nothing was trained yet"
        number = getattr(interrupt, "number", signal.SIGINT)
        word = "interrupted" if number == signal.SIGINT else "terminated"
        return _end(f"\n{word}: {kept}", SIGNALLED + number, all_say_it=False)
    except (DivergedError, PipelineError) as error:
        # A lost or late peer is told by each process as it sees it; the rest is the same on all.
        return _end(
            f"pipeloom: error: {error}", FAILED, all_say_it=isinstance(error, PipelineError)
        )
    if result.is_first:
        _print_result(result, as_json=getattr(namespace, "json", False))
    return 0


def _end(message: str, status: int, *, all_say_it: bool) -> int:
    """Says why the run ended early, and ends this process if it is one of several."""
    if all_say_it or os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # torch's threads may wait for peers that are gone.
        os._exit(status)
    return status


def _print_result(result: TrainingResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    unit = "byte" if result.is_bytes else "token"
    print(f"held-out loss  {result.valid_loss:.4f} nats a {unit}")
    print(f"checkpoint     {result.checkpoint}")
    print(f"losses         {result.folder / 'loss.jsonl'}")
    if result.loss_curve:
        print(f"loss curve     {', '.join(map(str, result.loss_curve))}")
    else:
        print("loss curve     not drawn: pip install 'pipeloom[plot]'")
    if result.plan_picture is not None:
        print(f"plan           {result.plan_picture}")
    print(f"trace          {result.trace}  (open in ui.perfetto.dev)")
    if result.profile is not None:
        print(f"profile        {result.profile}  (pipeloom show {result.folder})")
    print(f"sample text    pipeloom generate --checkpoint {result.folder}")
