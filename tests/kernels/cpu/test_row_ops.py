"""The native row ops against the rules of every provider, at each level that this machine runs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.row_ops import RowOps
from quire.ops import NormWeight, select
from tests.kernels.cpu import native_ops
from tests.kernels.cpu.native_ops import DTYPES, case_id, dtype_id, is_sharp
from tests.support.needs import NATIVE, needs_native
from tests.support.op_cases import CASES
from tests.support.op_conformance import check

KERNELS = ("rows", "norm")
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
REFUSALS = dict(NATIVE.levels()) if NATIVE else {}
NO_AVX512 = REFUSALS.get("avx512", "the native module has no code for AVX-512")
HOSTILE = [case for case in CASES if case.op in ops_of(RowOps) and not case.is_bench]


@cache
def cpu_ops(isa, dtype, num_threads=2):
    """The provider "cpu", its claim of batch invariance taken at its word
    although plain torch serves the other ops.
    """
    return native_ops.cpu_ops(isa, dtype, num_threads).replace(batch_invariant=True)


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype))


@pytest.mark.skipif(bool(NO_AVX512), reason=NO_AVX512)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_avx2_and_avx512_give_the_same_bits(dtype):
    torch.manual_seed(0)
    x, delta = torch.randn(7, 1029).to(dtype), torch.randn(7, 1029).to(dtype)
    weight, bias = torch.randn(1029).to(dtype), torch.randn(1029).to(dtype)
    results = []
    for isa in ("avx2", "avx512"):
        ops = cpu_ops(isa, dtype)
        norms = [NormWeight(kind, 1e-5, weight, bias) for kind in ("rms", "layer", "rms1p")]
        results.append([ops.add_norm(x, delta, n, 0.3)[1] for n in norms])
        results[-1].append(ops.scale_gate(x, delta))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_every_number_of_16_bits_survives_and_rounding_is_torch_s(isa):
    patterns = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16))
    torch.manual_seed(0)
    noise = torch.randint(-(1 << 31), 1 << 31, (1 << 16,)).to(torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        add = cpu_ops(isa, dtype).add
        x = patterns.view(dtype)[None].contiguous()
        assert torch.equal(add(x, torch.full_like(x, -0.0)).nan_to_num(7), x.nan_to_num(7))
        y = noise.to(dtype)[None]
        assert torch.equal(add(x, y).nan_to_num(7), (x + y).nan_to_num(7))


def test_gates_of_any_size(isa):
    gate = torch.tensor([[0.0, -0.0, 1, -1, 20, -20, 87, -87, 88.5, -88.5, 1e30, -1e30]])
    gate = torch.cat([gate, torch.tensor([[float("inf"), -float("inf"), float("nan")]])], 1)
    ones = torch.ones_like(gate)
    result = cpu_ops(isa, torch.float32).scale_gate(ones, gate)
    torch.testing.assert_close(result, gate.sigmoid(), rtol=3e-7, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("wrong", [-1, 11, 2**62, -(2**63)])
def test_an_id_outside_of_the_table_is_an_index_error(wrong):
    ops = cpu_ops(None, torch.float32)
    table, ids = torch.zeros(11, 8), torch.tensor([3, wrong])
    with pytest.raises(IndexError):
        ops.embed(ids, table)
    with pytest.raises(IndexError):
        ops.embed(torch.tensor([3, 4]), table, 1.0, ids, torch.zeros(11, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_prompt_has_the_same_sums_however_it_is_cut(isa, dtype):
    """And those of plain torch, bit for bit."""
    torch.manual_seed(0)
    x = torch.randn(201, 77).to(dtype)

    def summed(ops, counts):
        sums = torch.zeros(2, 1, 77)
        first = 0
        for count in counts:
            ops.sum_chunks(x, torch.tensor([[first, first, count]]), *sums)
            first += count
        return sums

    whole = summed(select(device="cpu", dtype=dtype, providers=["torch"]), [201])
    for counts in ([201], [1, 200], [32, 32, 137], [31, 2, 63, 105], [1] * 201):
        assert torch.equal(summed(cpu_ops(isa, dtype), counts), whole)


@pytest.mark.parametrize("chunk", [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (4, 0, 2), (0, 0, 2**62)])
def test_a_chunk_outside_of_the_tokens_is_an_index_error(chunk):
    sums = torch.zeros(2, 1, 8)
    with pytest.raises(IndexError):
        cpu_ops(None, torch.float32).sum_chunks(torch.zeros(5, 8), torch.tensor([chunk]), *sums)
