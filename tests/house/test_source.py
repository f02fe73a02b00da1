"""House rules about the text of the source: names, documentation, what may be used where."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "quire"
MODULES = sorted(SOURCE.rglob("*.py"))

BANNED_WORDS = {"utils", "helpers", "misc", "common", "seq", "job", "radix", "indptr", "iteration"}
"""Synonyms of the glossary's words, as parts of identifiers."""

PATH_FILES = [
    "llm.py",
    "engine/frontend/input_processor.py",
    "engine/client/client.py",
    "engine/core/core.py",
    "scheduling/scheduler.py",
    "runner/runner.py",
    "models/decoder.py",
    "engine/frontend/output_processor.py",
]


def each_module():
    return pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))


def test_no_drawer_modules():
    assert not [p for p in MODULES if p.stem in ("utils", "common", "helpers", "misc")]


def test_public_names_are_sorted_and_documented():
    names = [n for n in quire.__all__ if not n.startswith("__")]
    assert {*names, "__version__", "__version_tuple__"} == set(quire._HOMES)
    assert quire.__all__ == sorted(quire.__all__, key=lambda n: (not n.isupper(), n)), "sort them"
    for name in names:
        if name != "PromptType":  # a union has no docstring
            assert getattr(quire, name).__doc__, f"{name} has no docstring"


@each_module()
def test_modules_and_public_definitions_are_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    missing = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and node.name != "main"
    ]
    assert not missing, f"no docstring: {missing}"


@each_module()
def test_names_are_the_glossary_s(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        if isinstance(node, ast.arg):
            names.append(node.arg)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        for name in names:
            # seq_lens is the word, and what a plug-in for statistics reads has its name from others
            words = re.sub("seq_len|iteration_(stats|timestamp)", "", name.lower()).split("_")
            assert not BANNED_WORDS & set(words), name


@each_module()
def test_nothing_dangerous_is_used(path):
    text = path.read_text()
    assert not re.search(r"^\s*(import|from) (pickle|cloudpickle|marshal|dill)\b", text, re.M)
    assert not re.search(r"\b(recv_pyobj|torch\.load)\(", text)
    part = path.relative_to(SOURCE).parts[0]
    if part not in ("environment.py", "cli"):
        assert "os.environ" not in text and "getenv" not in text, f"{path} reads the environment"


@each_module()
def test_no_swallowed_exceptions_and_no_loose_ends(path):
    text = path.read_text()
    assert not re.search(r"except( Exception)?:\s*\n\s*pass\b", text)
    assert not re.search(r"TODO(?!\(#\d+\))", text), "a TODO names its issue"
    assert not re.search(r"(NOTE|FIXME|HACK)\(", text)


def test_the_eight_files_say_where_the_reader_is():
    for name in PATH_FILES:
        doc = ast.get_docstring(ast.parse((SOURCE / name).read_text()))
        assert re.search(r"[Ss]tep \d of 8", doc), name


def test_no_path_of_a_machine_in_the_repository():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".cpp", ".hpp", ".yaml"):
            text = path.read_text(errors="ignore")
            if path != Path(__file__):
                assert not re.search(r"/(work|farm|root)/", text), name


def test_examples_of_public_homes_import():
    for home in set(quire._HOMES.values()):
        importlib.import_module(home)


def test_ruff_is_content():
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "src", "tests", "tools"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_mypy_is_content():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
