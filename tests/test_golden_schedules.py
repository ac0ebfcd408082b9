"""Every recorded Megatron-core schedule, bit for bit: rows, table, order, mask.

A record with `vp` 1 shows Megatron's interleaved function on one chunk: the order of `eager_1f1b`.
Our vp=1 is plain 1F1B, as in Megatron without virtual stages.
"""

import hashlib
import json

import numpy as np
import pytest

import pipeloom as pl


def plan_of(record, **options):
    pp, vp, m = record["pp"], record["vp"], record["m"]
    if vp is None:
        return pl.plan("1f1b", pp=pp, num_microbatches=m, **options)
    if vp == 1:
        return pl.plan("eager_1f1b", pp=pp, num_microbatches=m, **options)
    group = record["ge"]
    return pl.plan(
        "interleaved_1f1b", pp=pp, vp=vp, num_microbatches=m, microbatch_group_size=group, **options
    )


def sha(value):
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def order_of(plan, rank):
    columns = plan.columns(rank)
    signed = columns["chunk"].astype(np.int64) + 1
    return np.where(columns["kind"] == pl.OpKind.F, signed, -signed).tolist()


def rows_of(plan, rank):
    total = plan.num_microbatches * plan.vp
    warmup = plan.num_warmup(rank)
    # Megatron says "all in warm-up" as 1.
    return [total, int(warmup == total), warmup, total - warmup]


def check_table(record, plan):
    total = plan.num_microbatches * plan.vp
    if plan.schedule == "interleaved_1f1b":
        table = [[plan.microbatch_id(k), plan.chunk_id(k)] for k in range(total)]
        backward = [
            [plan.microbatch_id(k, forward=False), plan.chunk_id(k, forward=False)]
            for k in range(total)
        ]
        assert backward == [[mb, plan.vp - 1 - chunk] for mb, chunk in table]
    else:
        # One chunk: the forwards in order are the table.
        columns = plan.columns(0)
        forwards = columns["kind"] == pl.OpKind.F
        pairs = (columns["microbatch"][forwards], columns["chunk"][forwards])
        table = [list(pair) for pair in zip(*(c.tolist() for c in pairs), strict=True)]
    if "mb" in record:
        assert [mb for mb, _ in table] == record["mb"]
        assert [chunk for _, chunk in table] == record["ch"]
    else:
        assert sha(table) == record["tab_sha"]


def check_mask(record, kept):
    masks = record["mask"][str(kept)]
    plan = plan_of(record, num_microbatches_with_partial_activation_checkpoints=kept)
    for rank, bits in enumerate(masks):
        mask = plan.recompute_mask(rank)
        expected = np.resize(np.array([bit == "1" for bit in bits]), mask.size)
        assert np.array_equal(mask, expected), (label(record), rank, kept)
        columns = plan.columns(rank)
        assert np.array_equal(columns["recompute"][columns["kind"] == pl.OpKind.F], expected)


def check(record):
    plan = plan_of(record)
    check_table(record, plan)
    for rank in range(plan.pp):
        assert rows_of(plan, rank) == record["rows"][rank], (label(record), rank)
        order = order_of(plan, rank)
        if "order" in record:
            assert order == record["order"][rank], (label(record), rank)
        else:
            assert sha(order) == record["order_sha"][rank], (label(record), rank)


def label(record):
    return f"pp={record['pp']} vp={record['vp']} m={record['m']} N={record['g']}"


def test_golden_file_is_whole(records):
    kinds = [record["kind"] for record in records("sched.jsonl.gz", "sched", "rows")]
    assert (kinds.count("sched"), kinds.count("rows")) == (4167, 16)


@pytest.mark.parametrize("part", range(6))
def test_schedules(records, part):
    """Rows, table and order of every record; each recorded mask in a sixth of them."""
    for at, record in enumerate(records("sched.jsonl.gz", "sched")):
        if at % 6 == part:
            check(record)
        check_mask(record, (at + part) % 6)


def test_one_more_warmup(records):
    for record in records("sched.jsonl.gz", "sched"):
        if record["vp"] is not None and record["vp"] > 1 and record["pp"] > 1:
            plan = plan_of(record, extra_warmup=1)
            assert [plan.num_warmup(r) for r in range(plan.pp)] == record["warm_moe"], label(record)


def test_forward_only_rows(records):
    for record in records("sched.jsonl.gz", "rows"):
        schedule = "1f1b" if record["vp"] is None else "interleaved_1f1b"
        plan = pl.plan(
            schedule,
            pp=record["pp"],
            vp=record["vp"],
            num_microbatches=record["m"],
            forward_only=True,
        )
        assert [rows_of(plan, rank) for rank in range(plan.pp)] == record["rows"], label(record)
        assert plan.recompute_mask(0) is None
