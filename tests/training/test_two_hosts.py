"""Two hosts, as two network namespaces: torchrun over a link, and what a cut of it leaves."""

import os
import re
import subprocess
import sys
import time

import pytest

from pipeloom.training.checkpoint import resolve_checkpoint
from pipeloom.training.log import read_losses

ADDRESSES = ("10.215.7.1", "10.215.7.2")
LIMIT_S = 10


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of two namespaces that reach each other, and the name of each one's end of the link."""
    names = [f"pipeloom-{os.getpid()}-{number}" for number in (0, 1)]
    links = [f"pl{os.getpid() % 100000}-{number}" for number in (0, 1)]
    try:
        ip("netns", "add", names[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, links, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(hosts, words, folder):
    """The lines of docs/training.md, one on each host."""
    started = []
    for number, (name, link) in enumerate(hosts):
        command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)),
            *("--master-addr", ADDRESSES[0], "--master-port", "29511"),
            *("--module", "pipeloom", "train", *words),
        ]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": "1"}
        with (folder / f"host{number}").open("w") as said:
            started.append(
                subprocess.Popen(
                    command, env=environment, stdout=said, stderr=subprocess.STDOUT, cwd=folder
                )
            )
    return started


def finish(started, folder, limit_s):
    deadline = time.monotonic() + limit_s
    try:
        for process in started:
            process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail("".join((folder / f"host{n}").read_text()[-3000:] for n in (0, 1)))
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait(40)
    return [process.returncode for process in started]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hosts_train_and_a_cut_link_ends_both_with_the_checkpoint_kept(
    hosts, text, tmp_path, make_args, run
):
    out = tmp_path / "run"
    small = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "num_microbatches": 4,
        "lr_decay_steps": 100,
        "eval_microbatches": 3,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in small.items()]
    words += ["--data", str(text), "--schedule", "1f1b", f"--timeout-s={LIMIT_S}"]
    endless = start(
        hosts, [*words, "--out", str(out), "--steps=100000", "--save-interval=5"], tmp_path
    )
    deadline = time.monotonic() + 150
    while not (out / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline, (tmp_path / "host0").read_text()
        assert endless[0].poll() is None, (tmp_path / "host0").read_text()
        time.sleep(0.1)
    ip("-n", hosts[0][0], "link", "set", hosts[0][1], "down")
    codes = finish(endless, tmp_path, 120)
    assert 0 not in codes
    said = [(tmp_path / f"host{number}").read_text() for number in (0, 1)]
    assert re.search(r"pipeloom: error: .*rank 0 .*", said[0]), said[0]
    assert re.search(r"pipeloom: error: .*rank 1 .*", said[1]), said[1]
    kept = resolve_checkpoint(out)
    done = int(kept.name.split("-")[1])

    # The link is back: the same two hosts go on, and do what one process does.
    ip("-n", hosts[0][0], "link", "set", hosts[0][1], "up")
    resume = [f"--resume={kept}", f"--steps={done + 2}", f"--timeout-s={LIMIT_S}"]
    again = tmp_path / "again"
    codes = finish(start(hosts, [*resume, "--out", str(again)], tmp_path), tmp_path, 120)
    assert codes == [0, 0], (tmp_path / "host0").read_text()
    alone = run(make_args(**small, schedule="1f1b", steps=done + 2, resume=str(kept)))
    both = [record.loss for record in read_losses(again) if record.loss is not None]
    assert both == alone["losses"]
