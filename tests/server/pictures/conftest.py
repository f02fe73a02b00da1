"""One model for the tests of this folder."""

import pytest

from tests.server.pictures.pictured import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("pictured"))
