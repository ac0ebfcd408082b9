"""The command line, in process where that shows the same."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom import cli
from pipeloom.cli import interrupt
from pipeloom.profile import Profile, Step

PLANNING = ("plan", "show", "check", "simulate", "schedules", "compare", "completion", "bench")
DOCUMENT = Path(__file__).parents[1] / "docs" / "cli.md"
PROGRAM = [sys.executable, "-m", "pipeloom"]


def examples(name: str) -> list[str]:
    """The command lines in a command's help."""
    module = __import__(f"pipeloom.cli.{name}", fromlist=["EXAMPLES"])
    return [line.strip() for line in module.EXAMPLES.splitlines() if "pipeloom" in line.split()[:1]]


def documented() -> list[str]:
    """The planning command lines in the documentation."""
    lines = (line.removeprefix("$ ") for line in DOCUMENT.read_text().splitlines())
    words = (line.split() for line in lines)
    return [" ".join(w) for w in words if w[:1] == ["pipeloom"] and w[1:2] and w[1] in PLANNING]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that examples name."""
    monkeypatch.chdir(tmp_path)
    plan = pl.plan("1f1b", pp=4, num_microbatches=8)
    plan.lower("fifo").save(tmp_path / "step.plan")
    (tmp_path / "actions.csv").write_text(plan.to_csv(None))
    timeline = plan.simulate(pl.Costs())
    times = [[column(r).tolist() for r in range(4)] for column in (timeline.start, timeline.end)]
    (tmp_path / "runs" / "train-1").mkdir(parents=True)
    Profile(plan, [Step(1, *times)]).save(tmp_path / "runs" / "train-1" / "profile.json")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "unknown.json").write_text('{"forwards": 1}')
    (tmp_path / "measured.json").write_text('{"forward": 1.5, "latency": 0.25}')
    return tmp_path


@pytest.fixture
def run(capsys):
    """`run("plan", "1f1b", ...)`: (status, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            status = cli.main(argv)
        except SystemExit as stop:
            status = stop.code
        out = capsys.readouterr()
        return status, out.out, out.err

    return call


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_help_with_examples(command, run):
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert f"usage: pipeloom {command}" in out
    assert "examples:\n  pipeloom " + command in out
    assert "--json" in out


@pytest.mark.parametrize("line", [line for name in PLANNING for line in examples(name)])
def test_examples_of_the_help_run(line, run, folder):
    before = set(folder.iterdir())
    status, out, err = run(*shlex.split(line.partition(">")[0])[1:])
    assert (status, err) == (0, "")
    assert out or set(folder.iterdir()) - before


@pytest.mark.usefixtures("folder")
def test_commands_of_the_documentation_run(run):
    assert len(documented()) >= 10
    for line in documented():
        status, _, err = run(*shlex.split(line.partition(">")[0].partition("|")[0])[1:])
        assert (status, err) == (0, ""), line


def test_help_and_schedules_load_nothing_heavy():
    script = (
        "import sys; from pipeloom.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'matplotlib', 'rich', 'hypothesis'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for argv in (
        ["--help"],
        ["schedules"],
        ["schedules", "--json"],
        ["plan", "--help"],
        ["show", "--help"],
    ):
        command = [sys.executable, "-c", script, *argv]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


SHAPE = ("--pp", "4", "-m", "8")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "required: COMMAND"),
        (("plot",), "invalid choice: 'plot'"),
        (("plan",), "no plan is named"),
        (("plan", "1f1b"), "--pp is missing"),
        (("plan", "1f1b", "--pp", "0"), "pp=0"),
        (("plan", "1f1b", "--pp", "two"), "invalid int value: 'two'"),
        (("plan", "2f2b", *SHAPE), "2f2b"),
        (("plan", "2f2b"), "schedule '2f2b' is unknown"),
        (("show", "no/such-run"), "no/such-run"),
        (("plan", "1f1b", *SHAPE, "--rank", "4"), "rank 4"),
        (("plan", "1f1b", *SHAPE, "--reverse-backward"), "reverse_backward"),
        (("plan", "1f1b", *SHAPE, "--no-reverse-backward"), "reverse_backward"),
        (("plan", "1f1b", *SHAPE, "--csv", "--json"), "not allowed with"),
        (("plan", "1f1b", *SHAPE, "--csv", "--rank", "0"), "--rank has no use with --csv"),
        (("plan", "1f1b", *SHAPE, "--save", "no/such/folder/x"), "no/such/folder/x"),
        (("plan", "--plan", "missing.json"), "missing.json"),
        (("plan", "1f1b", "--plan", "step.plan"), "two plans are named"),
        (("plan", "--plan", "step.plan", "--pp", "4"), "--pp has no use with --plan"),
        (("plan", "--plan", "measured.json"), ""),
        (("show", "1f1b", *SHAPE, "--width", "3"), "width=3"),
        (("show", "1f1b", *SHAPE, "--from", "99"), "shows nothing"),
        (("show", "1f1b", *SHAPE, "--ranks", "2:9"), "out of range for pp=4"),
        (("show", "1f1b", *SHAPE, "--ranks", "a:b"), "'a:b'"),
        (("show", "1f1b", *SHAPE, "--svg", "no/such/folder/x.svg"), "no/such/folder"),
        (("show", "1f1b", *SHAPE, "--semantics", "fifo"), "invalid choice: 'fifo'"),
        (("simulate", "1f1b", *SHAPE, "--semantics", "rendezvous"), "rendezvous"),
        (("simulate", "1f1b", *SHAPE, "--forward", "x"), "'x' is not a number"),
        (("simulate", "1f1b", *SHAPE, "--forward", "1,2"), "forward"),
        (("simulate", "1f1b", *SHAPE, "--forward", "-1"), "forward"),
        (("simulate", "1f1b", *SHAPE, "--costs", "actions.csv"), "is not JSON"),
        (("simulate", "1f1b", *SHAPE, "--costs", "unknown.json"), "unknown costs: ['forwards']"),
        (("simulate", "1f1b", *SHAPE, "--costs", "list.json"), "list.json"),
        (("schedules", "nope"), "'nope'"),
        (("compare", "nope", *SHAPE), "'nope'"),
        (("compare", *SHAPE, "--forward", "1,2,3,4"), "--forward is a list"),
        (("bench", "1f1b", *SHAPE, "--repeat", "0"), "--repeat 0"),
        (("plan", "1f1b", *SHAPE, "--forward", "2"), "costs have no use here"),
        (("plan", "1f1b", *SHAPE, "--memory-limit", "3"), "memory_limit"),
        (("plan", "1f1b", *SHAPE, "--layout", "Et|t|t|t|tL"), "layout"),
        (("plan", "--plan", "step.plan", "--memory-limit", "3"), "--memory-limit has no use"),
        (("compare", "1f1b", "--all", *SHAPE), "--all and names"),
        (("compare", *SHAPE, "--memory-limit", "1,2"), "2 entries"),
        (("compare", "gpipe", *SHAPE, "--memory-limit", "1", "--svg", "x.svg"), "rank 0 needs 8"),
        (("show", "runs"), "holds no profile.json"),
        (("show", "list.json"), "is no profile"),
        (("show", "runs/train-1", "--pp", "4"), "--pp has no use with a run"),
        (("show", "1f1b", *SHAPE, "--ranks=-1:2"), "-1:2 is out of range"),
        (("show", "1f1b", *SHAPE, "--png", "x.png", "--width", "9"), "width=9 is out of range"),
        (("show", "1f1b", *SHAPE, "--png", "x.png", "--width", "90000"), "width=90000"),
        (("show", "1f1b", *SHAPE, "--html", "x.html", "--from", "99"), "shows nothing"),
        (("show", "1f1b", *SHAPE, "--html", "x.html", "--to", "nan"), "NaN"),
        (("show", "1f1b", *SHAPE, "--html", "x.html", "--ranks", "2:9"), "out of range for pp=4"),
        (("show", "1f1b", *SHAPE, "--from", "1e300"), "1e300"),
        (("show", "1f1b", *SHAPE, "--latency", "1,2"), "latency"),
        (("show", "1f1b", "--pp", "1000", "-m", "100000"), "too big to draw"),
        (("plan", "1f1b", *SHAPE, "--save", "."), "can't write .: Is a directory"),
        (("show", "--plan", "."), "'.'"),
        (("completion", "csh"), "invalid choice: 'csh'"),
    ],
)
def test_bad_input_is_one_clear_error(argv, words, run):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("pipeloom: error: ")
    assert words in err
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[-1].startswith("hint: ")


