"""The page at `/`: served without a key, nothing from outside, and used in a real browser.

The browser part needs a Chromium on the PATH and what `pip install '.[browser]'` brings:
Playwright's package, and axe-core, which checks accessibility.
"""

import base64
import hashlib
import importlib.util
import json
import re
import shutil
import time
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from quire.server.output_parsing import ParserPlan
from quire.text import markup
from tests.server.conftest import KEYS
from tests.server.page_texts import HOSTILE, LONG, RICH, UNITS
from tests.server.scripted_app import with_app
from tests.server.scripted_server import scripted
from tests.server.serve_process import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
DESKTOP = {"viewport": {"width": 1280, "height": 800}}
STORED = "quire-conversation-1-"


def test_the_page_needs_no_key_and_brings_all_it_needs(guarded):
    reply = httpx.get(f"{guarded.url}/")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert "http://" not in re.sub("http://www.w3.org/(2000/svg|1998/Math/MathML)", "", reply.text)
    assert "https://" not in reply.text and "@import" not in reply.text
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=(?!\"data:)", reply.text)


def test_a_browser_may_run_only_what_is_in_the_page(server):
    reply = httpx.get(f"{server.url}/")
    policy = reply.headers["content-security-policy"]
    for tag in ("style", "script"):
        (inner,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy


def test_the_page_is_told_what_the_server_does_by_itself():
    with serving("--override-generation-config", '{"temperature": 0.3}') as running:
        facts = running.get("/page/facts").json()
        course = running.get("/page/history").json()
    assert facts["sampling"]["temperature"] == 0.3 and facts["sampling"]["top_p"] == 1.0
    assert facts["max_tokens"] is None and facts["max_tokens_of_completion"] == 16
    assert facts["missing_packages"] == []
    assert course["period_s"] == 5 and course["kept_s"] == 3600
    assert course["series"]["waiting"][0] == 0 and course["series"]["process_bytes"][0] > 10**7


def test_answers_are_drawn_within_limits(server):
    reply = server.post("/page/drawing", {"text": "# a\n\n- *b*\n"})
    assert reply.json()["nodes"] == [["h1", {}, ["a"]]] and reply.json()["num_lines"] == 2
    whole = server.post("/page/drawing", {"text": "- *b*\n", "is_whole": True}).json()
    assert whole["nodes"] == [["ul", {}, [["li", {}, [["em", {}, ["b"]]]]]]]
    assert server.post("/page/drawing", {"text": "a" * (2**18 + 1)}).status_code == 400
    hostile = server.post("/page/drawing", {"text": "[" * 2**18, "is_whole": True})
    assert hostile.status_code == 400 and "Drawing this text takes" in hostile.text
    assert server.post("/page/drawing", {"text": "b", "is_whole": True}).status_code == 200


def test_packages_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(markup.PACKAGES, "quire_has_no_such_module", "some-package")

    async def use(http):
        facts = await http.get("/page/facts")
        return facts.json(), await http.post("/page/drawing", json={"text": "a"})

    facts, reply = with_app(use, "fine")
    assert facts["missing_packages"] == ["some-package"]
    assert reply.status_code == 501 and "pip install 'quire[page]'" in reply.text


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def visit(browser, **options):
    """A page of a new context; anything that it logs as an error fails the test."""
    context = browser.new_context(**{**DESKTOP, **options})
    errors = []

    def watch(opened):
        opened.set_default_timeout(20_000)
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on(
            "console", lambda line: errors.append(line.text) if line.type == "error" else None
        )

    context.on("page", watch)
    yield context.new_page()
    context.close()
    # the browser itself logs a reply of 400 or 401, which the tests provoke
    assert [text for text in errors if "Failed to load resource" not in text] == []


@pytest.fixture
def page(browser):
    with visit(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def model():
    with scripted(ParserPlan(), tokens_per_step=3) as running:
        yield running


def send(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_the_end(page):
    page.locator("#stop").wait_for(state="hidden")


def ask(page, text):
    send(page, text)
    wait_for_the_end(page)


def has_focus(locator):
    return locator.evaluate("element => element === document.activeElement")


def is_at_the_end(page):
    return page.locator("#transcript").evaluate(
        "e => e.scrollHeight - e.clientHeight - e.scrollTop < 4"
    )


def store(page, *messages, name="stored", title="Stored"):
    """Have the browser find a conversation that it kept earlier."""
    text = json.dumps({"id": name, "title": title, "changed": 1, "messages": messages})
    page.evaluate("([name, text]) => localStorage.setItem(name, text)", [STORED + name, text])


def wait_until(page, expression, timeout_s=20):
    """Ask until it is true. (Playwright's own function needs `eval`, which the policy forbids.)"""
    end = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def answer_of(text):
    return {"role": "assistant", "content": text}


def test_a_conversation_by_keyboard(server, page):
    page.goto(server.url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens at most").fill("24")
    send(page, "def add(a, b):")
    page.locator("#speed", has_text="24 tokens").wait_for()
    assert page.locator(".token").count() == 0, "the tint is off until it is asked for"
    page.get_by_label("Show how sure").check()
    page.get_by_role("button", name="Regenerate").click()
    page.locator("#speed", has_text="24 tokens").wait_for()
    answer = page.locator("#messages > li.assistant .text")
    question = {"role": "user", "content": "def add(a, b):"}
    body = {"messages": [question], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer.text_content() == reply["choices"][0]["message"]["content"]
    page.locator("#transcript").focus()
    page.keyboard.press("ArrowRight")
    rows = page.locator("#odds tr").all_text_contents()
    assert len(rows) >= 5 and all(row.endswith("%") for row in rows)
    page.keyboard.press("Escape")
    assert page.locator("#odds").is_hidden()
    page.get_by_label("Show how sure").uncheck()
    assert page.locator(".token").count() == 0 and page.locator(".prose").count() == 1
    assert page.locator("#messages > li").count() == 2


def test_stopping_keeps_what_there_is(model, page):
    page.goto(model.url)
    model.says = LONG
    page.locator("select[name=mode]").select_option("complete")
    page.get_by_label("Tokens at most").fill("1500")
    send(page, "import os\n")
    answer = page.locator("li.assistant")
    stops = [lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Stop").click]
    for stop in stops:
        wait_until(page, "document.querySelector('li.assistant .text').innerText.length > 9")
        stop()
        answer.locator(".note", has_text="Stopped.").wait_for()
        kept = answer.locator(".text").text_content()
        assert len(kept) > 9 and page.get_by_role("button", name="Send").is_enabled()
        assert has_focus(page.locator("#prompt"))
        if stop is stops[0]:
            page.get_by_role("button", name="Regenerate").click()
    page.reload()
    assert answer.locator(".text").text_content() == kept
    assert answer.locator(".note").text_content() == "Stopped."


def test_a_refusal_is_shown(server, page):
    page.goto(server.url)
    page.get_by_label("Temperature").fill("-3")
    send(page, "hello")
    page.locator("#failure", has_text="temperature").wait_for()
    assert page.locator("#prompt").input_value() == "hello" and not page.locator("li.user").count()


def test_the_dashboard_asks_for_the_key_once(guarded, page):
    page.goto(guarded.url)
    page.locator("#key").fill(KEYS[0])
    page.get_by_role("button", name="Use it").click()
    page.get_by_role("tab", name="Dashboard").click()
    page.locator(".tile .value", has_text="0").first.wait_for()
    assert page.locator("#key-dialog").is_hidden()


def test_the_dashboard_shows_what_the_server_has_kept(server, page):
    page.goto(server.url)
    page.get_by_label("Tokens at most").fill("8")
    ask(page, "def")
    page.get_by_role("tab", name="Dashboard").click()
    for title in ("Running", "Waiting", "Generated tokens/s", "Process memory"):
        tile = page.locator(".tile", has_text=title)
        tile.locator(".value", has_text=re.compile(r"\d")).wait_for()
    page.locator("#range").select_option("3600")
    assert re.search(r"^M[\d.]+,", page.locator(".curve").first.get_attribute("d"))


def test_the_newest_line_stays_in_view(model, page):
    page.goto(model.url)
    model.says = LONG
    page.get_by_label("Tokens at most").fill("1024")
    # Made after the page's own observer, hence called after it and before anything is painted.
    page.evaluate("""() => {
        window.overlaps = [];
        new ResizeObserver(() => {
            const text = document.querySelector("li.assistant .text");
            if (!text?.textContent) return;
            const range = document.createRange();
            range.selectNodeContents(text);
            const lastLine = [...range.getClientRects()].at(-1).bottom;
            overlaps.push(lastLine - document.querySelector("#ask").getBoundingClientRect().top);
        }).observe(document.querySelector("#messages"));
    }""")
    ask(page, "go on")
    overlaps = page.evaluate("overlaps")
    assert len(overlaps) > 10 and max(overlaps) <= 0, "a line is under the composer"
    height = page.locator("#messages").evaluate("e => e.offsetHeight")
    assert height > 2 * DESKTOP["viewport"]["height"]
    assert "limit of tokens" in page.locator("li.assistant .note").text_content()
    assert has_focus(page.locator("#prompt"))


def test_a_reader_who_scrolls_up_is_left_there(model, page):
    page.goto(model.url)
    model.says = LONG
    send(page, "go on")
    wait_until(page, "document.querySelector('#transcript').scrollTop > 900")
    page.locator("#transcript").hover()
    page.mouse.wheel(0, -700)
    page.locator("#latest").wait_for()
    assert page.locator("#stop").is_visible(), "the answer ended before it was scrolled"
    page.wait_for_timeout(200)  # wheels are animated
    wait_for_the_end(page)
    page.wait_for_timeout(
        500
    )  # drawn blocks are taller than their text, and the browser keeps place
    assert not is_at_the_end(page)
    page.get_by_role("button", name="Jump to latest").click()
    page.locator("#latest").wait_for(state="hidden")
    assert is_at_the_end(page)


def test_regenerating_asks_the_same_again(model, page):
    page.goto(model.url)
    for model.says in ("first", "second"):
        ask(page, f"say {model.says}")
    model.says = "third"
    page.get_by_role("button", name="Regenerate").last.click()
    page.locator("li.assistant", has_text="third").wait_for()
    assert page.locator("#messages > li .text").all_text_contents() == [
        "say first",
        "first",
        "say second",
        "third",
    ]
    assert model.prompt(-1) == model.prompt(-2)
    wait_for_the_end(page)
    assert has_focus(page.locator("#prompt"))


def test_conversations_survive_a_reload(model, page):
    page.goto(model.url)
    for number in ("one", "two"):
        model.says = f"answer **{number}**"
        ask(page, f"question {number}")
        page.get_by_role("button", name="New conversation").click()
    assert has_focus(page.locator("#prompt")) and page.locator("#messages > li").count() == 0
    titles = page.locator("#conversations button")
    assert titles.all_text_contents() == ["question two", "question one"]
    titles.nth(1).click()
    page.get_by_role("button", name="Rename").first.click()
    page.get_by_label("Title").fill("Named")
    page.keyboard.press("Enter")
    page.reload()
    assert titles.all_text_contents() == ["Named", "question two"]
    page.locator("li.assistant strong", has_text="one").wait_for()  # it is drawn
    assert page.locator("#messages > li .text").all_text_contents() == [
        "question one",
        "answer one",
    ]
    with page.context.expect_page() as opened:
        page.evaluate("window.open(location.pathname)")
    other = opened.value
    other.get_by_role("button", name="question two").click()
    other.locator("#delete").click()
    other.locator("#delete-dialog").get_by_role("button", name="Delete").click()
    wait_until(page, "document.querySelectorAll('#conversations button').length === 1")
    other.locator("li.assistant", has_text="answer one").wait_for()


def test_a_conversation_is_exported(model, page):
    page.goto(model.url)
    model.says = "# Answer\n"
    ask(page, "Was ist <das>?")
    wanted = {"Save as Markdown": "Was-ist-das.md", "Save as JSON": "Was-ist-das.json"}
    texts = {}
    for label, name in wanted.items():
        with page.expect_download() as download:
            page.get_by_role("button", name=label).click()
        assert download.value.suggested_filename == name
        texts[label] = Path(download.value.path()).read_text()
    assert texts["Save as Markdown"].startswith("# Was ist <das>?\n\n## You\n\nWas ist <das>?\n")
    assert "## Model\n\n# Answer\n" in texts["Save as Markdown"]
    assert [m["content"] for m in json.loads(texts["Save as JSON"])["messages"]] == [
        "Was ist <das>?",
        "# Answer\n",
    ]


def test_storage_may_be_full_or_corrupt(model, page):
    page.goto(model.url)
    store(page, {"role": "user", "content": "kept"}, title="Kept")
    for name, text in {"a": "{", "b": "null", "c": '{"id": "c", "messages": [{}]}'}.items():
        page.evaluate("pair => localStorage.setItem(...pair)", [STORED + name, text])
    page.reload()
    assert page.locator("#conversations button").all_text_contents() == ["Kept"]
    page.evaluate("""() => {
        for (let size = 2 ** 22; size >= 1; size /= 2) {
            try { localStorage.setItem(`other-${size}`, "x".repeat(size)); } catch {}
        }
    }""")
    model.says = "short"
    ask(page, "much " * 1000)
    assert "full" in page.locator("#storage-note").text_content()
    assert page.locator("li.assistant .text").text_content() == "short"


def test_storage_may_be_blocked(model, page):
    page.add_init_script("""
        const get = () => { throw new DOMException("", "SecurityError"); };
        for (const name of ["localStorage", "sessionStorage"])
            Object.defineProperty(window, name, {get});
    """)
    page.goto(model.url)
    model.says = "fine"
    ask(page, "hello")
    assert page.locator("li.assistant .text").text_content() == "fine"
    assert "no history" in page.locator("#storage-note").text_content()


def test_code_and_answers_are_copied(model, page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=model.url)
    page.goto(model.url)
    model.says = RICH
    ask(page, "all of it")
    page.locator(".code button").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("x = 1  # a line")
    page.locator("li.assistant .actions button").first.click()
    wait_until(page, "document.querySelectorAll('.actions button')[3].textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == RICH


def test_a_hostile_answer_does_no_harm(model, page):
    asked, dialogs = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(model.url)
    model.says = HOSTILE
    ask(page, "<img src=x onerror=window.harmed=8>")
    page.reload()
    prose = page.locator("li.assistant .prose")
    prose.locator("a", has_text="good").wait_for()
    for tag in ("script", "img", "iframe", "svg", "style", "base", "form", "link", "meta"):
        assert prose.locator(tag).count() == 0
    assert page.locator("li.user img, #conversations img").count() == 0
    text = prose.text_content()
    assert "<script>window.harmed = 1</script>" in text and "</code></pre><iframe" in text
    links = prose.locator("a").evaluate_all(
        "all => all.map(a => [a.href, a.rel, a.attributes.length])"
    )
    assert links and all(
        re.match("https?://", href) and rel == "noopener noreferrer" and count == 3
        for href, rel, count in links
    )
    assert page.evaluate("window.harmed") is None and not dialogs
    assert all(url.startswith((f"{model.url}/", "data:,")) for url in asked), asked


def test_hostile_lengths_are_drawn_in_time(model, page):
    page.goto(model.url)
    messages = [answer_of(unit * max(1, 19_000 // len(unit))) for unit in UNITS]
    store(page, *messages, answer_of("word" * 50_000), answer_of("the end"))
    page.goto(f"{model.url}/#stored")
    page.reload()
    page.get_by_text("the end").wait_for()
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]


def texts(page):
    return page.locator("#messages > li .text").all_inner_texts()


def test_questions_are_edited_branched_continued_and_deleted(model, page):
    page.goto(model.url)
    model.says = "one"
    ask(page, "first")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Text of the message").fill("second")
    model.says = "two"
    page.locator(".editor").get_by_role("button", name="Send").click()
    page.locator("li.assistant", has_text="two").wait_for()
    wait_for_the_end(page)
    assert texts(page) == ["second", "two"] and "2 / 2" in page.locator(".branches").inner_text()
    page.get_by_role("button", name="Previous version").click()
    assert texts(page) == ["first", "one"]
    model.says = " and more"
    page.get_by_role("button", name="Continue").click()
    page.locator("li.assistant", has_text="one and more").wait_for()
    wait_for_the_end(page)
    assert model.prompt(-1).endswith("<assistant>one")
    page.get_by_role("button", name="Edit").last.click()
    page.get_by_label("Text of the message").fill("mended")
    page.locator(".editor").get_by_role("button", name="Save").click()
    page.reload()
    page.locator("li.assistant", has_text="mended").wait_for()
    assert texts(page) == ["first", "mended"]
    page.locator("li.user").get_by_role("button", name="Delete").click()
    page.locator("#delete-dialog").get_by_role("button", name="Delete").click()
    page.locator("li.assistant", has_text="two").wait_for()
    assert texts(page) == ["second", "two"]


def test_nothing_of_the_sampling_is_sent_unless_it_is_set(model, page):
    sent = []
    page.on("request", lambda request: sent.append((request.url, request.post_data)))
    page.goto(model.url)
    model.says = "fine"
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "1"
    page.get_by_label("System message").fill("Be brief.")
    ask(page, "hello")
    page.get_by_label("Temperature").fill("0.5")
    page.reload()
    assert page.get_by_label("Temperature").input_value() == "0.5"
    assert page.get_by_label("System message").input_value() == "Be brief."
    ask(page, "again")
    bodies = [json.loads(body) for url, body in sent if url.endswith("/chat/completions")]
    fields = {"stream", "stream_options", "messages", "model"}
    assert set(bodies[0]) == fields and set(bodies[1]) == {*fields, "temperature"}
    assert bodies[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "of 4,096 tokens" in page.locator("#context").inner_text()


def test_files_are_attached_searched_saved_and_imported(model, page, tmp_path):
    (tmp_path / "notes.txt").write_text("a ``` fence")
    (tmp_path / "bad.bin").write_bytes(b"\xff\x00")
    (tmp_path / "talk.json").write_text(
        json.dumps([{"role": "user", "content": "imported?"}, answer_of("yes, **imported**")])
    )
    (tmp_path / "bad.json").write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    page.goto(model.url)
    page.locator("#files").set_input_files([tmp_path / "notes.txt", tmp_path / "bad.bin"])
    page.locator("#failure", has_text="is not a text file").wait_for()
    model.says = "read"
    ask(page, "what is it?")
    assert 'File "notes.txt":\n````\na ``` fence\n````\n\nwhat is it?' in model.prompt(-1)
    page.locator("#import-file").set_input_files(tmp_path / "bad.json")
    page.locator("#storage-note", has_text="cannot be imported").wait_for()
    page.locator("#import-file").set_input_files(tmp_path / "talk.json")
    page.locator("li.assistant strong", has_text="imported").wait_for()
    entries = page.locator("#conversations button")
    assert entries.count() == 2
    page.get_by_label("Search the conversations").fill("WHAT is")
    wait_until(page, "document.querySelectorAll('#conversations button').length === 1")
    assert entries.all_text_contents() == ["what is it?"]


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PICTURE = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
GIVE = """([kind, type, text]) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], `${kind}.png`, { type }));
    const [target, event] = kind === "paste"
        ? ["#prompt", new ClipboardEvent("paste", { clipboardData: data, bubbles: true })]
        : [".talk", new DragEvent("drop", { dataTransfer: data, bubbles: true })];
    document.querySelector(target).dispatchEvent(event);
}"""


def let_it_take_pictures(page, sent):
    """Have the page find a model that takes pictures and keep what it is sent."""
    done = 'data: {"choices": [{"index": 0, "delta": {"content": "a dot"}}]}\n\ndata: [DONE]\n\n'

    def facts(route):
        told = route.fetch().json()
        assert told["takes_pictures"] is False
        route.fulfill(json={**told, "takes_pictures": True})

    def answer(route):
        sent.append(route.request.post_data_json["messages"])
        route.fulfill(body=done, content_type="text/event-stream")

    page.route("**/page/facts", facts)
    page.route("**/chat/completions", answer)


def test_pictures_are_shown_and_sent(model, page, tmp_path):
    (tmp_path / "dot.png").write_bytes(PNG)
    (tmp_path / "page.tiff").write_bytes(b"II*")
    sent = []
    let_it_take_pictures(page, sent)
    page.goto(model.url)
    wait_until(page, "document.querySelector('[name=temperature]').placeholder !== 'default'")
    page.locator("#files").set_input_files([tmp_path / "dot.png", tmp_path / "page.tiff"])
    page.locator("#failure", has_text="“page.tiff” is a picture of another kind").wait_for()
    data = base64.b64encode(PNG).decode()
    for kind in ("paste", "drop"):
        page.evaluate(GIVE, [kind, "image/png", data])
        page.locator("#attached li", has_text=f"{kind}.png").wait_for()
    page.get_by_label("Remove drop.png").click()
    ask(page, "what is it?")
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    asked = {"role": "user", "content": [part, part, {"type": "text", "text": "what is it?"}]}
    assert sent == [[asked]]
    shown = page.locator("#messages .user img.picture")
    assert [each.get_attribute("alt") for each in shown.all()] == ["dot.png", "paste.png"]
    loaded = (
        "[...document.querySelectorAll('img.picture')].every((each) => each.naturalWidth === 1)"
    )
    wait_until(page, loaded)
    page.reload()
    shown.first.wait_for()
    ask(page, "and now?")
    assert sent[1][0] == asked and sent[1][2]["content"] == "and now?"
    (tmp_path / "talk.json").write_text(json.dumps([asked, answer_of("a dot")]))
    page.locator("#import-file").set_input_files(tmp_path / "talk.json")
    wait_until(page, "document.querySelectorAll('#conversations button').length === 2")
    wait_until(page, "document.querySelectorAll('#messages .user img.picture').length === 2")
    page.locator("select[name=mode]").select_option("complete")
    page.evaluate(GIVE, ["drop", "image/png", data])
    page.locator("#failure", has_text="switch to “Chat”").wait_for()


def test_a_model_of_text_refuses_pictures(model, page, tmp_path):
    (tmp_path / "dot.png").write_bytes(PNG)
    page.goto(model.url)
    wait_until(page, "document.querySelector('[name=temperature]').placeholder !== 'default'")
    page.locator("#files").set_input_files(tmp_path / "dot.png")
    page.locator(
        "#failure", has_text="“dot.png” is a picture, and this model takes text"
    ).wait_for()
    assert page.locator("#attached li").count() == 0


def test_a_failed_turn_returns_to_the_box_and_a_cut_stream_says_so(model, page):
    page.goto(model.url)
    model.says = "fine"
    ask(page, "before")
    page.route("**/chat/completions", lambda route: route.abort())
    send(page, "lost?")
    page.locator("#failure", has_text="cannot be reached").wait_for()
    assert page.locator("#prompt").input_value() == "lost?" and texts(page) == ["before", "fine"]
    page.unroute("**/chat/completions")
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    page.route(
        "**/chat/completions",
        lambda route: route.fulfill(body=half, content_type="text/event-stream"),
    )
    ask(page, "lost?")
    page.locator("li.assistant .failed", has_text="The stream was cut").wait_for()
    assert texts(page)[-1] == "half"


def test_a_wrong_key_is_told(guarded, page):
    page.goto(guarded.url)
    page.locator("#key").fill("wrong")
    page.get_by_role("button", name="Use it").click()
    page.locator("#key-note", has_text="refused this key").wait_for()
    page.locator("#key").fill(KEYS[0])
    page.get_by_role("button", name="Use it").click()
    page.locator("#model option").first.wait_for(state="attached")
    assert page.locator("#key-dialog").is_hidden()


FORMULAS = """Formulas \\(x_1^2\\), \\(\\unknown{x}\\) and $5.

$$
\\frac{a}{b}
$$

```python
def f(): return 1
```
"""


def test_formulas_and_colours_are_drawn_and_code_without_fences_is_left_alone(model, page):
    page.goto(model.url)
    model.says = FORMULAS
    ask(page, "formulas")
    prose = page.locator("li.assistant .prose")
    prose.locator("math mfrac").wait_for()
    assert prose.locator("math").count() == 2
    assert "\\(\\unknown{x}\\)" in prose.inner_text() and "$5" in prose.inner_text()
    prose.locator(".code .k", has_text="def").wait_for()  # the last block is drawn after the end
    page.get_by_role("button", name="New conversation").click()
    model.says = "def f(a_b, c_d):\n    return a_b * c_d\n\nprint(f(1, 2))\n"
    ask(page, "code")
    page.locator(".prose.is-code").wait_for()
    assert page.locator(".prose").inner_text().strip() == model.says.strip()


def serious_findings(page):
    results = page.evaluate("axe.run({resultTypes: ['violations']})")
    return [
        (found["id"], [node["target"] for node in found["nodes"]])
        for found in results["violations"]
        if found["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.sharp(when=lambda theme, device: theme == "dark" and device is PHONE)
def test_nothing_is_inaccessible(model, browser, theme, device):
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("axe_playwright_python is not installed: pip install '.[browser]'")
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    failed = {**answer_of("No."), "note": "The connection was lost.", "isFailed": True}
    with visit(browser, color_scheme=theme, **device) as page:
        page.goto(model.url)
        store(page, {"role": "user", "content": "?"}, answer_of(RICH + LONG[:400]), failed)
        page.goto(f"{model.url}/#stored")
        page.reload()
        page.evaluate(axe)
        assert serious_findings(page) == []
        if device is PHONE:
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            for panel in ("Settings", "Conversations"):
                page.locator("summary", has_text=panel).click()
                assert serious_findings(page) == []
        page.locator("#transcript").evaluate(
            "e => { e.dispatchEvent(new WheelEvent('wheel', {deltaY: -1})); e.scrollTop = 50; }"
        )
        page.locator("#latest").wait_for()
        page.locator("#delete").click()
        assert serious_findings(page) == []
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Dashboard").click()
        page.locator(".tile", has_text="Running").wait_for()
        assert serious_findings(page) == []
