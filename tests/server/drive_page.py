"""Takes pictures of the page in a real browser against a real server of the embedded model.

    python -m tests.server.drive_page FOLDER

It needs a Chromium on the PATH and `pip install '.[browser]'`. What the page does is asserted by
test_page.py; this is for eyes. docs/page.png, which the README shows, is its chat-wide-light.png.
"""

import json
import shutil
import sys
from pathlib import Path

from tests.server.page_texts import RICH
from tests.server.serve_process import serving

SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
ANSWER = (
    RICH
    + """
The roots are \\(x_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}\\), and

$$
\\begin{aligned} a &= \\sum_{i=0}^n x_i \\\\ &= \\boxed{42} \\end{aligned}
$$
"""
)
CONVERSATION = {
    "id": "pictures",
    "title": "Pictures",
    "changed": 1,
    "messages": [
        {"role": "user", "content": "Show all of it."},
        {
            "role": "assistant",
            "content": ANSWER,
            "note": "Stopped.",
            "usage": {"prompt": 900, "completion": 334},
        },
    ],
}


def pictures(browser, url, folder):
    """The chat and the dashboard in every size and theme."""
    for size, (width, height) in SIZES.items():
        for theme in ("light", "dark"):
            viewport = {"width": width, "height": height}
            page = browser.new_page(viewport=viewport, color_scheme=theme)
            page.goto(url)
            item = ["quire-conversation-1-pictures", json.dumps(CONVERSATION)]
            page.evaluate("item => localStorage.setItem(...item)", item)
            page.goto(f"{url}/#pictures")
            page.reload()
            page.locator("math mtable").wait_for()
            page.screenshot(path=folder / f"chat-{size}-{theme}.png")
            page.get_by_role("tab", name="Dashboard").click()
            page.locator(".tile .value", has_text="0").first.wait_for()
            page.screenshot(path=folder / f"dashboard-{size}-{theme}.png")
            page.close()


def main(folder):
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with serving() as server, sync_playwright() as playwright:
        for number in range(4):
            body = {"prompt": f"def f{number}", "max_tokens": 64}
            server.post("/v1/completions", body)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pictures(browser, server.url, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
