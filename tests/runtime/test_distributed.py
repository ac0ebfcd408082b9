"""The same steps with one process a rank over gloo, and how they end when a rank fails."""

import datetime
import os
import re
import signal
import socket
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pipeloom as pl
from pipeloom.runtime import (
    AgreementError,
    PeerLost,
    Pipeline,
    PipelineTimeout,
    TiedWeight,
    clip_grad_norm,
    reduce_data_parallel_gradients,
    reduce_tied_gradients,
)
from pipeloom.runtime.distributed import TorchTransport

pytestmark = pytest.mark.dist


def child(rank, pp, folder, body, init_method, options):
    """Run `body(transport)` and leave what it gave, or how it failed, in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=pp,
        timeout=datetime.timedelta(seconds=30),
    )
    started = time.monotonic()
    try:
        outcome = body(TorchTransport(**options))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if os.environ.get("PIPELOOM_TEST_TRACE"):
            traceback.print_exc()
        torch.save({"error": text, "seconds": time.monotonic() - started}, f"{folder}/{rank}")
        os._exit(3)
    torch.save({"value": outcome}, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def launch(tmp_path, pp, body, timeout_s=20.0, *, stopped=None, init_method=None, sockets=True):
    """Fork `pp` ranks; give (exit code, what it left) of each.

    Rank `stopped` stops itself and is killed once the others have ended.
    """
    init_method = init_method or f"file://{tmp_path}/store"
    options = {"timeout_s": timeout_s, "sockets": sockets}
    context = mp.get_context("fork")
    processes = [
        context.Process(target=child, args=(rank, pp, str(tmp_path), body, init_method, options))
        for rank in range(pp)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank != stopped:
            process.join(60)
    results = []
    for rank, process in enumerate(processes):
        if process.is_alive():
            process.kill()
            process.join()
        file = tmp_path / str(rank)
        left = torch.load(file, weights_only=False) if file.exists() else {}
        results.append((process.exitcode, left))
    return results


def values(results):
    assert [code for code, _ in results] == [0] * len(results), results
    return [left["value"] for _, left in results]


def errors(results):
    return [left.get("error", "") for _, left in results]


def gradients_of(pipeline):
    return [p.grad for chunks in pipeline.chunks.values() for c in chunks for p in c.parameters()]


@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize(
    ("pp", "vp", "sizes", "shape"),
    [
        (2, 1, [2] * 5, (2, 6)),
        (2, 2, [7, 5, 3, 9], None),
        (2, 2, [7, 5, 3, 9], "each"),
        (4, 1, [3] * 2, None),
        (3, 2, [1] * 7, (1, 6)),
    ],
)
def test_equal_to_the_unpipelined_model(tools, tmp_path, pp, vp, sizes, shape, sockets):
    inputs, targets = tools.make_data(sizes)
    if shape == "each":
        shape = [(size, tools.width) for size in sizes]
    plan = tools.plan(pp, vp, len(sizes))
    reference = tools.make_stages(pp * vp)
    expected = tools.run_reference(reference, inputs, targets)

    def body(transport):
        pipeline = Pipeline(
            plan,
            tools.make_stages(pp * vp),
            tools.square_sum,
            transport=transport,
            boundary_shape=shape,
        )
        results = []
        for _ in range(2):
            for p in pipeline.parameters():
                p.grad = None
            results.append(pipeline.step(inputs, targets).loss)
        evaluated = pipeline.evaluate(inputs, targets).loss
        return results, evaluated, gradients_of(pipeline)

    outcomes = values(launch(tmp_path, pp, body, sockets=sockets))
    for rank, (losses, evaluated, gradients) in enumerate(outcomes):
        if rank == pp - 1:
            assert torch.equal(losses[0], expected)
            assert torch.equal(losses[1], expected)
            assert torch.equal(evaluated, expected)
        else:
            assert losses == [None, None]
        true = [p.grad for stage in reference[rank::pp] for p in stage.parameters()]
        for mine, truth in zip(gradients, true, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6 * float(truth.abs().max()))


@pytest.mark.parametrize(
    ("sockets", "m", "size"), [(False, 90, 1), (True, 90, 1), (True, 6, 50_000)]
)
def test_many_sends_in_flight_are_all_kept(tools, tmp_path, sockets, m, size):
    """GPipe sends all outputs before it reads: more than the kernel's buffers or one batch hold."""
    inputs, targets = tools.make_data([size] * m)
    plan = pl.plan("gpipe", pp=2, num_microbatches=m)
    reference = tools.make_stages(2)
    expected = tools.run_reference(reference, inputs, targets)

    def body(transport):
        pipeline = Pipeline(plan, tools.make_stages(2), tools.square_sum, transport=transport)
        return [pipeline.step(inputs, targets).loss for _ in range(2)][-1]

    assert torch.equal(values(launch(tmp_path, 2, body, sockets=sockets))[1], expected)


