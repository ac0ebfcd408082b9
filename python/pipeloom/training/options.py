"""The command line of `pipeloom train`, and its configuration files."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeloom import ConfigError
from pipeloom.training.arguments import TrainingArguments, choices_of, type_of

if TYPE_CHECKING:
    import argparse

# A run that goes on from a checkpoint may change these: they do not change what it computes.
FREE_TO_CHANGE = frozenset(
    {
        *("steps", "device", "transport", "data", "out", "resume", "save_interval"),
        "keep_checkpoints",
        *("eval_interval", "eval_microbatches", "log_interval", "timeout_s", "tensorboard"),
        "profile",
        *("pp", "vp", "schedule", "layout_text", "plan", "microbatch_group_size", "recompute"),
        *("num_seq_pieces", "num_microbatches_with_partial_activation_checkpoints", "p2p"),
        # As long as their product stays: so many microbatches make a step.
        *("dp", "num_microbatches"),
    }
)
# What a plan says by itself.
_OF_THE_PLAN = (
    *("pp", "vp", "schedule", "num_microbatches", "microbatch_group_size", "recompute"),
    "num_seq_pieces",
    "num_microbatches_with_partial_activation_checkpoints",
)


def _options() -> dict[str, dataclasses.Field[Any]]:
    """The fields that are options, by the name that the command line and files use."""
    return {
        spec.metadata.get("option", spec.name): spec
        for spec in dataclasses.fields(TrainingArguments)
        if not spec.metadata.get("hidden")
    }


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for every field; those not given are absent from the namespace.

    So that a resumed run, and a configuration file, can tell what its caller asked for from what
    is only a default.
    """
    import argparse

    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML or JSON file of these options by name, as in num_layers = 8; flags win over it",
    )
    for option, spec in _options().items():
        settings: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS}
        shown = spec.default not in (None, False, dataclasses.MISSING)
        default = f" (default: {spec.default})" if shown else ""
        settings["help"] = (spec.metadata["help"] + default).replace("%", "%%")
        if choices := choices_of(spec.name):
            settings |= {"choices": choices}
        elif spec.name == "data":
            settings |= {"nargs": "+", "metavar": "PATH"}
        elif type_of(spec.name) is bool:
            settings |= {"action": argparse.BooleanOptionalAction}
        else:
            kind = type_of(spec.name)
            metavar = spec.metadata.get("meta", kind.__name__.upper())
            settings |= {"type": kind, "metavar": metavar}
        parser.add_argument(f"--{option.replace('_', '-')}", **settings)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON's reader would take the last of two values; TOML's refuses them.
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


def read_config(path: str) -> dict[str, Any]:
    """The options that a TOML or JSON file gives, by field name.

    Raises:
        ConfigError: The file can't be read, is neither, or names an option that does not exist.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"config={path!r} can't be read: {reason}\nhint: name a TOML or JSON file"
        ) from error
    try:
        if file.suffix == ".json":
            values = json.loads(text, object_pairs_hook=_once_each)
        else:
            values = tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise ConfigError(
            f"config={path!r} is no {kind}: {error}\n"
            "hint: a line an option, as in num_layers = 8; a JSON object in a file named *.json"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f'config={path!r} holds no JSON object\nhint: {{"num_layers": 8}}')
    options = _options()
    given = {}
    for name, value in values.items():
        option = name.replace("-", "_")
        if option not in options:
            near = difflib.get_close_matches(option, options, 1)
            hint = f"did you mean {near[0]}?" if near else "pipeloom train --help lists them"
            raise ConfigError(f"config={path!r}: there is no option {name!r}\nhint: {hint}")
        if options[option].name in given:
            raise ConfigError(
                f"config={path!r} gives {option} twice\nhint: `-` and `_` are the same in a name"
            )
        one_path = option == "data" and isinstance(value, str)
        given[options[option].name] = [value] if one_path else value
    return given


def arguments_from(namespace: argparse.Namespace) -> TrainingArguments:
    """The run that a command line asks for.

    Flags win over the configuration file, and both over a resumed run's own arguments.

    Raises:
        ConfigError: A value is out of range, or one that a resumed run may not change.
    """
    given = read_config(namespace.config) if hasattr(namespace, "config") else {}
    flags = {
        spec.name: getattr(namespace, spec.name)
        for spec in _options().values()
        if hasattr(namespace, spec.name)
    }
    if "plan" in flags:  # it wins over the file's pipeline as a whole
        given = {name: value for name, value in given.items() if name not in _OF_THE_PLAN}
    given |= flags
    if given.get("plan") is not None:
        for name in _OF_THE_PLAN:
            # 0 is a value too, though it equals False.
            if given.get(name) is not None and given[name] is not False:
                raise ConfigError(
                    f"plan={given['plan']!r} says {name} itself, but {name}={given[name]!r} is "
                    f"given too\nhint: leave --{name.replace('_', '-')} out"
                )
    if given.get("resume") is None:
        return TrainingArguments(**given)
    return _resumed(given)


def _resumed(given: dict[str, Any]) -> TrainingArguments:
    """The stored arguments of the resumed run, with those that are given in their place."""
    from pipeloom.training.checkpoint import resolve_checkpoint, state_of

    stored = state_of(resolve_checkpoint(given["resume"])).arguments
    for name, value in given.items():
        before = stored.get(name)
        if name not in FREE_TO_CHANGE and before != value:
            raise ConfigError(
                f"{name}={value!r} differs from the resumed run's {before!r}\n"
                f"hint: leave --{name.replace('_', '-')} out, or start a new run"
            )
    if "steps" in given and stored.get("lr_decay_steps") is None:
        # The learning rate must go on along the curve that it was on.
        stored["lr_decay_steps"] = stored["steps"]
    a_step = stored["num_microbatches"] * stored["dp"]
    if "dp" in given and "num_microbatches" not in given and a_step % max(given["dp"], 1) == 0:
        stored["num_microbatches"] = a_step // max(given["dp"], 1)
    if {"pp", "vp", "schedule", "plan"} & given.keys():
        # What belongs to the old pipeline says nothing about the new one.
        for name in ("vp", "microbatch_group_size", "layout_text", "plan"):
            stored[name] = None
        if stored["schedule"] == "csv":
            del stored["schedule"]
    if {"schedule", "plan"} & given.keys():
        stored["num_seq_pieces"] = None
    if {"recompute", "num_microbatches_with_partial_activation_checkpoints"} & given.keys():
        stored |= {
            "recompute": False,
            "num_microbatches_with_partial_activation_checkpoints": None,
        }
    stored |= {"out": None, "tensorboard": False}
    args = TrainingArguments.from_dict(stored | given)
    if args.num_microbatches * args.dp != a_step:
        raise ConfigError(
            f"num_microbatches={args.num_microbatches} x dp={args.dp} is not the "
            f"{a_step} microbatches of the resumed run's step\n"
            f"hint: give values whose product is {a_step}, or start a new run"
        )
    return args
