"""`pipeloom fuzz`: repeatable, replayable, ends when told to, and finds what is wrong."""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time

import pytest

import pipeloom as pl
from pipeloom.testing import fuzz, invariants

MAIN = """
import argparse, sys
from pipeloom.testing import fuzz
parser = argparse.ArgumentParser()
fuzz.add_arguments(parser)
sys.exit(fuzz.run(parser.parse_args()))
"""


def run(capsys, *argv):
    parser = argparse.ArgumentParser()
    fuzz.add_arguments(parser)
    code = fuzz.run(parser.parse_args(list(argv)))
    return code, capsys.readouterr().out


def test_all_hold(capsys):
    code, out = run(capsys, "--cases", "100", "--seed", "7", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["failure"], report["seed"], report["interrupted"]) == (None, 7, False)
    assert report["cases"] >= 100


def test_same_seed_same_cases(monkeypatch):
    def drawn(seed):
        seen = []
        monkeypatch.setattr(fuzz, "judge", seen.append)
        fuzz.hunt(40, seed, lambda _: None)
        return seen

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_finds_shrinks_and_replays(monkeypatch, capsys):
    def small_pipelines_only(arguments):
        assert arguments["pp"] < 3, "too many ranks"

    monkeypatch.setattr(invariants, "is_sound", small_pipelines_only)
    code, out = run(capsys, "--cases", "300", "--json")
    failure = json.loads(out)["failure"]
    assert code == 1
    assert "too many ranks" in failure["reason"]
    assert failure["case"]["plan"]["pp"] == 3, "the smallest case that fails"
    assert failure["case"]["plan"]["num_microbatches"] == 1

    _, _, *argv = shlex.split(failure["replay"])
    code, out = run(capsys, *argv)
    assert code == 1
    assert "too many ranks" in out
    monkeypatch.undo()
    assert run(capsys, *argv)[0] == 0


def test_a_panic_is_found(monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(_):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(invariants, "is_sound", panic)
    _, reason = fuzz.hunt(20, 0, lambda _: None)
    assert reason == "PanicException: index out of bounds"


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"plan": {}}'])
def test_replay_of_nonsense(capsys, text, refused):
    refused(pl.ParseError, lambda: run(capsys, "--replay", text), "--replay")


def test_cases_must_be_positive(capsys, refused):
    refused(pl.ConfigError, lambda: run(capsys, "--cases", "0"), "cases=0")


def test_ctrl_c_ends_within_a_second():
    command = [sys.executable, "-c", MAIN, "--cases", "1000000", "--progress"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr.read(2)  # it has begun
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=30)
            # A second, and room for a loaded machine.
            assert time.monotonic() - began < 5
            assert process.returncode == 130
            assert b"interrupted" in out
        finally:
            process.kill()
