"""Rules about the source itself: sizes, boundaries, names that must agree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom as pl

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 420  # "about 400"
MAX_FUNCTION_LINES = 70


def sources(*patterns):
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert found
    return found


def name(path):
    return str(path.relative_to(ROOT))


def code_lines(text, *, rust):
    """Lines that are neither blank, nor comment or Rust doc, nor the tests at a file's end."""
    if rust:
        text = text.split("#[cfg(test)]\nmod tests {")[0]
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith(("//", "#!", "# ")) for line in lines)


def rust_sources(pattern):
    """Sources that are part of the library: modules declared under `#[cfg(test)]` are tests."""
    found = sources(pattern)
    declared = re.compile(r"#\[cfg\(test\)\]\n(?:pub(?:\(\w+\))? )?mod (\w+);")
    tests = {
        path.parent / f"{module}.rs"
        for path in found
        for module in declared.findall(path.read_text())
    }
    return [path for path in found if path not in tests]


def test_files_are_short():
    found = rust_sources("rust/*/src/**/*.rs") + sources("python/**/*.py", "benches/*.py")
    lines = {name(path): code_lines(path.read_text(), rust=path.suffix == ".rs") for path in found}
    long = {p: n for p, n in lines.items() if n > MAX_FILE_LINES}
    assert not long, f"files of more than {MAX_FILE_LINES} lines to split: {long}"


def test_python_functions_are_short():
    """Their bodies: a long list of documented arguments is no sin."""
    long = {}
    for path in sources("python/**/*.py", "benches/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                if lines > MAX_FUNCTION_LINES:
                    long[f"{name(path)}:{node.lineno} {node.name}"] = lines
    assert not long, f"functions of more than {MAX_FUNCTION_LINES} lines to split: {long}"


def rust_functions(text):
    """(line, name, number of lines) of each function, by its indentation."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        head = re.match(r"( *)(?:pub(?:\([a-z]+\))? )?(?:const )?fn (\w+)", line)
        if head and not line.rstrip().endswith(("}", ";")):
            end = next(
                (i for i in range(at + 1, len(lines)) if lines[i].startswith(head[1] + "}")), None
            )
            if end is not None:
                yield at + 1, head[2], end - at + 1


def test_rust_functions_are_short():
    long = {
        f"{name(path)}:{line} {function}": length
        for path in rust_sources("rust/*/src/**/*.rs")
        for line, function, length in rust_functions(path.read_text())
        if length > MAX_FUNCTION_LINES
    }
    assert not long, f"functions of more than {MAX_FUNCTION_LINES} lines to split: {long}"


def test_the_core_knows_no_python():
    tree = subprocess.run(
        ["cargo", "tree", "--offline", "--package", "pipeloom-core", "--edges", "normal,build"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pipeloom-core" in tree
    for crate in ("pyo3", "numpy", "rand"):
        assert crate not in tree, tree


def test_the_core_does_no_io():
    banned = re.compile(
        r"std::(fs|net|env|io|time|process|thread)\b|println!|eprintln!|HashMap|HashSet"
    )
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in rust_sources("rust/pipeloom-core/src/**/*.rs")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if banned.search(line) and not line.lstrip().startswith("//")
    ]
    assert not found, found


def test_importing_the_planner_loads_no_torch():
    code = "import sys, pipeloom; sys.exit(any(n in sys.modules for n in ('torch', 'hypothesis')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_sorted_and_there():
    assert pl.__all__ == sorted(pl.__all__)
    assert all(hasattr(pl, public) for public in pl.__all__)


def test_stub_names_what_the_extension_has():
    body = ast.parse((ROOT / "python/pipeloom/_core.pyi").read_text()).body
    kinds = ast.ClassDef | ast.FunctionDef
    named = {node.name for node in body if isinstance(node, kinds)}
    if "CheckError" not in named:
        pytest.skip("the stub is not written yet")
    named |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    public = {known for known in named if not known.startswith("_")}
    exported = {known for known in dir(pl._core) if not known.startswith("_")}
    assert public == exported


def test_every_schedule_is_documented():
    docs = ROOT / "docs/schedules.md"
    if not docs.exists():
        pytest.skip("no docs/schedules.md yet")
    headings = re.findall(r"^#+ .*$", docs.read_text(), re.MULTILINE)
    missing = [
        row.name for row in pl.schedules() if not any(f"`{row.name}`" in h for h in headings)
    ]
    assert not missing, f"docs/schedules.md has no section for {missing}"


def test_readme_lists_the_schedules_and_links_to_what_is_there():
    readme = (ROOT / "README.md").read_text()
    for row in pl.schedules():
        assert f"| `{row.name}` | {row.summary} | {row.constraints} |" in readme
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), f"README links to {target}"


def test_version_is_one():
    manifest = (ROOT / "Cargo.toml").read_text()
    assert f'version = "{pl.__version__}"' in manifest
