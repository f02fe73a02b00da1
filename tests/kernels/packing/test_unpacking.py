"""Packed weights as rows again, and as part of a model's named parameters."""

import pytest
import torch
from safetensors.torch import load_file

from quire.ops.quantized import WeightFormat, quantize_weight
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core
from tests.support.needs import needs_native

pytestmark = needs_native
SHAPES = ((96, 64), (70, 37), (34, 130), (1, 1), (192, 256))


def drawn(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_come_back_from_panels(shape, dtype, gated):
    from quire.kernels.cpu.linear_ops import LinearOps
    from quire.kernels.cpu.runtime import CpuRuntime

    if gated and shape[0] % 2:
        return
    ops = LinearOps(CpuRuntime(num_threads=2), dtype)
    weight, bias = drawn(shape, dtype), drawn(shape[:1], torch.float32)
    found = dict(ops.pack_linear(weight, bias, gated=gated).plain_tensors())
    assert torch.equal(found["weight"], weight) and torch.equal(found["bias"], bias)
    for stored_as in (WeightFormat("int8"), WeightFormat("int4", 32)):
        found = dict(ops.pack_linear(weight, None, stored_as, gated=gated).plain_tensors())
        right = quantize_weight(weight, None, stored_as)
        assert torch.equal(found["weight"], right.q.flatten(1)[:, : shape[1]])
        assert torch.equal(found["weight_scale"].float(), right.scales.view(shape[0], -1).squeeze(
            1 if stored_as.name == "int8" else ()).float())  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_all_parameters_of_a_model_have_names(tmp_path, family):
    folder = make_checkpoint(tmp_path / "m", {"num_hidden_layers": 2}, family, dtype="float32")
    core = open_core(folder, 1)
    files = load_file(folder / "model.safetensors")
    [found] = core.executor.collective_rpc(
        "apply_model", (lambda model: dict(model.named_parameters()),), {}
    )
    core.shutdown()
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in files.values())
    q, k, v = (files[f"model.layers.1.self_attn.{part}_proj.weight"] for part in ("q", "k", "v"))
    assert torch.equal(found["layers.1.attn.qkv.weight"], torch.cat((q, k, v)))
    assert torch.equal(found["embed.weight"], files["model.embed_tokens.weight"])
