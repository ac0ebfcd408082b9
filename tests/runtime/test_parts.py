"""The runtime's parts one by one: programs, agreement, gradients, the reaper."""

import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import pipeloom as pl
from pipeloom.runtime import (
    Boundary,
    Channel,
    Key,
    LocalTransport,
    Pipeline,
    PipelineError,
    PipelineTimeout,
    TiedWeight,
    bubble_ratio,
    clip_grad_norm,
    grad_norm,
    reduce_tied_gradients,
)
from pipeloom.runtime.agreement import Watchdog, compare
from pipeloom.runtime.backward import full_backward, gradient_edge, input_gradient
from pipeloom.runtime.errors import TransferBroken, TransferTimeout
from pipeloom.runtime.executor import Event
from pipeloom.runtime.program import NO_CELL, compile_plan
from pipeloom.runtime.reaper import Reaper
from pipeloom.runtime.step import _sum_in_order

KINDS = {kind.name: int(kind) for kind in pl.OpKind}


class HandWritten:
    """A lowered plan of two stages on two ranks from action texts, right or wrong."""

    schedule, style, placement = "hand", "hand", "loop"
    pp, vp, num_stages, num_replicas, num_seq_pieces = 2, 1, 2, 1, 1
    forward_only = False
    stages = ((0, 0), (1, 0))

    def __init__(self, num_microbatches, *ranks):
        self.num_microbatches = num_microbatches
        self.texts = ranks

    def recompute_mask(self, _):
        return None

    def columns(self, rank):
        rows = [(int(text[0]), KINDS[text[1:-1]], int(text[-1])) for text in self.texts[rank]]
        stage, kind, microbatch = zip(*rows, strict=True)
        return {
            "kind": np.array(kind, dtype=np.uint8),
            "stage": np.array(stage, dtype=np.uint32),
            "microbatch": np.array(microbatch, dtype=np.uint32),
            "recompute": np.zeros(len(rows), dtype=bool),
            "peer": np.full(len(rows), 1 - rank, dtype=np.uint32),
        }


