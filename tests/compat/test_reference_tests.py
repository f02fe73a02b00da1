"""The script that runs vLLM's own tests: its list, its table, and phantoms; the run itself is not a
part of this suite.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.compat.reference_tests import run

HERE = Path(run.__file__).parent


def test_the_list_has_one_reason_a_line():
    assert {kind for kind, _, _ in run.LEFT_OUT} == {"file", "test", "name", "skip", "differs"}
    assert all(what and len(why.split()) >= 2 for _, what, why in run.LEFT_OUT)
    assert len({(kind, what) for kind, what, _ in run.LEFT_OUT}) == len(run.LEFT_OUT)


def test_reasons_are_found_by_the_longest_name():
    assert run.reason_for_skip("PhantomUsed: PHANTOM vllm.v1.core.sched.Scheduler") is not None
    assert run.reason_for_skip("PHANTOM vllm.v1core") is None, "whole parts of a name"
    assert run.reason_for_skip("needs a GPU that nobody listed") is None
    assert run.reason_for_file("tests/test_cmake_utils.py") and not run.reason_for_file(
        "tests/x.py"
    )


def test_the_table_counts_each_part():
    outcomes = [
        ("passed", "tests/a.py::one", ""), ("failed", "tests/a.py::two", "why"),
        ("skipped", "tests/b.py::three", "PHANTOM vllm.v1.x"), ("skipped", "tests/b.py::four", "?"),
        ("failed", "tests/test_sampling_params.py::test_diffusion_x", "of no interest"),
        ("failed", "tests/a.py::two", "and its end"), ("failed", "tests/a.py::six", "why"),
        ("passed", "tests/a.py::six", ""),
        ("failed", "tests/a.py::five", "[XPASS(strict)] vLLM's own fails it"),
    ]  # fmt: skip
    parts = {"tests/a.py": "a", "tests/b.py": "b", "tests/test_sampling_params.py": "b"}
    counts, unlisted, failed = run.table(outcomes, parts)
    assert dict(counts["a"]) == {"passed": 2, "failed": 2}
    assert dict(counts["b"]) == {"left out": 3}
    assert failed == [("tests/a.py::two", None, "why"), ("tests/a.py::six", None, "why")]
    assert unlisted == [("tests/b.py::four", "?")]


def test_a_name_that_quire_lacks_skips_the_test_that_uses_it(tmp_path):
    (tmp_path / "parser_classes.py").write_text("def register(adapted, phantoms): pass\n")
    (tmp_path / "test_x.py").write_text(
        "from vllm import SamplingParams\nfrom vllm.v1.nothing import Thing, Other\n"
        "class Mine(Other): pass\n"
        "def test_ours(): assert SamplingParams(n=2).n == 2\n"
        "def test_theirs(): Thing(3)\n"
    )
    (tmp_path / "phantoms.py").write_text((HERE / "phantoms.py").read_text(encoding="utf-8"))
    outcomes = tmp_path / "outcomes"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "phantoms", "-p", "no:cacheprovider",
         "test_x.py"],
        cwd=tmp_path, check=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": path, "REFERENCE_OUTCOMES": str(outcomes)},
    )  # fmt: skip
    ours, theirs = outcomes.read_text().splitlines()
    assert ours.startswith("passed\ttest_x.py::test_ours")
    assert (
        theirs.startswith("skipped\ttest_x.py::test_theirs") and "vllm.v1.nothing.Thing" in theirs
    )
