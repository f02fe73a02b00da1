"""The linter, the formatter and the type checker, each once."""

import subprocess
import sys

import pytest

from tests.house.package import ROOT

FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")


def run_module(*words):
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_ruff_is_content():
    run_module("ruff", "check", *FOLDERS)
    run_module("ruff", "format", "--check", *FOLDERS)


@pytest.mark.slow
def test_mypy_is_content():
    run_module("mypy")
