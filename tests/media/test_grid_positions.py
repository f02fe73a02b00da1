"""Positions on three axes equal those of transformers' models."""

import importlib
import types

import numpy as np
import pytest
import torch

from quire.media.grid_positions import grid_positions

MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "glm4v": "Glm4vModel",
}


@pytest.mark.parametrize("family", MODELS)
def test_positions_equal_those_of_transformers(family):
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(home, MODELS[family])
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    vision = types.SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2, tokens_per_second=2)
    model.config = types.SimpleNamespace(vision_config=vision)
    for scene in ([(0, 2, 3)], [(4, 3, 2), (12, 1, 7)], [(1, 5, 1), (7, 2, 2), (14, 1, 1)], []):
        num = 24
        kinds = torch.zeros(1, num, dtype=torch.int)
        for start, rows, cols in scene:
            kinds[0, start : start + rows * cols] = 1
        grid = torch.tensor([[1, rows * 2, cols * 2] for _, rows, cols in scene])
        expected, delta = model.get_rope_index(torch.zeros(1, num, dtype=torch.long), kinds, grid)
        found = grid_positions(num, scene)
        np.testing.assert_array_equal(found, expected[:, 0].numpy())
        assert found.dtype == np.int32 and found.max() + 1 - num == delta.item()


def test_pictures_may_touch():
    found = grid_positions(5, [(0, 1, 2), (2, 2, 1)])
    assert found.tolist() == [[0, 0, 2, 2, 4], [0, 0, 2, 3, 4], [0, 1, 2, 2, 4]]
