"""The view of the page that puts texts in the order of how near they are, in a real browser."""

import importlib.util
from importlib.resources import files

import pytest

from tests.server.test_page import (  # noqa: F401 - `browser` is a fixture
    DESKTOP,
    PHONE,
    browser,
    serious_findings,
    visit,
)

QUERY = "What is the capital?"
TEXTS = ["a step hands out tokens", "<b>Paris</b> 1234567890", "def add(first, second):"]


def test_the_page_shows_what_the_model_can_do(embedder, server):
    assert '<body data-can="score">' in embedder.get("/").text
    assert '<body data-can="generate">' in server.get("/").text


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_nearest_of_a_few_texts(embedder, browser, device):  # noqa: F811
    ranked = embedder.post("/rerank", {"query": QUERY, "documents": TEXTS}).json()["results"]
    with visit(browser, **device) as page:
        page.goto(embedder.server.url)
        assert page.get_by_role("tab").all_text_contents() == ["Nearest", "Dashboard"]
        assert page.get_by_role("tab", name="Nearest").get_attribute("aria-selected") == "true"
        page.keyboard.type(QUERY)  # the field has the focus
        page.get_by_label("Texts, one a line").fill("\n\n".join(TEXTS) + "\n")
        page.get_by_role("button", name="Find the nearest").click()
        page.locator("#nearest li").nth(2).wait_for()
        shown = page.locator("#nearest .text").all_text_contents()
        assert shown == [TEXTS[item["index"]] for item in ranked]
        scores = page.locator("#nearest .score").all_text_contents()
        assert scores == [f"{item['relevance_score']:.3f}" for item in ranked]
        page.get_by_label("Texts, one a line").fill("word " * 1000)
        page.get_by_role("button", name="Find the nearest").click()
        page.locator("#near-note", has_text="maximum context length").wait_for()
        if importlib.util.find_spec("axe_playwright_python") is not None:
            page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
            assert serious_findings(page) == []
        page.get_by_role("tab", name="Nearest").press("ArrowRight")
        page.locator(".tile .value").first.wait_for()
