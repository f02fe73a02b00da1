"""The page at `/`: served without a key, nothing from outside, and used in a real browser.

The browser part needs Playwright's Python package and a Chromium on the PATH.
"""

import base64
import hashlib
import re
import shutil

import httpx
import pytest

from tests.server.conftest import KEYS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_needs_no_key_and_brings_all_it_needs(guarded):
    reply = httpx.get(f"{guarded.url}/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in reply.text and "@import" not in reply.text
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=(?!\"data:)", reply.text)


def test_a_browser_may_run_only_what_is_in_the_page(server):
    reply = httpx.get(f"{server.url}/")
    policy = reply.headers["content-security-policy"]
    for tag in ("style", "script"):
        (inner,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser):
    """A page of a new context; anything that it says on the console as an error fails the test."""
    context = browser.new_context()
    opened = context.new_page()
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield opened
    context.close()
    # the browser itself logs a reply of 400 or 401, which the tests provoke
    assert [text for text in errors if "Failed to load resource" not in text] == []


def test_a_conversation_by_keyboard(server, page):
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("24")
    page.get_by_label("Message", exact=True).fill("def add(a, b):")
    page.keyboard.press("Enter")
    page.locator("#speed", has_text="24 tokens").wait_for()
    answer = page.locator("#messages li.assistant .text")
    question = {"role": "user", "content": "def add(a, b):"}
    body = {"messages": [question], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer.text_content() == reply["choices"][0]["message"]["content"]
    page.locator("#messages").focus()
    page.keyboard.press("ArrowRight")
    rows = page.locator("#odds tr").all_text_contents()
    assert len(rows) >= 5 and all(row.endswith("%") for row in rows)
    page.keyboard.press("Escape")
    assert page.locator("#odds").is_hidden()
    page.get_by_role("button", name="Again").click()
    page.locator("#stop").wait_for(state="hidden")
    assert page.locator("#messages li").count() == 2


def test_stopping_keeps_what_there_is(server, page):
    page.goto(server.url)
    page.locator("select[name=mode]").select_option("complete")
    page.get_by_label("Tokens at most").fill("1500")
    page.get_by_label("Message", exact=True).fill("import os\n")
    page.get_by_role("button", name="Send").click()
    page.locator(".token").nth(3).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator("#stop").wait_for(state="hidden")
    assert page.locator(".failed").count() == 0
    assert page.get_by_role("button", name="Send").is_enabled()


def test_a_refusal_is_shown(server, page):
    page.goto(server.url)
    page.get_by_label("Temperature").fill("-3")
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_role("button", name="Send").click()
    page.locator(".failed", has_text="temperature").wait_for()


def test_the_dashboard_asks_for_the_key_once(guarded, page):
    page.goto(guarded.url)
    page.locator("#key").fill(KEYS[0])
    page.get_by_role("button", name="Use it").click()
    page.get_by_role("tab", name="Dashboard").click()
    page.locator(".tile .value", has_text="0").first.wait_for()
    assert page.locator("#key-dialog").is_hidden()
