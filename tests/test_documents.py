"""README and docs: their code runs, their commands parse, their links lead somewhere."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom import cli
from pipeloom.profile import Profile, Step

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benches").glob("*.md")]
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def blocks(page, *languages):
    found = FENCED.findall(page.read_text())
    return [text for language, text in found if language in languages]


def names(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a run, as docs/cli.md reads it."""
    monkeypatch.chdir(tmp_path)
    plan = pl.plan("1f1b", pp=2, num_microbatches=8)
    timeline = plan.simulate(pl.Costs())
    times = [[column(r).tolist() for r in range(2)] for column in (timeline.start, timeline.end)]
    (tmp_path / "runs/train-1").mkdir(parents=True)
    Profile(plan, [Step(1, *times)]).save(tmp_path / "runs/train-1/profile.json")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=names)
def test_code_in_the_documents_runs(page):
    if page.name == "runtime.md":
        pytest.skip("tests/runtime/test_docs.py runs it, with torch")
    if "import torch" in page.read_text():
        pytest.importorskip("torch")
    known = {"__name__": "document", "pl": pl}
    for block in blocks(page, "python"):
        exec(compile(block, names(page), "exec"), known)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "pycon")], ids=names)
def test_sessions_in_the_documents_print_what_they_show(page):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    known = {"pl": pl}
    for block in blocks(page, "pycon"):
        test = doctest.DocTestParser().get_doctest(block, known, names(page), names(page), 0)
        runner.run(test, clear_globs=False)
        known = test.globs
    assert runner.summarize(verbose=False).failed == 0


def commands():
    """Each `pipeloom COMMAND ...` of the documents, under torchrun too, and whether it is whole."""
    for page in PAGES:
        text = page.read_text()
        lines = [(line, True) for b in blocks(page, "", "bash") for line in b.splitlines()]
        lines += [(line, False) for line in re.findall(r"`([^`\n]+)`", text)]
        for line, whole in lines:
            found = re.match(r"(?:torchrun .*?(?:-m|--module) )?pipeloom (.*)", line)
            words = found and shlex.split(found[1].partition(" > ")[0], comments=True)
            if words and words[0] in cli.COMMANDS and "|" not in words:
                yield pytest.param(words, whole, id=f"{page.name}: {' '.join(words)}")


@pytest.mark.parametrize(("words", "whole"), list(commands()))
def test_commands_in_the_documents_parse(words, whole):
    if words[0] in ("train", "generate"):
        pytest.importorskip("torch")
    parser = cli.parser_of(words[0])
    # In a sentence a command may stand without its values.
    if whole:
        parser.parse_args(words[1:])
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {word.strip("[]") for word in words if word.startswith(("--", "[--"))} <= known


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_and_paths_in_the_documents_exist(page):
    text = FENCED.sub("", page.read_text())
    prose = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)#\s]+\.\w+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{names(page)} links to {target}"
    pattern = r"(?<![\w/.])((?:docs|tests|benches|examples|rust|python)/[\w./-]*\w/?)(?![\w*<{])"
    for target in re.findall(pattern, text):
        assert (ROOT / target).exists(), f"{names(page)} names {target}"


def test_options_that_the_guide_to_the_command_line_names_exist():
    guide = (ROOT / "docs/cli.md").read_text()
    commands = [name for name in cli.COMMANDS if name not in ("train", "generate")]
    parsers = [cli.parser_of(name) for name in commands]
    known = {flag for parser in parsers for it in parser._actions for flag in it.option_strings}
    assert set(re.findall(r"`(--[a-z][a-z-]+)", guide)) - known <= {"--profile"}
