"""Completion in the shells themselves: what a Tab offers."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest

ASKED = [
    ("pipeloom com", {"compare", "completion"}),
    ("pipeloom show zb_h", {"zb_h1", "zb_h2"}),
    ("pipeloom show --memory-b", {"--memory-backward-input", "--memory-backward-weight"}),
    ("pipeloom completion ", {"bash", "zsh", "fish"}),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """`script(shell)`: the file with its completion, a shell that is there."""
    folder = tmp_path_factory.mktemp("completion")

    def made(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        file = folder / "_pipeloom"
        command = [sys.executable, "-m", "pipeloom", "completion", shell]
        file.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return file

    return made


@pytest.mark.parametrize(("line", "expected"), ASKED)
def test_bash_completes(line, expected, script):
    words = line.split(" ")
    text = (
        f"source {script('bash')}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_pipeloom; echo "${COMPREPLY[@]}"'
    )
    offered = subprocess.run(["bash", "-c", text], check=True, stdout=subprocess.PIPE, text=True)
    assert expected <= set(offered.stdout.split())


@pytest.mark.parametrize(("line", "expected"), ASKED)
def test_fish_completes(line, expected, script):
    text = f"source {script('fish')}; complete -C '{line}'"
    command = ["fish", "--no-config", "-c", text]
    offered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert expected <= {row.partition("\t")[0] for row in offered.splitlines()}


@pytest.mark.parametrize(("line", "expected"), ASKED)
def test_zsh_completes(line, expected, script):
    folder = script("zsh").parent
    # Its completion runs in its line editor alone, which wants a terminal.
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], os.environ | {"TERM": "dumb", "PS1": "> "})
    setup = f"fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -d {folder}/dump"
    os.write(terminal, f"{setup}; LISTMAX=9999; print rea''dy\n".encode())
    try:
        shown = read_until(terminal, lambda text: "ready" in text)
        os.write(terminal, f"{line}\t\t".encode())
        shown = read_until(terminal, lambda text: all(word in text for word in expected))
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert all(word in shown for word in expected), shown


def read_until(terminal, done):
    """What the terminal shows, once it is what was waited for, or after a while."""
    shown, end = "", time.monotonic() + 30
    while not done(shown) and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown
