"""Options that commands share: what to plan, what it costs, what to print."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeloom as pl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipeloom import Costs, Plan

__all__ = [
    "add_cost_arguments",
    "add_lower_arguments",
    "add_plan_arguments",
    "add_shape_arguments",
    "cost",
    "cost_values",
    "costs_of",
    "digits_for",
    "naming",
    "number",
    "plan_of",
    "plans_for_costs",
    "print_json",
    "read_plan",
    "refuse_unknown",
    "shape_of",
    "table",
    "write",
]

STYLES = ("auto", "even_odd", "batched", "fifo", "streams")
SEMANTICS = ("buffered", "streams", "single_stream", "batched", "rendezvous")

_SHAPE_OPTIONS = (
    "pp",
    "vp",
    "num_microbatches",
    "microbatch_group_size",
    "placement",
    "num_seq_pieces",
    "reverse_backward",
    "forward_only",
    "extra_warmup",
    "num_microbatches_with_partial_activation_checkpoints",
)

_COSTS = {
    "forward": "time of F, the forward of one microbatch on one stage",
    "backward_input": "time of I, the input-gradient half of a backward",
    "backward_weight": "time of W, the weight-gradient half",
    "backward": "time of B, a full backward (default: I + W)",
    "overlapped": "time of an overlapped F/B pair (default: F + B)",
    "recompute": "extra time of a recomputed backward (default: F)",
    "latency": "time of a transfer before its bytes",
    "bandwidth": "bytes that a transfer moves in one unit of time",
    "boundary_bytes": "bytes of a transfer",
    "memory_forward": "memory that F adds",
    "memory_backward_input": "memory that I adds",
    "memory_backward_weight": "memory that W adds (B adds I's and W's)",
    "memory_recompute": "memory that a recomputed F adds",
    "static_memory": "memory of parameters and optimizer",
}


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeloom.plan` after the name."""
    group = parser.add_argument_group("shape", "the arguments of pipeloom.plan")
    group.add_argument("--pp", type=int, metavar="N", help="pipeline-parallel ranks")
    group.add_argument("--vp", type=int, metavar="N", help="model chunks a rank")
    group.add_argument(
        "-m",
        "--num-microbatches",
        type=int,
        metavar="N",
        help="microbatches of a step (default: 2 pp)",
    )
    group.add_argument(
        "--microbatch-group-size",
        type=int,
        metavar="N",
        help="consecutive microbatches a chunk runs before the next chunk",
    )
    group.add_argument("--placement", metavar="NAME", help="loop, v, wave or bidirectional")
    group.add_argument("--num-seq-pieces", type=int, metavar="N", help="pieces of a sequence")
    group.add_argument(
        "--reverse-backward",
        action=argparse.BooleanOptionalAction,
        help="backwards run microbatches from last to first",
    )
    group.add_argument("--forward-only", action="store_true", help="no backwards: evaluation")
    group.add_argument("--extra-warmup", type=int, metavar="N", help="0 or 1 more warm-up forwards")
    group.add_argument(
        "--num-microbatches-with-partial-activation-checkpoints",
        type=int,
        metavar="N",
        help="of each window of warm-up + 1 forward steps, N keep their activations",
    )


def add_plan_arguments(parser: argparse.ArgumentParser, *, or_run: bool = False) -> None:
    """Add the two ways to name a plan: a schedule with a shape, or a file; `or_run` adds a run."""
    text = "name of a schedule; see `pipeloom schedules`"
    if or_run:
        text += "; or the folder of a run of `pipeloom train --profile`"
    parser.add_argument("schedule", nargs="?", help=text)
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="a saved plan, or PyTorch's CSV, instead"
    )
    add_shape_arguments(parser)
    group = parser.add_argument_group("what the schedule must fit")
    group.add_argument(
        "--layout",
        metavar="TEXT",
        help="layers of each stage, as in 'Et*3|(tt|)*29,m|L'; refused if its ranks or chunks "
        "are not the schedule's",
    )
    group.add_argument(
        "--memory-limit",
        type=cost,
        metavar="X",
        help="memory of each rank, one number or one a rank (schedules found by search)",
    )


