"""Makes the modules beside the tests importable; one folder for the checkpoints of a session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The hostile models, made when first asked for and shared by all tests."""
    from hostile_models import Library

    return Library(tmp_path_factory.mktemp("checkpoints"))
