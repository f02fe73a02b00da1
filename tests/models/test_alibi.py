"""Slopes of linear biases against transformers, also where heads are not a power of two."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from quire.models.alibi import alibi_slopes
from quire.models.positions import Alibi


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 31, 32, 71, 112])
def test_slopes_are_those_of_transformers(heads):
    found = torch.tensor(alibi_slopes(Alibi(), heads))
    biases = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    assert torch.allclose(found, biases[:, 0, 1], rtol=1e-6)
    scaled = torch.tensor(alibi_slopes(Alibi(max_bias=6.0, scale=0.5), heads))
    biases = build_mpt_alibi_tensor(heads, 2, alibi_bias_max=6)
    assert torch.allclose(2 * scaled, -biases[:, 0, 0], rtol=1e-6)
