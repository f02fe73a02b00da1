"""SIGTERM and SIGINT: while the server starts, and sent to every process at once, as systemd and
container runtimes do.
"""

import re
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.server.fleet.test_lifecycle import last_choice, lines_of
from tests.server.serve_process import command_of, serving

BODY = {"prompt": "def", "max_tokens": 300, "ignore_eos": True, "stream": True}


def family_of(process):
    owner = psutil.Process(process.pid)
    return [owner, *owner.children(recursive=True)]


@pytest.mark.full
def test_sigterm_to_every_process_drains():
    """The owner, two API servers and the core."""
    with serving("--api-server-count", "2") as server:
        lines = lines_of(server, BODY)
        rest = [next(lines)]
        reader = threading.Thread(target=lambda: rest.extend(lines))
        reader.start()
        family = family_of(server.process)
        assert len(family) == 4
        for process in reversed(family):  # the owner last
            process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        reader.join(30)
        assert last_choice(rest)["finish_reason"] == "length"
        assert "restarting" not in server.log
        assert not psutil.wait_procs(family[1:], timeout=10)[1]


MOMENTS = ((0.0, signal.SIGTERM), (0.4, signal.SIGINT), (0.9, signal.SIGTERM))
"""Seconds after the process has taken its signals."""


def takes(process, number):
    """Whether a process has a handler for a signal."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", text, re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_signal_while_starting_ends_with_0_and_leaves_nothing():
    """The servers start one after the other; benchmarks/hostile_processes.py tries more moments."""
    for after_s, number in MOMENTS:
        process = subprocess.Popen(command_of(), stderr=subprocess.PIPE, text=True)
        while not takes(process, signal.SIGTERM):  # of SIGINT, Python itself has one
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(after_s)
        children = family_of(process)[1:]
        process.send_signal(number)
        log = process.communicate(timeout=60)[1]
        assert process.returncode == 0, (after_s, log)
        assert "Traceback" not in log
        assert not psutil.wait_procs(children, timeout=10)[1], after_s
        assert not list(Path(tempfile.gettempdir()).glob(f"quire-sockets-{process.pid}-*"))
