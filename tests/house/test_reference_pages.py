"""The pages in docs/ that are made from declarations are those that the declarations make."""

import pytest
from reference_page import PAGES

from tests.house.package import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), f"run PYTHONPATH=src python tools/reference_page.py docs/{name}"
