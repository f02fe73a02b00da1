"""Requests that schemathesis makes of /openapi.json: none gets a 5xx, and the server lives on.

Slow, and only where the package is installed: `pip install schemathesis`, then
`pytest -m slow tests/server/test_openapi_fuzz.py`; QUIRE_TEST_MANY=1 makes ten times as many.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.server.serve_process import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
    ),
]

NUM_EXAMPLES = 60 if os.environ.get("QUIRE_TEST_MANY") else 6


def fuzz(url, *flags, key=None):
    """schemathesis' report on a server."""
    program = Path(sys.executable).with_name("schemathesis")
    command = [
        *(str(program), "run", f"{url}/openapi.json", "--checks", "not_a_server_error"),
        *("--max-examples", str(NUM_EXAMPLES), "--seed", "7", "--request-timeout", "30"),
        *("--phases", "examples,coverage,fuzzing", "--generation-database", "none", *flags),
    ]
    if key is not None:
        command += ["--header", f"Authorization: Bearer {key}"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps notes where it runs
        return subprocess.run(
            command, capture_output=True, text=True, timeout=900, check=False, cwd=folder
        )


def test_no_request_makes_the_server_fail():
    flags = ("--enable-admin", "--api-key", "k", "--max-model-len", "256")
    with serving(*flags) as server:
        operations = sum(
            len(methods)
            for methods in server.get("/openapi.json", headers={"x-api-key": "k"})
            .json()["paths"]
            .values()
        )
        # a collective_rpc whose sender gives it no time is answered with 504, as it should be
        left_out = "sleep|scale|pause|collective_rpc"
        done = fuzz(server.url, "--exclude-path-regex", left_out, key="k")
        assert done.returncode == 0, done.stdout[-3000:]
        tested = re.search(r"API Operations:[^/]*?(\d+) tested", done.stdout, re.S)
        assert operations > 30
        assert tested is None or int(tested[1]) > 20, done.stdout[-2000:]
        body = {"prompt": "a", "max_tokens": 1}
        headers = {"Authorization": "Bearer k"}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