def add_lower_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how to place transfers."""
    group = parser.add_argument_group("transfers")
    group.add_argument("--lower", choices=STYLES, metavar="STYLE", help=", ".join(STYLES))
    group.add_argument("--backend", metavar="NAME", help="what `--lower auto` chooses for")
    group.add_argument(
        "--prefetch", type=int, metavar="N", help="compute ops a receive is posted ahead (streams)"
    )


def _is_given(name: str, value: object) -> bool:
    # A flag that was not given is False; `--no-reverse-backward` is given.
    return value is not None and (value is not False or name == "reverse_backward")


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Give the keyword arguments of `pipeloom.plan` that were given.

    Raises:
        ConfigError: `--pp` is missing.
    """
    given = {name: getattr(arguments, name) for name in _SHAPE_OPTIONS}
    shape = {name: value for name, value in given.items() if _is_given(name, value)}
    if "pp" not in shape:
        raise pl.ConfigError("--pp is missing\nhint: say how many ranks: --pp 4")
    if "num_microbatches" not in shape:
        shape["num_microbatches"] = max(1, 2 * shape["pp"])
    return shape


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the core's file access the name of the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read_plan(path: Path) -> Plan:
    """Read a plan from a file: a saved one, or else PyTorch's CSV.

    Raises:
        ParseError: The file is neither.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        start = file.read(64).lstrip()
    # A CSV of actions starts with a stage number (or a rank without actions).
    if path.suffix == ".csv" or start[:1].isdigit() or start[:1] in (b"", b","):
        with naming(path):
            return pl.Plan.from_csv(path)
    with naming(path):
        return pl.Plan.load(path)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Make or read the plan that the options name; lower it if they say so.

    Raises:
        PlanError: The options contradict each other or the plan can't be made.
    """
    if (arguments.plan is None) == (arguments.schedule is None):
        raise pl.ConfigError(
            f"{'no plan is' if arguments.plan is None else 'two plans are'} named\n"
            "hint: name a schedule (`pipeloom schedules` lists them) with --pp and -m, or a file "
            "with --plan"
        )
    if arguments.plan is not None:
        for name in (*_SHAPE_OPTIONS, "layout", "memory_limit"):
            if _is_given(name, getattr(arguments, name)):
                option = "--" + name.replace("_", "-")
                raise pl.ConfigError(
                    f"{option} has no use with --plan\nhint: leave it out; the file has the shape"
                )
        plan = read_plan(arguments.plan)
    else:
        refuse_unknown(arguments.schedule)
        plan = pl.plan(arguments.schedule, **shape_of(arguments), **_fitting(arguments))
    style = getattr(arguments, "lower", None)
    if style is None:
        return plan
    given = {"backend": arguments.backend, "prefetch": arguments.prefetch}
    return plan.lower(style, **{name: value for name, value in given.items() if value is not None})


def refuse_unknown(schedule: str) -> None:
    """Say that a schedule is unknown before anything else is asked for.

    Raises:
        ConfigError: There is none of this name.
    """
    known = [row.name for row in pl.schedules()]
    if schedule not in known:
        hint = f"one of {', '.join(known)}; a file goes by --plan"
        raise pl.ConfigError(f"schedule {schedule!r} is unknown\nhint: {hint}")


def _fitting(arguments: argparse.Namespace) -> dict[str, Any]:
    """Give the arguments of `pipeloom.plan` that say what the plan must fit."""
    fitting: dict[str, Any] = {}
    if arguments.memory_limit is not None:
        fitting["memory_limit"] = arguments.memory_limit
    if arguments.layout is not None:
        pp, vp = arguments.pp, arguments.vp
        fitting["layout"] = pl.Layout.from_string(arguments.layout, pp=pp, vp=vp)
    if plans_for_costs(arguments) and hasattr(arguments, "costs"):
        fitting["costs"] = costs_of(arguments)
    return fitting


