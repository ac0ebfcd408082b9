"""Every closed formula of docs/schedules.md against simulation, at times that differ.

F, I and W are those of a chunk here; `bubble` is the makespan without the work of the rank that
has least, in units of p - 1 (1 for `dualpipe` and `chimera`, which say what they multiply).
"""

import itertools

import pytest

import pipeloom as pl

TIMES = [(1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 1), (1, 3, 2), (1, 2, 3), (4, 2, 3), (5, 6, 4)]


def all_of(p, f, i, w):
    return (p - 1) * (f + i + w)


def split(p, f, i, w):
    return (p - 1) * max(f + i - w, f, i)


BUBBLES = {
    "gpipe": (None, all_of),
    "1f1b": (None, all_of),
    "eager_1f1b": (None, all_of),
    "interleaved_1f1b": (2, all_of),
    "looped_bfs": (3, all_of),
    "zb_h1": (None, split),
    "zb_h2": (None, lambda p, f, i, w: (p - 1) * max(f, f + i - 2 * w, i - f)),
    "interleaved_zb": (3, split),
    "forward_only": (2, lambda p, f, _i, _w: (p - 1) * f),
}


def times(f, i, w, overlapped=None):
    return pl.Costs(forward=f, backward_input=i, backward_weight=w, overlapped=overlapped)


def bubble_of(plan, costs):
    timeline = plan.simulate(costs)
    return timeline.makespan - min(timeline.work(rank) for rank in range(plan.pp))


@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles_at_any_times(name):
    vp, bubble = BUBBLES[name]
    for pp, many in itertools.product((1, 2, 3, 4, 6), (1, 2, 5)):
        m = max(many * pp, 2 * pp - 1) if name == "zb_h2" else many * pp
        plan = pl.plan(name, pp=pp, vp=vp, num_microbatches=m)
        for f, i, w in TIMES:
            assert bubble_of(plan, times(f, i, w)) == bubble(pp, f, i, w), (pp, m, f, i, w)


def test_spans():
    for pp, many in itertools.product((2, 3, 4, 6), (2, 5)):
        for f, i, w in TIMES:
            costs, work = times(f, i, w), many * pp * (f + i + w)
            flat = pl.plan("gpipe", pp=pp, num_microbatches=many * pp).simulate(costs)
            assert flat.makespan - work == (pp - 1) * (f + i + w) >= flat.span - work
            early = pl.plan("zb_h2", pp=pp, num_microbatches=many * pp).simulate(costs)
            assert early.span - work == (pp - 1) * max(f + i - 2 * w, i - f, 0)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_bubbles_of_overlapped_pairs(name):
    for pp, (f, w) in itertools.product((2, 4, 6), ((1, 1), (2, 1), (4, 3), (5, 0))):
        plan = pl.plan(name, pp=pp, num_microbatches=4 * pp)
        b = f + w
        for fb in (f + b, f + b - 1, b):
            factor = pp // 2 - 1 if name == "dualpipe" else pp - 1
            bubble = factor * (fb + b - 3 * w)
            assert bubble_of(plan, times(f, f, w, fb)) == bubble, (pp, f, w, fb)


def test_a_unit_of_chimera():
    for pp, (f, i, w) in itertools.product((2, 4, 6, 8), TIMES):
        if i + w >= 2 * f:
            plan = pl.plan("chimera", pp=pp, num_microbatches=pp)
            assert bubble_of(plan, times(f, i, w)) == (pp - 2) * (i + w), (pp, f, i, w)


def test_pieces_of_sequences_divide_the_bubble():
    for pp, pieces, (f, i, w) in itertools.product((2, 4, 5), (2, 3), TIMES):
        plan = pl.plan("seq1f1b", pp=pp, num_microbatches=2 * pp, num_seq_pieces=pieces)
        assert bubble_of(plan, times(f, i, w)) == (pp - 1) * (f + i + w)
        assert peaks(plan)[0] == pp + pieces - 1


def peaks(plan):
    timeline = plan.simulate(pl.Costs())
    return [timeline.peak_memory(rank) for rank in range(plan.pp)]


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (2, 5), (4, 2), (4, 8), (6, 30)])
def test_memory_of_each_rank(pp, m):
    def of(name, **arguments):
        return peaks(pl.plan(name, pp=pp, num_microbatches=m, **arguments))

    ranks = range(pp)
    assert of("gpipe") == [m] * pp
    assert of("looped_bfs", vp=2) == [2 * m] * pp
    assert of("1f1b") == [min(m, pp - r) for r in ranks]
    assert of("eager_1f1b") == [min(m, 2 * (pp - 1 - r) + 1) for r in ranks]
    assert of("zb_h1") == [min(m, pp)] * pp
    for vp, extra in itertools.product((2, 3), (0, 1)):
        plan = pl.plan("interleaved_1f1b", pp=pp, vp=vp, num_microbatches=m, extra_warmup=extra)
        group = plan.microbatch_group_size
        formula = [2 * (pp - 1 - r) + (vp - 1) * group + 1 + extra for r in ranks]
        assert peaks(plan) == [min(m * vp, each) for each in formula]
