"""How many files name an option of the engine, of a request, or a kind of output: few, whatever is
added. CONTRIBUTING.md says what to do when they become more.
"""

from collections import Counter

import growth
import pytest

from tests.house.package import MODULES

MOST_KIND_FILES = 6


@pytest.fixture(autouse=True)
def parsed(monkeypatch):
    """The files as the other rules have parsed them."""
    monkeypatch.setattr(growth, "tree_of", {module.path: module.tree for module in MODULES}.get)


def test_an_option_of_the_engine_is_declared_resolved_and_used_in_five_files():
    more = {
        name: files
        for name, files in growth.option_files().items()
        if len(files) > growth.MOST_OPTION_FILES
    }
    assert not more


def test_an_option_of_a_request_is_handed_on_in_one_value():
    [line] = growth.signatures()
    assert "priority 1, lora_request 1," in line


def test_a_kind_of_output_is_named_in_six_files():
    [line] = growth.output_kinds()
    counts = Counter({kind: int(n) for kind, n in map(str.split, line.split(": ")[1].split(", "))})
    assert len(counts) >= 5 and max(counts.values()) <= MOST_KIND_FILES
