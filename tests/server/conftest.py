"""Real servers for the tests of this folder: one plain, one with keys, each started once."""

import pytest

from tests.server.serve_process import serving

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="session")
def server():
    """A server of the embedded model without keys."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def guarded():
    """A server that asks for one of KEYS."""
    with serving("--enable-admin", "--api-key", *KEYS) as running:
        yield running
