"""A plan of a billion ops is opened and asked in a few megabytes; lowered ones take 12 B an op."""

import os
import pickle
from pathlib import Path

import pytest

import pipeloom as pl

STATM = Path("/proc/self/statm")

pytestmark = pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")


def resident():
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


HUGE = [
    ("1f1b", {"pp": 1024, "num_microbatches": 1 << 19}),
    ("interleaved_1f1b", {"pp": 64, "vp": 8, "num_microbatches": 1 << 20}),
    ("looped_bfs", {"pp": 64, "vp": 8, "num_microbatches": 1 << 20}),
    ("interleaved_zb", {"pp": 64, "vp": 8, "num_microbatches": 1 << 20}),
    ("zb_h2", {"pp": 1024, "num_microbatches": 1 << 19}),
    ("zb_v", {"pp": 512, "num_microbatches": 1 << 20}),
    ("dualpipe_v", {"pp": 512, "num_microbatches": 1 << 20}),
    ("seq1f1b", {"pp": 512, "num_microbatches": 1 << 18, "num_seq_pieces": 4}),
]


@pytest.mark.parametrize(("name", "arguments"), HUGE)
def test_a_billion_ops_take_a_few_megabytes(name, arguments):
    pl.plan(name, pp=2, num_microbatches=8).op(0, 0)  # what the first call alone takes
    before = resident()
    plan = pl.plan(name, **arguments)
    assert plan.num_ops > 10**9
    for rank in (0, plan.pp // 2, plan.pp - 1):
        last = plan.num_ops_of(rank) // 2 - 1  # pairs are one action: half the rows at least
        for i in (*range(last // 2, last // 2 + 100), 0, last):
            op = plan.op(rank, i)
            first = op.strip("(").split(";")[0]
            assert plan.position(rank, first) == i, (rank, i, op)
    assert plan.num_warmup(0) > 0
    assert hash(plan) == hash(pl.plan(name, **arguments))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert name in repr(plan)
    assert resident() - before < 8 << 20


@pytest.mark.parametrize("name", sorted({name for name, _ in HUGE} | {"dualpipe", "gpipe"}))
def test_hundreds_of_ranks(name):
    plan = pl.plan(name, pp=264, num_microbatches=530)
    assert plan.check().ok
    assert plan.lower().num_ops > plan.num_ops


@pytest.mark.parametrize("style", ["streams", "fifo", "batched"])
def test_a_lowered_plan_takes_sixteen_bytes_an_op(style):
    plan = pl.plan("interleaved_1f1b", pp=32, vp=4, num_microbatches=512)
    kept = [plan.lower(style) for _ in range(2)]  # room for the work
    before = resident()
    kept += [plan.lower(style) for _ in range(4)]
    assert (resident() - before) / 4 <= 16 * kept[0].num_ops