def test_plans_are_printed_as_text_json_and_csv(run):
    plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4)
    shape = ("interleaved_1f1b", "--pp", "2", "--vp", "2", "-m", "4")
    _, text, _ = run("plan", *shape)
    assert [line.split()[2:] for line in text.splitlines()] == [plan.ops(0), plan.ops(1)]
    _, text, _ = run("plan", *shape, "--json")
    found = json.loads(text)
    assert found["orders"] == {"0": plan.ops(0), "1": plan.ops(1)}
    assert (found["pp"], found["vp"], found["microbatch_group_size"]) == (2, 2, 2)
    _, text, _ = run("plan", *shape, "--csv")
    assert pl.Plan.from_csv(text) == plan
    _, text, _ = run("plan", *shape, "--lower", "fifo", "--csv")
    assert pl.Plan.from_csv(text).ops(0) == plan.lower("fifo").ops(0)


def test_every_shape_option_reaches_the_planner(run):
    argv = {
        ("--microbatch-group-size", "3"): {"microbatch_group_size": 3},
        ("--extra-warmup", "1"): {"extra_warmup": 1},
        ("--forward-only",): {"forward_only": True},
        ("--num-microbatches-with-partial-activation-checkpoints", "0"): {
            "num_microbatches_with_partial_activation_checkpoints": 0
        },
    }
    for words, arguments in argv.items():
        _, text, _ = run(
            "plan", "interleaved_1f1b", "--pp", "2", "--vp", "2", "-m", "6", *words, "--json"
        )
        plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=6, **arguments)
        assert json.loads(text)["orders"]["0"] == plan.ops(0), words
    _, text, _ = run(
        "plan", "looped_bfs", "--pp", "2", "--vp", "2", "-m", "4", "--no-reverse-backward"
    )
    plan = pl.plan("looped_bfs", pp=2, vp=2, num_microbatches=4, reverse_backward=False)
    assert text.splitlines()[0].split()[2:] == plan.ops(0)


