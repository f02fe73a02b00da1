"""Runs files of vLLM's tests, each in a fork of this process, which has imported what they need.

The paths of the files, relative to the folder of the source distribution, are lines of the standard
input; "done PATH" is written when one has ended. SECONDS bounds a test, and ten times that a file.
The signal TERM ends a file with all that it has started.
"""

import contextlib
import functools
import importlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import anthropic  # noqa: F401
import httpx  # noqa: F401
import openai  # noqa: F401
import pytest
import pytest_asyncio  # noqa: F401
import pytest_timeout  # noqa: F401
import torch
import transformers  # noqa: F401

import quire.engine.async_llm
import quire.llm
import quire.server.output_parsing  # noqa: F401

SECONDS = int(os.environ.get("REFERENCE_SECONDS", "60"))
OPTIONS = (
    *("-p", "phantoms", "-p", "no:cacheprovider", f"--timeout={SECONDS}", "-q", "--tb=short"),
    *("--continue-on-collection-errors", "-W", "ignore", "-o", "asyncio_mode=auto"),
    *("-o", "asyncio_default_fixture_loop_scope=session"),
    *("-o", "asyncio_default_test_loop_scope=session"),
)

for module in ("phantoms", "tests.conftest", "tests.utils"):
    importlib.import_module(module)  # theirs, which every file needs

torch.accelerator.empty_cache = lambda: None  # there may be none
servers = sys.modules["tests.utils"].RemoteVLLMServer
servers._pre_download_model = lambda self, model, args: None
for kind in (servers, *servers.__subclasses__()):
    kind._get_process_termination_timeout = lambda self: 15.0

in_a_fork = sys.modules["tests.utils"].fork_new_process_for_each_test
SKIPPED = "SKIPPED IN A FORK: "


def skip_in_a_fork(test):
    """Their decorator of tests that run in a fork, with a skip told: theirs makes it a pass."""

    @functools.wraps(test)
    def told(*args, **options):
        try:
            test(*args, **options)
        except pytest.skip.Exception as skipped:
            raise RuntimeError(f"{SKIPPED}{skipped}") from None

    forked = in_a_fork(told)

    @functools.wraps(test)
    def run_or_skip(*args, **options):
        try:
            forked(*args, **options)
        except RuntimeError as error:
            found, why = str(error).partition(SKIPPED)[1:]
            if not found:
                raise
            pytest.skip(why)

    return run_or_skip


sys.modules["tests.utils"].fork_new_process_for_each_test = skip_in_a_fork

# Their servers have the routes of administration by a variable; here a flag and a key open them,
# and a client that is told of no key has it from a file that NETRC names.
KEY = "key-of-administration"
administered = importlib.import_module("tests.entrypoints.rl.conftest")
for given in (administered._BASE_ARGS, administered._DUMMY_ARGS):
    given += ["--enable-admin", "--api-key", KEY]


def name_the_key():
    """Let clients of this process send the key to servers of this machine."""
    file = Path(tempfile.mkdtemp(), "netrc")
    file.write_text(f"machine localhost login any password {KEY}\n")
    file.chmod(0o600)
    os.environ["NETRC"] = str(file)


def run(path):
    """Run one file in a fork; it and its children end with this call."""
    child = os.fork()
    signal.signal(signal.SIGTERM, lambda *_: end(child))
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        if path.startswith("tests/entrypoints/rl/"):
            name_the_key()
        log = os.open(os.environ["REFERENCE_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(int(pytest.main([*OPTIONS, path])))
    until = time.monotonic() + 10 * SECONDS
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def end(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os._exit(1)


for line in sys.stdin:
    run(line.strip())
    sys.stdout.write(f"done {line}")
    sys.stdout.flush()
