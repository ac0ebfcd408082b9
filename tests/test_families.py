"""Every family against recorded orders and times of public schedulers, and over a grid of shapes.

Kinds of records: `order` (textbook rules and the zero-bubble repository), `torch` (PyTorch 2.13's
orders without bubbles and gradient reductions), `time` (makespan, span, peak at F = I = W = 1).
"""

import importlib.util
import itertools
import random
import re
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom import reference

FILE = "families.jsonl.gz"
ROOT = Path(__file__).parent.parent


def plan_of(record):
    return pl.plan(
        record["schedule"],
        pp=record["pp"],
        num_microbatches=record["num_microbatches"],
        **record["args"],
    )


def name_of(record):
    return f"{record['source']} {record['args']} pp={record['pp']} m={record['num_microbatches']}"


def plain(ops):
    """Overlapped pairs as two ops."""
    pair = re.compile(r"\((\w+);(\w+)\)OVERLAP_F_B")
    return " ".join(pair.sub(r"\1 \2", op) for op in ops)


def test_orders_are_the_textbooks(records):
    checked = set()
    for record in records(FILE, "order"):
        plan = plan_of(record)
        for rank, expected in enumerate(record["order"]):
            assert " ".join(plan.ops(rank)) == expected, f"{name_of(record)} rank {rank}"
        checked.add(record["schedule"])
    assert checked >= {"chimera", "hanayo", "v_1f1b", "group_interleaved", "dualpipe", "zb_v"}


def test_orders_are_torchs(records):
    count = 0
    for record in records(FILE, "torch"):
        plan = plan_of(record)
        for rank, expected in enumerate(record["order"]):
            if record["source"] == "1F1B" and rank == plan.pp - 1:
                # torch 2.13 numbers the last rank's forwards from 1; its own validator objects.
                expected = re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", expected)
            assert " ".join(plan.ops(rank)) == expected, f"{name_of(record)} rank {rank}"
        count += 1
    assert count > 300


def test_times_and_memory_are_no_worse(records):
    better = {}
    for record in records(FILE, "time"):
        timeline = reference.simulate(reference.Schedule.of(plan_of(record)))
        ours = (timeline.makespan, timeline.span, max(timeline.peak_memory))
        theirs = (record["makespan"], record["span"], record["peak"])
        assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (
            f"{name_of(record)}: {ours} against {theirs}"
        )
        if ours != theirs:
            better[record["schedule"], record["pp"], record["num_microbatches"]] = ours[0]
    # Proved optimal within their memory by an exact solver: 29 and 71.
    assert better == {
        ("v_half", 4, 4): 29,
        ("v_min", 8, 8): 71,
        ("v_min", 8, 32): 215,
    }


