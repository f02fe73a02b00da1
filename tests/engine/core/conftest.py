"""The model whose K/V is stored and sent, and its answers without that."""

import pytest

from tests.engine.core.kv_tier_scene import alone, prompts, small_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_llama(tmp_path_factory)


@pytest.fixture(scope="module")
def expected(model):
    return alone(model, prompts())
