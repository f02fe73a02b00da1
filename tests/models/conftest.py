"""One folder for the checkpoints of a session."""

import pytest

from tests.models.hostile.models import Library


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """The hostile models, made when first asked for and shared by all tests."""
    return Library(tmp_path_factory.mktemp("checkpoints"))
