"""The whole plan for each (model, machine) pair, as text: a changed default is a changed line here.

After a wanted change: `PYTHONPATH=src python -m tests.config.test_plan_golden --write`.
"""

import sys
from pathlib import Path

import pytest

from quire.config.resolve.resolve import resolve
from tests.config import plans

HERE = Path(__file__).parent


def explained(name):
    return resolve(*plans.PAIRS[name]).explain()


@pytest.mark.parametrize("name", plans.PAIRS)
def test_plan_is_the_golden_one(name):
    golden = (HERE / "golden" / f"{name}.txt").read_text()
    assert explained(name) == golden, "run this module with --write if this is wanted"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in (HERE / "golden").glob("*.txt")} == set(plans.PAIRS)


if __name__ == "__main__" and "--write" in sys.argv:
    (HERE / "golden").mkdir(exist_ok=True)
    for name in plans.PAIRS:
        (HERE / "golden" / f"{name}.txt").write_text(explained(name))