def test_counted_tokens_reach_every_rank(tools, tmp_path):
    from torch import nn

    class Chunk(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, self.x = block, None

        def set_input_tensor(self, x):
            self.x = x

        def forward(self, x):
            return self.block(x if self.x is None else self.x)

    inputs, targets = tools.make_data([2, 2, 2])
    reference = tools.make_stages(2)
    expected = tools.run_reference(reference, inputs, targets)

    def step(data, chunk):
        x, y = next(data)
        return chunk(x), lambda out: (tools.square_sum(out, y), y.numel())

    def body(transport):
        chunk = Chunk(tools.make_stages(2)[transport.rank])
        result = pl.get_forward_backward_func(2)(
            forward_step_func=step,
            data_iterator=iter(list(zip(inputs, targets, strict=True))),
            model=chunk,
            num_microbatches=3,
            seq_length=2,
            micro_batch_size=6,
            variable_shapes=True,
            transport=transport,
        )
        return result.loss, [p.grad for p in chunk.parameters()]

    outcomes = values(launch(tmp_path, 2, body))
    assert torch.equal(outcomes[1][0], expected)
    for (_, gradients), stage in zip(outcomes, reference, strict=True):
        for mine, p in zip(gradients, stage.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad, rtol=1e-5, atol=1e-7)


def test_norm_and_tied_weights_over_ranks(tmp_path):
    def body(transport):
        rank = transport.rank
        tied = torch.nn.Parameter(torch.zeros(2))
        own = torch.nn.Parameter(torch.zeros(1))
        own.grad = torch.tensor([[3.0], [4.0], [0.0]][rank])
        weights = []
        if rank in (0, 2):
            tied.grad = torch.tensor([6.0, 0.0]) if rank == 0 else None  # the other got none
            weights = [TiedWeight({rank: tied}, [0, 2])]
        reduce_tied_gradients(weights, transport)
        norm = clip_grad_norm(
            {rank: [own, tied] if weights else [own]}, 1.0, transport, tied=weights
        )
        return float(norm), tied.grad, own.grad

    norm = 61.0**0.5
    outcomes = values(launch(tmp_path, 3, body))
    assert [outcome[0] for outcome in outcomes] == [pytest.approx(norm)] * 3
    torch.testing.assert_close(outcomes[0][1], torch.tensor([6.0, 0.0]) / norm)
    assert torch.equal(outcomes[0][1], outcomes[2][1])
    torch.testing.assert_close(outcomes[1][2], torch.tensor([4.0]) / norm)


def test_disagreement_is_one_error_on_every_rank(tools, tmp_path):
    def body(transport):
        m = 4 if transport.rank == 1 else 6
        inputs, targets = tools.make_data([2] * m)
        Pipeline(
            tools.plan(3, 1, m), tools.make_stages(3), tools.square_sum, transport=transport
        ).step(inputs, targets)

    results = launch(tmp_path, 3, body)
    assert [code for code, _ in results] == [3, 3, 3]
    assert len(set(errors(results))) == 1
    text = errors(results)[0]
    assert text.startswith("AgreementError")
    assert re.search(r"plan: ranks 0, 2 have 1f1b pp=3 .*=6 .*; rank 1 has 1f1b .*=4 ", text)
    assert "boundary" not in text
    assert issubclass(AgreementError, RuntimeError)


def test_disagreement_on_dtype(tools, tmp_path):
    def body(transport):
        inputs, targets = tools.make_data([2, 2])
        Pipeline(
            tools.plan(2, 1, 2),
            tools.make_stages(2),
            tools.square_sum,
            transport=transport,
            boundary_shape=(2, 6),
            boundary_dtype=[torch.float32, torch.bfloat16][transport.rank],
        ).step(inputs, targets)

    texts = errors(launch(tmp_path, 2, body))
    assert texts[0] == texts[1]
    assert "rank 0 has (2, 6), torch.float32; rank 1 has (2, 6), torch.bfloat16" in texts[0]


class Trap(torch.nn.Module):
    """A stage that does something bad at its n-th forward."""

    def __init__(self, stage, deed, at):
        super().__init__()
        self.stage, self.deed, self.at, self.calls = stage, deed, at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            self.deed()
        return self.stage(x)


def trapped(tools, pp, victim, deed, at=3, m=6):
    inputs, targets = tools.make_data([2] * m)
    plan = tools.plan(pp, 1, m)

    def body(transport):
        stages = tools.make_stages(pp)
        stages[victim] = Trap(stages[victim], deed, at)
        Pipeline(plan, stages, tools.square_sum, transport=transport).step(inputs, targets)

    return body


@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
def test_killed_peer_is_named(sockets, tools, tmp_path):
    body = trapped(tools, 3, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    results = launch(tmp_path, 3, body, sockets=sockets)
    assert [code for code, _ in results] == [3, -signal.SIGKILL, 3]
    first, _, last = errors(results)
    assert re.match(
        r"PeerLost: rank 0 stands at 0B\d .*waits for the gradient .* from rank 1", first
    )
    assert re.match(r"PeerLost: rank 2 stands at 2F\d .*2RECV_F\d\) from rank 1", last)
    assert issubclass(PeerLost, RuntimeError)


@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
def test_stuck_peer_ends_every_rank(sockets, tools, tmp_path, capfd):
    body = trapped(tools, 3, 1, lambda: time.sleep(1000))
    results = launch(tmp_path, 3, body, timeout_s=2.0, sockets=sockets)
    assert [code for code, _ in results] == [3, 70, 3]
    first, _, last = errors(results)
    assert any(text.startswith("PipelineTimeout") for text in (first, last))
    assert re.search(r"rank 0 stands at 0B\d \(op \d+ of \d+\) and waits for .* from rank 1", first)
    assert re.search(r"rank 2 stands at 2F2 .* waits for .* from rank 1", last)
    assert re.search(r"rank 1 stands at 1F2 \(op \d+ of \d+\), computing", capfd.readouterr().err)
    assert issubclass(PipelineTimeout, RuntimeError)


def test_stopped_host_of_the_store_is_named(tools, tmp_path):
    """Rank 0 serves the store and is stopped: connections stay open and nothing answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = trapped(tools, 2, 0, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    results = launch(
        tmp_path, 2, body, timeout_s=1.0, stopped=0, init_method=f"tcp://127.0.0.1:{port}"
    )
    assert [code for code, _ in results] == [-signal.SIGKILL, 3]
    assert re.match(r"PipelineTimeout: rank 1 stands at 1F\d .* from rank 0", errors(results)[1])
    assert results[1][1]["seconds"] < 15


def test_failing_peer_is_quoted(tools, tmp_path):
    def fail():
        raise ZeroDivisionError("bad sample")

    results = launch(tmp_path, 3, trapped(tools, 3, 2, fail))
    assert [code for code, _ in results] == [3, 3, 3]
    texts = errors(results)
    assert texts[2].startswith("ZeroDivisionError")
    for text in texts[:2]:
        assert text.startswith("PeerLost")
    assert "rank 2 reported: rank 2 stands at 2F2" in texts[1]
    assert "ZeroDivisionError: bad sample" in texts[1]


def test_rank_that_does_not_come_is_named(tools, tmp_path):
    inputs, targets = tools.make_data([2, 2])
    plan = tools.plan(2, 1, 2)

    def body(transport):
        if transport.rank == 0:
            time.sleep(3)
            return
        Pipeline(plan, tools.make_stages(2), tools.square_sum, transport=transport).evaluate(
            inputs, targets
        )

    text = errors(launch(tmp_path, 2, body, timeout_s=1.0))[1]
    assert text.startswith("PipelineTimeout: rank 1 waited 1 s to agree")
    assert "did not come: [0]" in text


def grid(rank):
    """Two pipelines of two ranks: (pipeline group, data-parallel group) of a rank."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pipelines[rank // 2], copies[rank % 2]


def test_two_pipelines_on_halves_of_the_data(tools, tmp_path):
    """Shapes travel inside each pipeline's group; gradients are those of all the data."""
    sizes = [[7, 5, 3, 9], [2, 8, 4, 1]]
    plan = tools.plan(2, 2, 4)
    reference = tools.make_stages(4)
    data = [tools.make_data(part, seed) for seed, part in enumerate(sizes)]
    tools.run_reference(
        reference, [x for inputs, _ in data for x in inputs], [y for _, ys in data for y in ys]
    )

    def body(_):
        pipeline_group, copies = grid(dist.get_rank())
        transport = TorchTransport(pipeline_group, timeout_s=20.0)
        pipeline = Pipeline(
            plan,
            tools.make_stages(4),
            tools.square_sum,
            transport=transport,
            data_parallel_group=copies,
        )
        result = pipeline.step(*data[dist.get_rank() // 2])
        reduce_data_parallel_gradients(pipeline.parameters(), copies)
        if result.loss is not None:
            dist.all_reduce(result.loss, group=copies)
        return result.loss, gradients_of(pipeline)

    outcomes = values(launch(tmp_path, 4, body))
    for rank, (_, gradients) in enumerate(outcomes):
        true = [p.grad for stage in reference[rank % 2 :: 2] for p in stage.parameters()]
        for mine, truth in zip(gradients, true, strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6 * float(truth.abs().max()))
    assert torch.equal(outcomes[1][0], outcomes[3][0])
