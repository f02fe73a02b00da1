"""The way of one request, traced: the files that docs/architecture.md guards are on it, and few
others are.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

import quire
from tests.server.serve_process import serving

ROOT = Path(__file__).parents[2]
PACKAGE = Path(quire.__file__).parent

MOST_OFFLINE = 38
MOST_SERVED = 60
"""Files of the package that a request may pass."""

BY_THE_CLOCK = {
    str(PACKAGE / "observability" / "watchdog.py"),
    str(PACKAGE / "engine" / "wire" / "delivery_monitor.py"),
}
"""Run at their own times (the second at heartbeats of a core), at times during a request."""

LEFT_OUT = "AsyncMPClient._check keep_history"
"""Timers: one looks after the core processes, one takes samples for the dashboard."""

TRACER = Path(__file__).parents[1] / "support" / "tracing_site"
"""A folder with a `sitecustomize` that traces a process between SIGUSR1 and SIGUSR2."""

OFFLINE = """
import json, os, signal
from quire import LLM, SamplingParams
with LLM() as llm:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    llm.generate(["def first("], params, use_tqdm=False)
    os.kill(os.getpid(), signal.SIGUSR1)
    llm.generate(["def add(a, b):"], params, use_tqdm=False)
    os.kill(os.getpid(), signal.SIGUSR2)
"""


def guarded(column):
    """The files of the table in docs/architecture.md: 0 the first of each row, -1 the last."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## The path of a request")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d \|(.*)$", table, re.M)
    files = [re.findall(r"\(\.\./src/quire/([\w/]+\.py)\)", row) for row in rows]
    assert len(files) == 8
    return [each[column] for each in files]


def passed_in(folder):
    """Files of the package -> functions, of all processes that were traced into `folder`."""
    found = {}
    for trace in folder.iterdir():
        for name, functions in json.loads(trace.read_text()).items():
            if Path(name).is_relative_to(PACKAGE) and name not in BY_THE_CLOCK:
                found.setdefault(str(Path(name).relative_to(PACKAGE)), set()).update(functions)
    return found


def environment(folder):
    paths = [str(TRACER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRACE_FOLDER": str(folder),
        "TRACE_LEFT_OUT": LEFT_OUT,
    }


def check(found, column, most):
    missing = [name for name in guarded(column) if name not in found]
    assert not missing, f"guarded, but not on the way: {missing}"
    print(f"a request passes {len(found)} files")
    assert len(found) <= most, "\n".join(
        f"{name}: {', '.join(sorted(functions)[:4])}" for name, functions in sorted(found.items())
    )


def test_a_request_of_an_offline_caller(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=os.environ | environment(tmp_path), timeout=120,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(passed_in(tmp_path), 0, MOST_OFFLINE)


def test_a_request_through_the_server(tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with serving() as server, server.client() as client:
        ask(client)  # the connection is open then
        root = psutil.Process(server.process.pid)
        processes = [root, *root.children(recursive=True)]
        processes = [
            each for each in processes if "resource_tracker" not in " ".join(each.cmdline())
        ]
        for each in processes:
            each.send_signal(signal.SIGUSR1)
        ask(client)
        for each in processes:
            each.send_signal(signal.SIGUSR2)
        wait_for(lambda: len(list(tmp_path.glob("*[0-9]"))) >= len(processes))
    check(passed_in(tmp_path), -1, MOST_SERVED)


def ask(client):
    body = {
        "model": "quire-embedded",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
