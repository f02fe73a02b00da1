"""A pytest plugin for llama.cpp's tests of its server over `quire serve`: `pytest -p over_quire`.

Paths without a version get Quire's, `/v1`. What a model says is not looked at, since a stand-in
says something else. A server goes on to the next test that starts one of the same kind. Every
outcome is written to the file OUTCOMES; a test that has one already is not run again.
"""

import os
import sys
import types
from pathlib import Path

import pytest

sys.modules["wget"] = types.ModuleType("wget")

import utils  # noqa: E402  # theirs

VERSIONED = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
make_url, start = utils.ServerProcess.make_url, utils.ServerProcess.start
stop = utils.ServerProcess.stop


def url_of(self, path, host=None):
    return make_url(self, f"/v1{path}" if path.split("?")[0] in VERSIONED else path, host)


RUNNING = {}
"""The one server that runs, by what it was started with."""


def settings_of(server):
    skipped = ("process", "ready")
    return repr(sorted((k, v) for k, v in vars(server).items() if k[0] != "_" and k not in skipped))


def end_others(settings=None):
    for other in [each for each in RUNNING if each != settings]:
        stop(RUNNING.pop(other))


def start_or_skip(self, timeout_seconds=60):
    settings = settings_of(self)
    end_others(settings)
    if settings in RUNNING and RUNNING[settings].process.poll() is None:
        self.process, self._log, self.ready = RUNNING[settings].process, sys.stdout, True
        return
    try:
        start(self, max(timeout_seconds, 60))
        RUNNING[settings] = self
    except RuntimeError as error:
        if "return code 3" in str(error):
            pytest.skip(f"NOT SERVED {' '.join(map(str, self.process.args[1:]))}")
        raise


utils.ServerProcess.make_url = url_of
utils.ServerProcess.start = start_or_skip
utils.ServerProcess.stop = lambda self: utils.server_instances.discard(self)
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda regex, text: isinstance(text, str)


def pytest_sessionfinish():
    end_others()


def pytest_collection_modifyitems(items):
    path = Path(os.environ["OUTCOMES"])
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    known = {line.split("\t")[1] for line in known.splitlines() if "\t" in line}
    items[:] = [item for item in items if item.nodeid not in known]


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