def test_saved_plans_come_back(run, folder):
    status, out, _ = run("plan", "zb_h1", *SHAPE, "--lower", "streams", "--save", "x.plan")
    assert status == 0
    assert "x.plan" in out
    assert pl.Plan.load(folder / "x.plan") == pl.plan("zb_h1", pp=4, num_microbatches=8).lower(
        "streams"
    )
    assert run("show", "--plan", "x.plan")[0] == 0
    _, text, _ = run("plan", "--plan", "actions.csv")
    assert text == run("plan", "1f1b", *SHAPE)[1]


@pytest.mark.usefixtures("folder")
def test_check_says_what_is_wrong_with_status_1(run):
    assert run("check", "1f1b", *SHAPE)[0] == 0
    assert run("check", "1f1b", *SHAPE, "--lower", "fifo", "--semantics", "all")[0] == 0
    _, out, _ = run("check", "1f1b", *SHAPE, "--lower", "streams", "--semantics", "all", "--json")
    report = json.loads(out)
    assert report["ok"]
    assert report["progress"]["streams"]
    assert report["unpromised"][0]["op"]
    assert run("check", "1f1b", *SHAPE, "--lower", "streams", "--semantics", "rendezvous")[0] == 1
    Path("wrong.csv").write_text("0B0,0F0\n1F0,1B0\n")
    status, out, err = run("check", "--plan", "wrong.csv")
    assert (status, out) == (1, "")
    assert "0B0" in err
    status, out, err = run("check", "--plan", "wrong.csv", "--json")
    report = json.loads(out)
    assert (status, err, report["ok"]) == (1, "", False)
    assert {"rule", "rank", "position", "op", "message", "hint"} <= set(report["violations"][0])
    # Elsewhere a wrong plan is bad input.
    assert run("show", "--plan", "wrong.csv")[0] == 2


