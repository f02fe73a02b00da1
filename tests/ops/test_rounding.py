"""In bf16 and fp16 the definitions round where transformers does: equal bits, not close values."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from quire.ops import NormWeight, RotaryTable, select

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
WIDTH = 96
EPS = 1e-5


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ops_for(dtype):
    return select(device="cpu", dtype=dtype, providers=["torch"])


@DTYPES
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("rms", LlamaRMSNorm(WIDTH, EPS)),
        ("rms_late_cast", Olmo2RMSNorm(WIDTH, EPS)),
        ("rms1p", Gemma2RMSNorm(WIDTH, EPS)),
        ("layer", torch.nn.LayerNorm(WIDTH, EPS)),
        ("layer", CohereLayerNorm(WIDTH, EPS)),
        ("layer1p", NemotronLayerNorm1P(WIDTH, EPS)),
        ("none", OlmoLayerNorm(WIDTH)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@torch.no_grad()
def test_norm(kind, module, dtype):
    module = module.to(dtype)
    parameters = dict(module.named_parameters())
    for seed, parameter in enumerate(parameters.values()):
        parameter.copy_(values(WIDTH, dtype=dtype, seed=seed + 1))
    x = values(50, WIDTH, dtype=dtype) * 3
    n = NormWeight(kind, EPS, parameters.get("weight"), parameters.get("bias"))
    y = ops_for(dtype).norm(x, n)
    if isinstance(module, CohereLayerNorm):  # another order of the same sums
        torch.testing.assert_close(y, module(x))
    else:
        assert torch.equal(y, module(x))


@DTYPES
def test_rotary(dtype):
    tokens, heads, kv_heads, dim = 30, 4, 2, 16
    ops = ops_for(dtype)
    qkv = values(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(0, dim, 2) / dim))
    positions = torch.arange(tokens).flip(0)
    kv = ops.allocate_kv(2, 16, kv_heads, dim, dtype)
    q = ops.rope_store(
        qkv,
        kv,
        torch.arange(tokens),
        positions[None],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        rotary=RotaryTable(torch.cat((angles.cos(), angles.sin()), 1), dim),
        qk_norm=None,
        clip=None,
    )
    x = qkv.view(1, tokens, -1, dim).transpose(1, 2)
    cos, sin = (
        torch.cat((t, t), -1)[positions][None].to(dtype) for t in (angles.cos(), angles.sin())
    )
    want_q, want_k = apply_rotary_pos_emb(x[:, :heads], x[:, heads : heads + kv_heads], cos, sin)
    assert torch.equal(q, want_q[0].transpose(0, 1))
    stored = ops.export_kv(kv, range(2)).transpose(1, 2).reshape(32, 2, kv_heads, dim)[:tokens]
    assert torch.equal(stored[:, 0], want_k[0].transpose(0, 1))
    assert torch.equal(stored[:, 1], qkv.view(tokens, -1, dim)[:, heads + kv_heads :])
