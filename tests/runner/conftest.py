"""The checkpoint of most tests of the runner."""

import pytest

from quire.testing import make_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")
