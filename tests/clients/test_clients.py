"""The modes of those clients that this environment has. All clients: docs/compatibility.md."""

import importlib
import importlib.util

import pytest

from tests.clients.catalog import CLIENTS, GENERATOR
from tests.clients.modes import modes_of
from tests.server.serve_process import serving

MODULES = [
    importlib.import_module(f"tests.clients.python.{client.module}")
    for client in CLIENTS
    if client.package and importlib.util.find_spec(client.package)
]
MODES = {
    f"{module.__name__.rpartition('.')[2]}.{mode.__name__}": mode
    for module in MODULES
    for mode in modes_of(module)
}


@pytest.fixture(scope="module")
def url():
    with serving(*GENERATOR.flags) as served:
        yield served.url


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_client_is_served(mode, url):
    mode(url, GENERATOR.name)


def test_modes_are_found_in_the_order_of_the_source():
    names = list(MODES)
    assert names[0] == "openai_sdk.models" and len(names) > 80
    assert not any("._" in name for name in names)
