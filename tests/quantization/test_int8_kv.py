"""K/V in int8: the bytes are those of the definition, and nothing is lost when blocks move."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, EngineArgs, SamplingParams
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.ops import select
from quire.ops.kv import numbers_and_scales
from tests.support.op_cases.costs import vector_bytes

NATIVE, REASON = find_native()
NUM_BLOCKS, SIZE, KV_HEADS, DIM = 5, 16, 2, 40


def native_ops(isa=None):
    runtime = CpuRuntime(num_threads=2, isa=isa)
    return select(device="cpu", dtype=torch.bfloat16, providers=["cpu"], runtime=runtime)


def plain_ops():
    return select(device="cpu", dtype=torch.bfloat16, providers=["torch"])


def memory(ops):
    kv = ops.allocate_kv(NUM_BLOCKS, SIZE, KV_HEADS, DIM, torch.int8)
    ops.zero_kv(kv, range(NUM_BLOCKS))
    return kv


def hostile(num_tokens):
    """Rows of very different sizes: zeros, almost zeros, the largest, a NaN, an infinity."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, (4 + 2 * KV_HEADS) * DIM, generator=generator)
    x *= 10.0 ** torch.randint(-6, 4, (num_tokens, 1), generator=generator)
    x[1], x[2] = 0, 1e-33
    x[3, ::7] = 3e38
    x[4, 200], x[5, 300] = float("nan"), float("inf")
    x[6] = torch.arange(x.shape[1]) % 127 - 63.5  # in the middle of two whole numbers
    return x.bfloat16()


def stored(ops, x):
    kv = memory(ops)
    slots = torch.randperm(NUM_BLOCKS * SIZE, generator=torch.Generator().manual_seed(2))[: len(x)]
    ops.rope_store(
        x, kv, slots, torch.zeros((1, len(x)), dtype=torch.int64), heads=4, kv_heads=KV_HEADS,
        head_dim=DIM, rotary=None, qk_norm=None, clip=None,
    )  # fmt: skip
    return kv


def same(a, b):
    """The same scales, NaN included, and the same numbers where a scale is one."""
    (q, s), (p, t) = (numbers_and_scales(x, torch.int8) for x in (a, b))
    known = ~s.isnan()
    return (
        torch.equal(s.isnan(), t.isnan())
        and torch.equal(s[known], t[known])
        and torch.equal(q[known], p[known])
    )


def test_native_code_writes_the_bytes_of_the_definition(isa):
    x = hostile(20)
    plain, native = plain_ops(), native_ops(isa)
    a = plain.export_kv(stored(plain, x), range(NUM_BLOCKS))
    b = native.export_kv(stored(native, x), range(NUM_BLOCKS))
    assert a.dtype is torch.int8 and a.shape == (NUM_BLOCKS, 2, SIZE, KV_HEADS, DIM + 4)
    assert same(a, b)
    numbers, scales = numbers_and_scales(a, torch.int8)
    assert scales.isnan().sum() >= 2 and (numbers.abs() <= 127).all()


@pytest.mark.skipif(NATIVE is None, reason=REASON)
def test_blocks_go_from_one_provider_to_the_other_and_back_unchanged():
    plain, native = plain_ops(), native_ops()
    kv = stored(plain, hostile(30))
    data = plain.export_kv(kv, range(NUM_BLOCKS))
    other = memory(native)
    native.import_kv(other, [4, 3, 2, 1, 0], data)
    native.copy_kv(other, [0, 4], [4, 0])
    back = native.export_kv(other, [0, 3, 2, 1, 4])
    assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))
    native.zero_kv(other, [2])
    assert not native.export_kv(other, [2]).any()
    assert vector_bytes(other) == vector_bytes(kv) == DIM + 4


def test_the_memory_is_what_was_planned():
    sizes = {}
    for kind in ("auto", "int8"):
        args = {"dtype": "bfloat16", "kv_cache_dtype": kind, "max_num_seqs": 2}
        args |= {"num_gpu_blocks_override": 40, "max_model_len": 256}
        plan = EngineArgs(**args).create_engine_config()
        with LLM(**args) as llm:
            [held] = llm.collective_rpc("kv_cache_bytes")
            assert plan.memory.kv_dtype == ("int8" if kind == "int8" else "bfloat16")
            assert held == pytest.approx(plan.memory.kv_cache_bytes, rel=0.02)
            sizes[kind] = plan.memory.kv_cache_bytes
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            [output] = llm.generate("def add(a, b):", params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 8
    assert 0.5 < sizes["int8"] / sizes["auto"] < 0.6