def plans_for_costs(arguments: argparse.Namespace) -> bool:
    """Say whether the schedule is found by search for the costs that simulation takes."""
    return any(
        row.name == arguments.schedule and "costs" in row.arguments for row in pl.schedules()
    )


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def cost(text: str) -> float | list[float] | list[list[float]]:
    """Read `1`, `1,2.5` (one a stage or rank) or `0,1;1,0` (a matrix by rank)."""
    try:
        rows = [[_number(word) for word in row.split(",")] for row in text.split(";")]
    except ValueError:
        message = f"{text!r} is not a number, a list 1,2,3 or a matrix 0,1;1,0"
        raise argparse.ArgumentTypeError(message) from None
    if len(rows) > 1:
        return rows
    return rows[0] if len(rows[0]) > 1 else rows[0][0]


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pipeloom.Costs`."""
    group = parser.add_argument_group(
        "costs",
        "the arguments of pipeloom.Costs, in any one unit of time: a number, one a\n"
        "stage (1,2,3), or one for each pair of ranks (0,1;1,0)",
    )
    group.add_argument(
        "--costs", type=Path, metavar="FILE", help="a JSON object with these; options override it"
    )
    for name, text in _COSTS.items():
        option = "--" + name.replace("_", "-")
        group.add_argument(option, dest=f"cost_{name}", type=cost, metavar="X", help=text)


def costs_of(arguments: argparse.Namespace) -> Costs:
    """Make the costs that the options give.

    Raises:
        PlanError: A cost is out of range, or the costs file is wrong.
        OSError: The costs file can't be read.
    """
    values = cost_values(arguments)
    try:
        return pl.Costs(**values)
    except TypeError as error:
        # Callers of the API get it as it is; here it is a word of the command line or a file.
        raise pl.ConfigError(str(error)) from None


def cost_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Give the arguments of `pipeloom.Costs` that options and file give."""
    values = {} if arguments.costs is None else _read_costs(arguments.costs)
    for name in _COSTS:
        given = getattr(arguments, f"cost_{name}")
        if given is not None:
            values[name] = given
    return values


def _read_costs(path: Path) -> dict[str, Any]:
    hint = "write an object with some of " + ", ".join(_COSTS)
    try:
        values: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise pl.ParseError(f"{path} is not JSON: {error}\nhint: {hint}") from None
    if not isinstance(values, dict):
        raise pl.ParseError(f"{path} holds no JSON object\nhint: {hint}")
    unknown = sorted(set(values) - set(_COSTS))
    if unknown:
        raise pl.ParseError(f"{path} has unknown costs: {unknown}\nhint: {hint}")
    for name, value in values.items():
        if not _is_cost(value):
            raise pl.ParseError(
                f"{path}: {name} is {json.dumps(value)}, which is no cost"
                "\nhint: write a number, a list of numbers, a list of such lists, or null"
            )
    return values


def _is_cost(value: object, depth: int = 2) -> bool:
    """Say whether it is a number, None, or lists of numbers up to `depth`."""
    if isinstance(value, list):
        return depth > 0 and all(item is not None and _is_cost(item, depth - 1) for item in value)
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def write(path: Path, text: str) -> None:
    """Write text to a file, or to stdout if it is `-`."""
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        with naming(path):
            path.write_text(text, encoding="utf-8", newline="\n")


def write_png(path: Path, what: Any, **settings: Any) -> None:
    """Write a PNG to a file, or to stdout if it is `-`."""
    from pipeloom import plot

    if str(path) == "-":
        plot.png(what, sys.stdout.buffer, **settings)
    else:
        with naming(path):
            plot.png(what, path, **settings)


def print_json(value: object) -> None:
    """Print a value as JSON, keys in the order of insertion."""
    print(json.dumps(value, indent=2))


def digits_for(largest: float) -> int:
    """Digits after the point that tell numbers up to `largest` apart: six that count in all."""
    if not largest or not math.isfinite(largest):
        return 0
    return max(0, 5 - math.floor(math.log10(abs(largest))))


def number(value: float, digits: int | None = None) -> str:
    """A number in plain digits, never as 1e+06, without zeros at its end.

    Args:
        value: The number.
        digits: Most digits after the point. None: six that count in all.

    Examples:
        >>> number(25061700.0), number(0.00647068), number(2 / 3), number(4.0)
        ('25061700', '0.00647068', '0.666667', '4')
    """
    text = f"{value:.{digits_for(value) if digits is None else digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def table(rows: Iterable[tuple[str, ...]], *, right: Iterable[int] = ()) -> str:
    """Lay out rows of text in columns, those in `right` flush right.

    Examples:
        >>> print(table([("name", "ops"), ("1f1b", "16")], right=[1]))
        name  ops
        1f1b   16
    """
    rows = list(rows)
    flush_right = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(
            cell.rjust(width) if at in flush_right else cell.ljust(width)
            for at, (cell, width) in enumerate(cells)
        ).rstrip()

    return "\n".join(map(line, rows))
