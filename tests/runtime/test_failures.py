"""How a step over several processes ends when a rank fails: by name, on every rank."""

import os
import re
import signal
import socket
import time

import pytest
import torch

from pipeloom.runtime import AgreementError, PeerLost, Pipeline, PipelineTimeout

pytestmark = pytest.mark.dist


def test_disagreement_is_one_error_on_every_rank(tools, launch):
    def body(transport):
        m = 4 if transport.rank == 1 else 6
        inputs, targets = tools.make_data([2] * m)
        Pipeline(
            tools.plan(3, 1, m), tools.make_stages(3), tools.square_sum, transport=transport
        ).step(inputs, targets)

    results = launch(3, body)
    assert [code for code, _ in results] == [3, 3, 3]
    assert len(set(launch.errors(results))) == 1
    text = launch.errors(results)[0]
    assert text.startswith("AgreementError")
    assert re.search(r"plan: ranks 0, 2 have 1f1b pp=3 .*=6 .*; rank 1 has 1f1b .*=4 ", text)
    assert "boundary" not in text
    assert issubclass(AgreementError, RuntimeError)


def test_disagreement_on_dtype(tools, launch):
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

    texts = launch.errors(launch(2, body))
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
def test_killed_peer_is_named(sockets, tools, launch):
    body = trapped(tools, 3, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    results = launch(3, body, sockets=sockets)
    assert [code for code, _ in results] == [3, -signal.SIGKILL, 3]
    first, _, last = launch.errors(results)
    assert re.match(
        r"PeerLost: rank 0 stands at 0B\d .*waits for the gradient .* from rank 1", first
    )
    assert re.match(r"PeerLost: rank 2 stands at 2F\d .*2RECV_F\d\) from rank 1", last)
    assert issubclass(PeerLost, RuntimeError)


@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
def test_stuck_peer_ends_every_rank(sockets, tools, launch, capfd):
    body = trapped(tools, 3, 1, lambda: time.sleep(1000))
    results = launch(3, body, timeout_s=2.0, sockets=sockets)
    assert [code for code, _ in results] == [3, 70, 3]
    first, _, last = launch.errors(results)
    assert any(text.startswith("PipelineTimeout") for text in (first, last))
    assert re.search(r"rank 0 stands at 0B\d \(op \d+ of \d+\) and waits for .* from rank 1", first)
    assert re.search(r"rank 2 stands at 2F2 .* waits for .* from rank 1", last)
    assert re.search(r"rank 1 stands at 1F2 \(op \d+ of \d+\), computing", capfd.readouterr().err)
    assert issubclass(PipelineTimeout, RuntimeError)


def test_stopped_host_of_the_store_is_named(tools, launch):
    """Rank 0 serves the store and is stopped: connections stay open and nothing answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = trapped(tools, 2, 0, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    results = launch(2, body, timeout_s=1.0, stopped=0, init_method=f"tcp://127.0.0.1:{port}")
    assert [code for code, _ in results] == [-signal.SIGKILL, 3]
    assert re.match(
        r"PipelineTimeout: rank 1 stands at 1F\d .* from rank 0", launch.errors(results)[1]
    )
    assert results[1][1]["seconds"] < 15


def test_failing_peer_is_quoted(tools, launch):
    def fail():
        raise ZeroDivisionError("bad sample")

    results = launch(3, trapped(tools, 3, 2, fail))
    assert [code for code, _ in results] == [3, 3, 3]
    texts = launch.errors(results)
    assert texts[2].startswith("ZeroDivisionError")
    for text in texts[:2]:
        assert text.startswith("PeerLost")
    assert "rank 2 reported: rank 2 stands at 2F2" in texts[1]
    assert "ZeroDivisionError: bad sample" in texts[1]


def test_a53_rank_that_does_not_come_is_named(tools, launch):
    """Evaluation was entered by the last rank alone, which waited for ever."""
    inputs, targets = tools.make_data([2, 2])
    plan = tools.plan(2, 1, 2)

    def body(transport):
        if transport.rank == 0:
            time.sleep(3)
            return
        Pipeline(plan, tools.make_stages(2), tools.square_sum, transport=transport).evaluate(
            inputs, targets
        )

    text = launch.errors(launch(2, body, timeout_s=1.0))[1]
    assert text.startswith("PipelineTimeout: rank 1 waited 1 s to agree")
    assert "did not come: [0]" in text
