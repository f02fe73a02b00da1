"""What a GPU does, as far as a CPU can show it: Triton kernels, a device that is late, two steps in
flight, a measured KV cache, and graphs that replay at fixed addresses give plain torch's tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.mistral.modeling_mistral import eager_attention_forward

from quire.engine.core.builder import build_core
from quire.executor.platform import Platform
from quire.ops import select
from quire.runner.devices.device import CpuDevice
from quire.runner.forward.forward import EagerForward
from quire.testing import make_checkpoint
from tests.runner import triton_engine
from tests.runner.late_engines import plan_of
from tests.support.needs import needs_triton

HERE = Path(__file__).parent


pytestmark = needs_triton
SHAPE = {
    "num_hidden_layers": 1, "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 3,
}  # fmt: skip


@pytest.mark.full
def test_triton_engine_with_graphs(tmp_path, run_triton_script):
    folder = make_checkpoint(tmp_path, SHAPE, "mistral", dtype="float32")
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    plain = Platform(CpuDevice(), ops, lambda model, *_: EagerForward(model))
    right = triton_engine.drain(build_core(plan_of(folder), plain))
    found = run_triton_script(HERE / "triton_engine.py", folder, interpret=True)
    assert found["tokens"] == right
    assert found["replays"] >= 3, "decodes replay graphs"
    assert found["sizes"] == [3, 2, 1] * 2, "captured over the probe and over the real pool"
    assert found["num_blocks"] == triton_engine.NUM_BLOCKS


def rounded(x):
    """The values that e4m3 with one scale for the last axis has for x. Weights of a checkpoint are
    short numbers, often in the middle of two: so multiplied with the inverse, as in the engine.
    """
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 448) / largest
    return (x * inverse).to(torch.float8_e4m3fn).float() * (largest / 448)


def in_8_bits(folder):
    """transformers' model whose products, keys and values are rounded to 8-bit floats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for linear in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
        linear.weight = torch.nn.Parameter(rounded(linear.weight.detach()))
        linear.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))

    def attention(module, query, key, value, *args, **kwargs):
        return eager_attention_forward(module, query, rounded(key), rounded(value), *args, **kwargs)

    AttentionInterface.register("in_8_bits", attention)
    AttentionMaskInterface.register("in_8_bits", eager_mask)
    model.set_attn_implementation("in_8_bits")
    return model


@pytest.mark.full
def test_triton_engine_in_8_bit_floats(tmp_path, run_triton_script):
    shape = SHAPE | {"sliding_window": None, "tie_word_embeddings": False}
    folder = make_checkpoint(tmp_path, shape, "mistral", dtype="float32")
    found = run_triton_script(HERE / "triton_fp8_engine.py", folder, interpret=True)
    model = in_8_bits(folder)
    [first, *others] = found["rounds"]
    assert others == [first, first], "the same from cached blocks, and after sleep"
    for prompt, (tokens, logprobs) in zip(triton_engine.PROMPTS, first, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        right = logits.log_softmax(-1)
        assert right.argmax(-1).tolist() == tokens
        assert logprobs == pytest.approx(right[range(len(tokens)), tokens].tolist(), abs=1e-4)
    assert found["kv_dtype"] == "float8_e4m3fn"
    block = 2 * 4 * 1 * (16 + 4)  # keys and values, tokens, heads, numbers and scale
    assert found["sizes"] == {"planned": 20 * block, "held": 20 * block, "asleep": 0}
