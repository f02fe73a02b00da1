"""The whole plan for each (model, machine) pair, as text: a changed default is a changed line here.

After a wanted change: `PYTHONPATH=src python tests/config/test_plan_golden.py --write`.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from quire.config.resolve.resolve import resolve

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("config_plans", HERE / "plans.py")
plans = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plans)


def explained(name):
    return resolve(*plans.PAIRS[name]).explain()


@pytest.mark.parametrize("name", plans.PAIRS)
def test_plan_is_the_golden_one(name):
    golden = (HERE / "golden" / f"{name}.txt").read_text()
    assert explained(name) == golden, f"run python {Path(__file__).name} --write if this is wanted"


def test_no_golden_file_is_left_over():
    assert {path.stem for path in (HERE / "golden").glob("*.txt")} == set(plans.PAIRS)


if __name__ == "__main__" and "--write" in sys.argv:
    (HERE / "golden").mkdir(exist_ok=True)
    for name in plans.PAIRS:
        (HERE / "golden" / f"{name}.txt").write_text(explained(name))