def timeline_of(name, **arguments):
    return reference.simulate(reference.Schedule.of(pl.plan(name, **arguments)))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("v_half", lambda pp: 2 * (pp // 2 + 1)),
        ("v_min", lambda pp: 2 * ((pp + 4) // 3)),
        ("v_1f1b", lambda pp: 2 * ((2 * pp + 3) // 3)),
    ],
)
def test_memory_in_chunks_is_the_formula(name, peak):
    for pp in range(1, 17):
        few = max(timeline_of(name, pp=pp, num_microbatches=max(1, pp // 2)).peak_memory)
        many = max(timeline_of(name, pp=pp, num_microbatches=2 * pp + 1).peak_memory)
        assert few <= many == peak(pp), f"pp={pp}"


FORMULAS = {
    # name: options, bubble in chunk-steps, most chunks of activations; at m = 4 pp
    "gpipe": ({}, lambda p, _: 3 * (p - 1), lambda p, _: 4 * p),
    "1f1b": ({}, lambda p, _: 3 * (p - 1), lambda p, _: p),
    "eager_1f1b": ({}, lambda p, _: 3 * (p - 1), lambda p, _: 2 * p - 1),
    "interleaved_1f1b": ({}, lambda p, _: 3 * (p - 1), lambda p, v: 2 * (p - 1) + (v - 1) * p + 1),
    "looped_bfs": ({}, lambda p, _: 3 * (p - 1), lambda p, v: 4 * p * v),
    "zb_h1": ({}, lambda p, _: p - 1, lambda p, _: p),
    "zb_h2": ({}, lambda p, _: p - 1, lambda p, _: 2 * p - 1),
    "interleaved_zb": ({}, lambda p, _: p - 1, lambda p, v: p * v),
    "zb_v": ({}, lambda p, _: p - 1, lambda p, _: 2 * p),
    "dualpipe_v": ({}, lambda p, _: 2 * (p - 1), lambda p, _: 2 * p + 1),
    "dualpipe": ({}, lambda p, _: p - 2, lambda p, _: p + 1),
    "forward_only": ({}, lambda p, _: p - 1, None),
    "seq1f1b": ({"num_seq_pieces": 2}, lambda p, _: 3 * (p - 1), lambda p, _: p + 1),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_bubble_and_memory_are_the_documented_formulas(name):
    row = next(row for row in pl.schedules() if row.name == name)
    options, bubble, peak = FORMULAS[name]
    many = name in ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "forward_only")
    for pp, vp in itertools.product((2, 4, 6), (2, 3) if many else (row.vp or 1,)):
        m = 4 * pp
        timeline = timeline_of(name, pp=pp, vp=vp, num_microbatches=m, **options)
        work = m * vp * options.get("num_seq_pieces", 1) * (1 if name == "forward_only" else 3)
        assert timeline.makespan - work == bubble(pp, vp), (pp, vp)
        if peak:
            assert max(timeline.peak_memory) == peak(pp, vp), (pp, vp)
        if name in ("zb_h2", "zb_v"):
            assert timeline.span == work


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("v_half", lambda pp: 3 * pp - (4 if pp % 2 else 7)),
        ("v_min", lambda pp: 4 * pp - (7, 5, 9)[pp % 3]),
        # Multiples of 3 have no formula; 5 pp - 7 bounds them.
        ("v_1f1b", lambda pp: 5 * pp - (5 if pp % 3 == 1 else 7)),
    ],
)
def test_bubble_in_chunk_steps_is_the_formula(name, bubble):
    for pp, units in itertools.product(range(4, 17), (2, 3)):
        m = units * pp
        measured = timeline_of(name, pp=pp, num_microbatches=m).makespan - 6 * m
        if name == "v_1f1b" and pp % 3 == 0:
            assert measured <= bubble(pp), (pp, m)
        else:
            assert measured == bubble(pp), (pp, m)


def test_group_interleaved_trades_bubble_for_memory():
    for pp, vp in itertools.product((2, 4, 8), (2, 3)):
        for group in range((pp + 1) // 2, pp + 1):
            m = 4 * group
            timeline = timeline_of(
                "group_interleaved", pp=pp, vp=vp, num_microbatches=m, microbatch_group_size=group
            )
            assert timeline.makespan - 3 * vp * m == 2 * (pp - 1) + (vp - 1) * (pp - group)
            assert timeline.peak_memory == [pp - rank + (vp - 1) * group for rank in range(pp)]


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_unit_of_chimera_takes_the_papers_time(pp):
    for units in (1, 2, 3):
        timeline = timeline_of("chimera", pp=pp, num_microbatches=pp * units)
        # F = 1 and B = 2: C_f = pp forwards and C_b = 2 pp - 2 backwards on the critical path.
        unit = pp + 2 * (2 * pp - 2)
        assert timeline.makespan == unit if units == 1 else timeline.makespan <= units * unit


# The grid


def shapes():
    for row in pl.schedules():
        chunks = range(1, 7) if row.vp is None else [row.vp]
        for pp, vp, m in itertools.product(range(1, 17), chunks, range(1, 65)):
            yield row.name, pp, vp, m


def is_refused(name, pp, vp, m):
    """What docs/schedules.md lists."""
    match name:
        case "no_pipelining":
            return pp > 1
        case "dualpipe_v":
            return m < 2 * pp
        case "dualpipe":
            return pp % 2 or m % 2 or m < 2 * pp
        case "chimera":
            return pp % 2 or m % 2
        case "hanayo":
            return vp % 2
    return False


def planned(name, pp, vp, m):
    """The plan; None if it is refused, as the documentation says."""
    if is_refused(name, pp, vp, m):
        with pytest.raises(pl.ConfigError, match=r"\nhint: \S"):
            pl.plan(name, pp=pp, vp=vp, num_microbatches=m)
        return None
    return pl.plan(name, pp=pp, vp=vp, num_microbatches=m)


def test_sampled_shapes_work_or_are_refused():
    for shape in random.Random(20_26).sample(list(shapes()), 100):
        plan = planned(*shape)
        if plan is None:
            continue
        schedule = reference.Schedule.of(plan)
        assert not reference.faults(schedule, forward_only=plan.forward_only), shape
        assert not reference.stuck(schedule), shape


# That the plans of the whole grid progress is a test of the core, which is faster.
@pytest.mark.slow
@pytest.mark.parametrize("row", pl.schedules(), ids=lambda row: row.name)
def test_all_shapes_work_or_are_refused(row):
    for shape in shapes():
        if shape[0] == row.name:
            planned(*shape)


def test_legal_num_microbatches_is_the_least_that_plans():
    for row in pl.schedules():
        for pp, at_least in itertools.product((1, 2, 3, 4, 7), (1, 2, 5, 9)):
            arguments = {"pp": pp}
            try:
                legal = pl.legal_num_microbatches(row.name, at_least=at_least, **arguments)
            except pl.ConfigError:
                with pytest.raises(pl.ConfigError):
                    pl.plan(row.name, num_microbatches=64, **arguments)
                continue
            pl.plan(row.name, num_microbatches=legal, **arguments)
            for fewer in range(at_least, legal):
                with pytest.raises(pl.ConfigError):
                    pl.plan(row.name, num_microbatches=fewer, **arguments)


def test_legal_num_microbatches_with_a_group_size():
    legal = pl.legal_num_microbatches
    assert legal("interleaved_1f1b", pp=4, vp=2, at_least=7, microbatch_group_size=9) == 9
    assert legal("interleaved_zb", pp=4, vp=2, at_least=7, microbatch_group_size=6) == 10
    assert legal("group_interleaved", pp=8, vp=2, at_least=9, microbatch_group_size=4) == 9


def test_errors_name_the_least_legal_number(refused):
    refused(
        pl.ConfigError,
        lambda: pl.plan("chimera", pp=4, num_microbatches=5),
        "num_microbatches",
        "5",
        "raise num_microbatches to 6",
    )
    refused(pl.ConfigError, lambda: pl.plan("chimera", pp=3, num_microbatches=4), "pp", "3")
    refused(pl.ConfigError, lambda: pl.plan("hanayo", pp=3, vp=3, num_microbatches=4), "even vp")
    refused(
        pl.ConfigError,
        lambda: pl.plan(
            "group_interleaved", pp=8, vp=2, num_microbatches=9, microbatch_group_size=2
        ),
        "microbatch_group_size=2",
        "deadlock",
    )
    refused(pl.ConfigError, lambda: pl.legal_num_microbatches("no_pipelining", pp=2), "pp=2")
    legal = pl.legal_num_microbatches
    big = 2**14
    message = refused(
        pl.ConfigError, lambda: legal("dualpipe", pp=big, at_least=3), "at_least=3", f"pp={big}"
    )
    assert "too much to search" in message
    assert legal("dualpipe", pp=big, at_least=2 * big) == 2 * big
    most = 2**32 - 1
    refused(pl.ConfigError, lambda: legal("dualpipe", pp=2, at_least=most), f"at_least={most}")


def test_pictures_are_those_of_the_planner():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    text = (ROOT / "docs/schedules.md").read_text()
    assert text.count("<!-- picture: ") >= len(pl.schedules())
    assert pictures.redraw(text) == text, "run python docs/pictures.py"