@pytest.mark.usefixtures("folder")
def test_simulate_takes_costs_from_options_and_file(run):
    def makespan(*argv: str) -> float:
        return json.loads(run("simulate", "1f1b", "--pp", "2", "-m", "2", "--json", *argv)[1])[
            "makespan"
        ]

    assert makespan() == 9
    assert makespan("--forward", "2") == 12
    assert makespan("--forward", "2,1", "--backward", "3") == 13
    assert makespan("--latency", "0.5") == 10
    assert makespan("--latency", "0,1;2,0") == 12
    assert makespan("--costs", "measured.json") == 11
    assert makespan("--costs", "measured.json", "--latency", "0") == 10.5


def test_simulate_prints_what_the_timeline_says(run):
    timeline = pl.plan("zb_h1", pp=4, num_microbatches=8).simulate(pl.Costs())
    _, text, _ = run("simulate", "zb_h1", *SHAPE)
    words = [line.split() for line in text.splitlines()]
    assert ["makespan", f"{timeline.makespan:g}"] in [line[:2] for line in words]
    parts = [f"{part:g}" for part in timeline.bubble_parts(3).values()]
    assert ["3", f"{timeline.bubble(3):.1%}", *parts, f"{timeline.peak_memory(3):g}"] in words


def test_compare_gives_every_schedule_the_same_model(run):
    _, text, _ = run("compare", "--pp", "4", "--vp", "2", "-m", "8", "--json")
    rows = {row["schedule"]: row for row in json.loads(text)}
    assert set(rows) == {schedule.name for schedule in pl.schedules()} - {"forward_only"}
    work = 8 * 3
    for row in rows.values():
        if row["makespan"] is not None:
            assert row["makespan"] * (1 - row["bubble_ratio"]) == pytest.approx(work)
    # The textbook: (pp - 1) / (vp m + pp - 1) of the makespan.
    assert rows["1f1b"]["bubble_ratio"] == pytest.approx(3 / 11)
    assert rows["interleaved_1f1b"]["bubble_ratio"] == pytest.approx(3 / 19)
    made = [row["makespan"] for row in rows.values() if row["makespan"] is not None]
    assert made == sorted(made)
    assert "pp=4" in rows["no_pipelining"]["reason"]


def test_compare_gives_pieces_their_part_of_a_microbatch(run):
    cost = ("--boundary-bytes", "8", "--bandwidth", "16", "--latency", "0.25")
    shape = (*SHAPE, "--num-seq-pieces", "4", *cost, "--json")
    _, text, _ = run("compare", "1f1b", "seq1f1b", *shape)
    rows = {row["schedule"]: row for row in json.loads(text)}
    for row in rows.values():
        assert row["makespan"] * (1 - row["bubble_ratio"]) == pytest.approx(8 * 3)
    pieces = pl.plan("seq1f1b", pp=4, num_microbatches=8, num_seq_pieces=4)
    times = dict.fromkeys(("forward", "backward_input", "backward_weight", "memory_forward"), 0.25)
    own = {"memory_backward_weight": -0.25, "latency": 0.25, "bandwidth": 16, "boundary_bytes": 2}
    part = pl.Costs(**times, **own)
    assert rows["seq1f1b"]["makespan"] == pieces.simulate(part).makespan
    assert max(rows["seq1f1b"]["peak_memory"]) < max(rows["1f1b"]["peak_memory"])


def test_compare_counts_transfers_as_lowering_makes_them(run):
    _, text, _ = run("compare", "--all", "--pp", "4", "--vp", "2", "-m", "8", "--json")
    for row in json.loads(text):
        if row["makespan"] is None:
            continue
        plan = pl.plan(row["schedule"], pp=4, vp=row["vp"], num_microbatches=8).lower("streams")
        kinds = [kind for rank in range(4) for kind in plan.columns(rank)["kind"].tolist()]
        sends = kinds.count(pl.OpKind.SEND_F) + kinds.count(pl.OpKind.SEND_B)
        assert row["transfers"] == sends, row["schedule"]
        assert len(row["peak_memory"]) == 4