def test_program_says_where_everything_comes_from():
    plan = HandWritten(
        1,
        ["0F0", "0SEND_F0", "0RECV_B0", "0B0"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
    )
    compiled = compile_plan(plan, (0, 1))
    assert compiled.channels == (Channel(0, 1, "forward"), Channel(1, 0, "backward"))
    first, second = compiled.programs[0], compiled.programs[1]
    assert [op.text for op in first.instructions] == plan.texts[0]
    f, send, recv, b = first.instructions
    assert f.outer
    assert not f.inner_end
    assert f.hand_to == NO_CELL
    assert send.key == recv.key == Key(0, 0)
    assert (send.channel, recv.channel) == compiled.channels
    assert b.received
    assert b.inner_end
    assert b.last_of_chunk
    recv_f, f1, b1, send_b = second.instructions
    assert recv_f.key == send_b.key == Key(0, 0)
    assert f1.received
    assert f1.inner_end
    assert b1.outer
    assert (first.hosts_input, first.hosts_loss) == (True, False)
    assert (second.hosts_input, second.hosts_loss) == (False, True)
    evaluation = compile_plan(plan, (0, 1), forward_only=True)
    assert [op.text for op in evaluation.programs[1].instructions] == ["1RECV_F0", "1F0"]
    assert evaluation.channels == (Channel(0, 1, "forward"),)
    assert evaluation.digest != compiled.digest


def test_chunks_of_one_rank_hand_over_without_messages():
    plan = pl.plan("interleaved_1f1b", pp=1, vp=3, num_microbatches=2)
    compiled = compile_plan(plan, (0,))
    assert compiled.channels == ()
    by_text = {op.text: op for op in compiled.programs[0].instructions}
    assert by_text["0F1"].hand_to == by_text["1F1"].cell
    assert by_text["2B1"].hand_to == by_text["1B1"].cell
    assert not by_text["1F1"].received


def test_digest_names_the_plan():
    digests = {
        compile_plan(pl.plan("gpipe", pp=1, num_microbatches=m), (0,)).digest for m in (1, 2, 3)
    }
    assert len(digests) == 3
    assert all(digest.startswith("gpipe pp=1 vp=1 num_microbatches=") for digest in digests)


def test_pieces_have_cells_and_messages_of_their_own():
    plan = pl.plan("seq1f1b", pp=2, num_microbatches=2, num_seq_pieces=3)
    compiled = compile_plan(plan, (0, 1))
    assert (compiled.num_microbatches, compiled.num_units) == (2, 6)
    assert compiled.digest.startswith("seq1f1b pp=2 vp=1 num_microbatches=2 num_seq_pieces=3 ")
    for program in compiled.programs.values():
        assert program.num_cells == 6
        assert program.chunk_order == {0: (0, 1, 2, 3, 4, 5)}
        for op in program.instructions:
            assert op.cell == op.unit == 3 * op.microbatch + op.piece
            assert op.key.microbatch in (-1, op.unit)
        last = [op.text for op in program.instructions if op.last_of_chunk]
        assert last == [f"{program.rank}B3"]


def test_deadlock_shows_every_rank(tools):
    plan = HandWritten(
        1,
        ["0RECV_B0", "0B0", "0F0", "0SEND_F0"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
    )
    inputs, targets = tools.make_data([2])
    with pytest.raises(PipelineTimeout) as caught:
        Pipeline(plan, tools.make_stages(2), tools.square_sum).step(inputs, targets)
    text = str(caught.value)
    assert "rank 0 stands at 0B0 (op 1 of 4) and waits for the gradient of microbatch 0" in text
    assert "(0RECV_B0) from rank 1" in text
    assert "rank 1 stands at 1F0 (op 1 of 4) and waits for the activation of microbatch 0" in text
    assert text.splitlines()[-1].startswith("hint:")


def test_deadlock_is_found_with_shuffled_delivery_too(tools):
    plan = HandWritten(1, ["0RECV_B0", "0B0", "0F0", "0SEND_F0"], ["1RECV_F0", "1F0", "1B0"])
    inputs, targets = tools.make_data([2])
    for seed in range(4):
        pipeline = Pipeline(
            plan, tools.make_stages(2), tools.square_sum, transport=LocalTransport(2, seed=seed)
        )
        with pytest.raises(PipelineTimeout, match="deadlock"):
            pipeline.step(inputs, targets)


def test_messages_that_do_not_pair_up_are_named(tools):
    plan = HandWritten(
        2,
        ["0F0", "0F1", "0SEND_F1", "0SEND_F0", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    )
    inputs, targets = tools.make_data([2, 2])
    with pytest.raises(PipelineError, match="message of stage 0, microbatch 1 came where that of"):
        Pipeline(plan, tools.make_stages(2), tools.square_sum).step(inputs, targets)


def test_loss_must_be_one_number(tools):
    inputs, targets = tools.make_data([2])
    plan = pl.plan("no_pipelining", pp=1, num_microbatches=1)
    pipeline = Pipeline(plan, tools.make_stages(1), lambda output, target: output - target)
    with pytest.raises(PipelineError, match=r"loss of 0F0 has shape \(2, 6\)") as caught:
        pipeline.step(inputs, targets)
    assert caught.value.__notes__ == ["rank 0 stands at 0F0 (op 0 of 2), computing"]


def test_compare_lists_every_difference():
    assert compare([{"a": "1"}, {"a": "1"}]) is None
    text = compare([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "0", "b": "2"}])
    assert text == ("a: ranks 0, 1 have 1; rank 2 has 0\nb: ranks 0, 2 have 2; rank 1 has 3")
    assert compare([{"layout": "tt|t"}, {}]) == "layout: rank 0 has tt|t; rank 1 has nothing"


def test_boundary_text_tells_shapes_apart():
    same = Boundary((2, 3)).describe(3, 2)
    assert same == Boundary((2, 3)).describe(3, 2)
    others = [
        Boundary((2, 4)),
        Boundary((2, 3), torch.bfloat16),
        Boundary([(2, 3), (2, 3)]),
        Boundary(lambda stage, _: (2 + stage, 3)),
        Boundary(None),
    ]
    assert len({same, *(other.describe(3, 2) for other in others)}) == 6


def parameter(*gradient):
    p = Parameter(torch.zeros(len(gradient)))
    p.grad = torch.tensor(gradient)
    return p


def test_norm_is_over_all_stages():
    a, b = parameter(3.0), parameter(4.0)
    assert float(grad_norm({0: [a, a], 1: [b], 2: []}, LocalTransport(3))) == 5.0
    assert float(clip_grad_norm({0: [a], 1: [b], 2: []}, 10.0, LocalTransport(3))) == 5.0
    assert float(a.grad) == 3.0
    clip_grad_norm({0: [a], 1: [b], 2: []}, 0.5, LocalTransport(3))
    assert float(a.grad) == pytest.approx(0.3, rel=1e-5)


def test_tied_weight_is_summed_and_counts_once():
    first, last, middle = parameter(1.0, 2.0), parameter(10.0, 20.0), parameter(2.0)
    tied = [TiedWeight({0: first, 2: last}, [0, 2])]
    transport = LocalTransport(3)
    reduce_tied_gradients(tied, transport)
    assert torch.equal(first.grad, torch.tensor([11.0, 22.0]))
    assert torch.equal(last.grad, first.grad)
    norm = grad_norm({0: [first], 1: [middle], 2: [last]}, transport, tied=tied)
    assert float(norm) == pytest.approx((121 + 484 + 4) ** 0.5)


def test_shared_parameter_is_a_tied_weight_that_is_summed_already():
    shared = parameter(3.0)
    tied = [TiedWeight({0: shared, 1: shared}, [0, 1])]
    transport = LocalTransport(2)
    reduce_tied_gradients(tied, transport)
    assert float(shared.grad) == 3.0
    assert float(grad_norm({0: [shared], 1: [shared]}, transport, tied=tied)) == 3.0


def test_frozen_owner_stays_without_gradient():
    live, frozen = parameter(2.0), Parameter(torch.zeros(1), requires_grad=False)
    reduce_tied_gradients([TiedWeight({0: live, 1: frozen}, [0, 1])], LocalTransport(2))
    assert float(live.grad) == 2.0
    assert frozen.grad is None
    with pytest.raises(ValueError, match=r"ranks \[3\] own the tied weight"):
        TiedWeight({3: live}, [0, 1])


def test_tied_weight_trains_as_in_one_process():
    """An embedding used at both ends, as two copies, against one module used twice."""
    torch.manual_seed(0)
    whole = nn.Linear(4, 4, bias=False)
    front, back = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    for copy in (front, back):
        copy.load_state_dict(whole.state_dict())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    (whole(whole(x)) - y).square().mean().backward()
    plan = pl.plan("1f1b", pp=2, num_microbatches=3)
    pipeline = Pipeline(plan, [front, back], lambda o, t: (o - t).square().sum())
    pipeline.step(x, y)
    tied = [TiedWeight({0: front.weight, 1: back.weight}, [0, 1])]
    reduce_tied_gradients(tied, pipeline.transport)
    torch.testing.assert_close(front.weight.grad, whole.weight.grad)
    assert torch.equal(front.weight.grad, back.weight.grad)


def test_edge_lets_the_output_go():
    x = torch.ones(3, requires_grad=True)
    output = (2 * x).sin() + 1  # an addition does not keep its result
    gone = threading.Event()
    weakref.finalize(output, gone.set)
    edge = gradient_edge(output)
    del output
    assert gone.is_set()
    full_backward([edge], [torch.ones(3)])
    torch.testing.assert_close(input_gradient(x), 2 * torch.cos(2 * torch.ones(3)))
    assert x.grad is None


class Work:
    def __init__(self, error=None):
        self.release, self.error = threading.Event(), error

    def wait(self):
        self.release.wait(10)
        if self.error:
            raise RuntimeError(self.error)


CHANNEL = Channel(0, 1, "forward")


def test_reaper_keeps_sends_until_they_are_done():
    reaper = Reaper(polls=False)
    works = [Work() for _ in range(40)]
    for work in works:
        reaper.hold(work, torch.ones(1), CHANNEL)
    with pytest.raises(TransferTimeout):
        reaper.drain(0.05)
    for work in works:
        work.release.set()
    left = reaper.drain(5.0)
    assert [send.work for send in left] == works[32:]


def test_reaper_passes_on_what_went_wrong():
    reaper = Reaper(polls=False)
    for _ in range(32):
        work = Work("connection closed by peer")
        work.release.set()
        reaper.hold(work, torch.ones(1), CHANNEL)
    with pytest.raises(TransferBroken, match="closed by peer"):
        reaper.drain(5.0)


def test_bubble_ratio():
    events = [
        Event(0, 0, "0F0", 0.0, 1.0),
        Event(0, 1, "0B0", 3.0, 5.0),
        Event(1, 0, "1F0", 1.0, 2.0),
    ]
    assert bubble_ratio(events) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="record=True"):
        bubble_ratio([])


def test_one_watchdog_thread_serves_all_steps_and_ends_with_its_transport():
    class Quiet:
        def failed(self):
            return False

    before = set(threading.enumerate())
    watchdog = Watchdog(Quiet(), grace_s=0.01)
    for _ in range(3):
        watchdog.start(lambda: "here")
        watchdog.stop()
    (thread,) = set(threading.enumerate()) - before
    watchdog.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_watchdog_keeps_nothing_of_a_step_that_is_over():
    """Or its thread drops the process group last, while Python shuts down: an abort at the end."""
    looked = threading.Event()

    class Quiet:
        def failed(self):
            looked.set()
            return False

    class Rank:
        def report(self):
            return "here"

    watchdog, rank = Watchdog(Quiet(), grace_s=0.01), Rank()
    gone = weakref.ref(rank)
    watchdog.start(rank.report)
    assert looked.wait(10)
    watchdog.stop()
    del rank
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None
    watchdog.close()
    assert not any(thread.name == "pipeloom-watchdog" for thread in threading.enumerate())


def test_losses_of_other_shapes_are_added_in_their_order():
    losses = [torch.tensor(0.1), torch.tensor([1e8]), torch.tensor(-1e8), torch.tensor(0.3)]
    expected = ((losses[0] * 0.5 + losses[1] * 0.5) + losses[2] * 0.5) + losses[3] * 0.5
    total = _sum_in_order(losses, 0.5)
    assert total.shape == ()
    assert torch.equal(total, expected.reshape(()))
    assert _sum_in_order([], 0.5) is None
