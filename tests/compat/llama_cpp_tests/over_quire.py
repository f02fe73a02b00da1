"""A pytest plugin for llama.cpp's tests of its server over `quire serve`: `pytest -p over_quire`.

Paths without a version get Quire's, `/v1`. What a model says is not looked at, since a stand-in
says something else. Every outcome is written to the file OUTCOMES.
"""

import os
import sys
import types

import pytest

sys.modules["wget"] = types.ModuleType("wget")

import utils  # noqa: E402  # theirs

VERSIONED = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
make_url, start = utils.ServerProcess.make_url, utils.ServerProcess.start


def url_of(self, path, host=None):
    return make_url(self, f"/v1{path}" if path.split("?")[0] in VERSIONED else path, host)


def start_or_skip(self, timeout_seconds=60):
    try:
        start(self, timeout_seconds)
    except RuntimeError as error:
        if "return code 3" in str(error):
            pytest.skip(f"NOT SERVED {' '.join(map(str, self.process.args[1:]))}")
        raise


utils.ServerProcess.make_url = url_of
utils.ServerProcess.start = start_or_skip
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda regex, text: isinstance(text, str)


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    why = (
        why if crash is None else f"{crash.message}  @{os.path.basename(crash.path)}:{crash.lineno}"
    )
    with open(os.environ["OUTCOMES"], "a", encoding="utf-8") as file:
        said = " | ".join(why.splitlines())[:1500]
        file.write(f"{report.outcome}\t{report.nodeid}\t{said}\n")