@pytest.mark.usefixtures("folder")
def test_compare_leaves_out_what_does_not_fit_and_draws_the_rest(run):
    limited = ("--memory-limit", "4")
    _, text, _ = run("compare", "1f1b", "gpipe", "zb_h2", *SHAPE, *limited, "--json")
    rows = {row["schedule"]: row for row in json.loads(text)}
    assert rows["1f1b"]["peak_memory"] == [4, 3, 2, 1]
    assert rows["gpipe"]["reason"] == "rank 0 needs 8 of memory, above the limit of 4"
    per_rank = ("--memory-limit", "4,3,2,0")
    _, text, _ = run("compare", "1f1b", *SHAPE, *per_rank)
    assert text == "1f1b: rank 3 needs 1 of memory, above the limit of 0\n"
    names = ("1f1b", "gpipe", "zb_h1")
    status, out, _ = run("compare", *names, *SHAPE, *limited, "--svg", "a.svg", "--html", "a.html")
    assert (status, out) == (0, "")
    assert Path("a.svg").read_text().count("<g ") == 2
    assert '"name":"zb_h1"' in Path("a.html").read_text()


@pytest.mark.usefixtures("folder")
def test_show_draws_a_run_below_its_plan(run):
    _, text, _ = run("show", "runs/train-1")
    head = "1f1b  pp=4 vp=1 m=8   {}   makespan 33   bubble 27.3%"
    assert head.format("plan, ms, at the measured costs") in text
    assert head.format("run, step 1, ms") in text
    assert text.count("6 (4 to 10): waits for B0 of rank 1") == 2
    assert "step: planned 33 ms, ran 33 ms (+0.0%)" in text
    _, text, _ = run("show", "runs/train-1", "--backward", "1", "--latency", "0", "--json")
    found = json.loads(text)
    ops = {op["op"]: op for op in found["ops"]}
    assert (found["planned_makespan"], found["makespan"], len(ops)) == (22, 33, 64)
    assert (ops["3B0"]["planned_start"], ops["3B0"]["start"]) == (4, 4)
    assert (ops["3B0"]["late"], ops["3B0"]["longer"]) == (0, 1)
    assert (ops["2B0"]["late"], ops["2B0"]["longer"]) == (1, 1)
    files = ("--svg", "r.svg", "--html", "r.html", "--png", "r.png", "--trace", "r.json")
    assert run("show", "runs/train-1", *files)[0] == 0
    assert Path("r.svg").read_text().count("<g ") == 2
    assert '"paired":true' in Path("r.html").read_text()
    assert json.loads(Path("r.json").read_text())["traceEvents"]


def test_completion_knows_commands_schedules_and_options(run):
    words = json.loads(run("completion", "bash", "--json")[1])
    assert set(words) == set(cli.COMMANDS)
    assert {"--critical-path", "zb_h1"} <= set(words["show"])
    assert {"bash", "zsh", "fish"} <= set(words["completion"])


@pytest.mark.usefixtures("folder")
def test_show_writes_all_that_is_asked_for(run):
    status, out, _ = run(
        "show",
        "1f1b",
        *SHAPE,
        "--svg",
        "a.svg",
        "--html",
        "a.html",
        "--png",
        "a.png",
        "--trace",
        "a.json",
    )
    assert (status, out) == (0, "")
    assert "<svg" in Path("a.svg").read_text()
    assert Path("a.html").read_text().startswith("<!DOCTYPE html>")
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("a.json").read_text())["traceEvents"]
    assert run("show", "1f1b", *SHAPE, "--svg", "-")[1] == Path("a.svg").read_text()


def test_show_prints_times_as_json(run):
    found = json.loads(run("show", "dualpipe_v", "--pp", "2", "-m", "4", "--json")[1])
    plan = pl.plan("dualpipe_v", pp=2, num_microbatches=4)
    assert len(found["orders"]["0"]) == plan.num_ops_of(0)
    assert found["orders"]["0"][0] == {"op": "0F0", "start": 0, "end": 1}
    assert max(op["end"] for order in found["orders"].values() for op in order) == found["makespan"]


