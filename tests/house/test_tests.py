"""Any folders of tests run together: no module depends on what another has put on the path."""

import re

from tests.house.package import ROOT

TESTS = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}


def test_the_path_stays_as_pytest_sets_it():
    edits = r"sys\.path(\.(insert|append|extend)\(|\[.*\] *=| *\+?= )"
    assert not [path for path, text in TESTS.items() if re.search(edits, text)]


def test_siblings_are_imported_by_absolute_names():
    for path, text in TESTS.items():
        for name in re.findall(r"^\s*(?:from|import) +([.\w]+)", text, re.MULTILINE):
            sibling = path.with_name(name.partition(".")[0] + ".py")
            assert name[0] != "." and not sibling.exists(), f"{path.relative_to(ROOT)}: {name}"
