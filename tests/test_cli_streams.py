"""The command line's files and streams: odd files, odd streams, files of the wrong kind."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom import cli

PROGRAM = [sys.executable, "-m", "pipeloom"]
PLAN = ("1f1b", "--pp", "2", "-m", "2")


@pytest.mark.parametrize(
    "value",
    ["a", True, {}, [1, None], [[[1]]], ["1"], {"stage": 1}],
)
def test_costs_of_a_wrong_type_are_named(value, tmp_path, capsys):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"forward": value}))
    assert cli.main(["simulate", *PLAN, "--costs", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pipeloom: error: {file}: forward is {json.dumps(value)}")
    assert error.splitlines()[-1].startswith("hint: ")


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", *PLAN),
        ("show", *PLAN, "--svg", "-"),
        ("show", *PLAN, "--png", "-"),
        ("simulate", *PLAN, "--json"),
        ("completion", "bash"),
        ("schedules",),
    ],
)
@pytest.mark.parametrize("to", ["closed", "full"])
def test_output_that_can_not_be_written_is_an_error(argv, to):
    # Python has no stdout at all where it was closed before the start.
    place = {"closed": ">&-", "full": ">/dev/full"}[to]
    if to == "full" and not Path("/dev/full").is_char_device():
        pytest.skip("there is no /dev/full")
    command = ["sh", "-c", f'exec "$@" {place}', "sh", *PROGRAM, *argv]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pipeloom: error: can't write the output: ")
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_does_not_stop_files(tmp_path):
    file = tmp_path / "plan.svg"
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, "show", *PLAN, "--svg", str(file)]
    subprocess.run(command, check=True)
    assert file.read_text().endswith("</svg>\n")


def test_a_plan_is_saved_into_what_is_no_file(tmp_path):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    plan.save(pipe)
    reader.join(timeout=60)
    assert pipe.is_fifo()
    (tmp_path / "copy").write_bytes(found[0])
    assert pl.Plan.load(tmp_path / "copy") == plan


def test_a_plan_is_saved_through_a_link(tmp_path):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    plan.save(link)
    assert link.is_symlink()
    assert pl.Plan.load(file) == plan


def test_names_may_be_of_any_letters(tmp_path, capsys):
    file = tmp_path / "план \u2603.csv"
    pl.plan("1f1b", pp=2, num_microbatches=2).to_csv(file)
    picture = tmp_path / "図.svg"
    assert cli.main(["show", "--plan", str(file), "--svg", str(picture)]) == 0
    assert picture.read_text(encoding="utf-8").startswith("<svg ")
    assert cli.main(["show", "--plan", str(tmp_path / "нет")]) == 2
    assert "нет" in capsys.readouterr().err


def test_a_png_goes_to_stdout():
    command = [*PROGRAM, "show", *PLAN, "--png", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert done.stdout.startswith(b"\x89PNG\r\n\x1a\n")