def test_colour_is_for_terminals_unless_asked_for(run):
    assert "\x1b[" not in run("show", "1f1b", *SHAPE)[1]
    assert "\x1b[" in run("show", "1f1b", *SHAPE, "--color", "always")[1]
    assert "\x1b[" in in_terminal("show", "1f1b", *SHAPE)
    assert "\x1b[" not in in_terminal("show", "1f1b", *SHAPE, NO_COLOR="1")
    assert "\x1b[" not in in_terminal("show", "1f1b", *SHAPE, "--color", "never")


def in_terminal(*argv: str, **environment: str) -> str:
    """What the program writes into a terminal of 100 columns."""
    main, terminal = pty.openpty()
    settings = {"TERM": "xterm-256color", "COLUMNS": "100", **environment}
    process = subprocess.Popen(
        [*PROGRAM, *argv], stdout=terminal, env=clean_environment() | settings
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the terminal is closed
            break
        if not part:
            break
        output += part
    os.close(main)
    assert process.wait() == 0
    return output.decode()


def clean_environment() -> dict[str, str]:
    return {
        k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")
    }


def test_bench_times_each_step(run):
    _, text, _ = run("bench", "1f1b", *SHAPE, "--repeat", "1", "--json")
    steps = json.loads(text)["steps"]
    assert [step["step"].split()[0] for step in steps] == [
        "plan",
        "columns",
        "lower",
        "check",
        "simulate",
    ]
    assert all(step["seconds"] > 0 for step in steps)
    assert "NS AN OP" in run("bench", "1f1b", *SHAPE, "--repeat", "1")[1]


@pytest.mark.parametrize("more", [(), ("--forward-only",)])
def test_bench_runs_a_step_if_asked(run, more):
    command = ("bench", "1f1b", *SHAPE, *more, "--repeat", "1", "--json")
    steps = json.loads(run(*command, "--step")[1])["steps"]
    assert [step["step"] for step in steps][-1] == "run tiny stages"
    assert steps[-1]["seconds"] > 0
    assert len(json.loads(run(*command)[1])["steps"]) == len(steps) - 1


def test_a_closed_pipe_is_quiet():
    command = [*PROGRAM, "plan", "1f1b", "--pp", "4", "-m", "50000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def interruptible(*command: str) -> subprocess.Popen:
    """A process that Ctrl-C reaches even where a shell started us in the background."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_between_calls_ends_with_130():
    process = interruptible(
        *PROGRAM, "bench", "1f1b", "--pp", "8", "-m", "2000", "--repeat", "1000000"
    )
    # Before its second thread, the one that watches, the program has not begun.
    tasks = Path(f"/proc/{process.pid}/task")
    while tasks.exists() and len(list(tasks.iterdir())) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "pipeloom: interrupted\n")


def test_ctrl_c_inside_a_long_call_ends_with_130():
    # A call that takes minutes without the interpreter, in place of a command. Where Ctrl-C comes
    # before the call has begun, Python raises it, and `main` gives the same status.
    script = (
        "import hashlib, sys, threading; from pipeloom import cli; from pipeloom.cli import fuzz\n"
        "def run(arguments):\n"
        "    threading.Timer(0.5, print, ['ready'], {'flush': True}).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
        "fuzz.run = run\n"
        "sys.exit(cli.main(['fuzz']))"
    )
    process = interruptible(sys.executable, "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "pipeloom: interrupted\n")


@pytest.fixture
def ctrl_c():
    """Ctrl-C as Python has it, even where a shell started us in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_commands_that_save_first_keep_their_ctrl_c():
    with interrupt.prompt_interrupts(130):
        interrupt.keep_on_interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        # Longer than the grace: the process would have ended by now.
        time.sleep(interrupt.GRACE_S + 0.2)


def test_main_runs_outside_the_main_thread(capsys):
    found = []
    thread = threading.Thread(target=lambda: found.append(cli.main(["schedules"])))
    thread.start()
    thread.join()
    assert found == [0]
    assert "interleaved_1f1b" in capsys.readouterr().out


def test_the_module_runs_as_the_program():
    out = subprocess.run([*PROGRAM, "--version"], check=True, capture_output=True, text=True).stdout
    assert out == f"pipeloom {pl.__version__}\n"
