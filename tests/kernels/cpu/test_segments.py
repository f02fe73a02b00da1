"""One order of sums: segments that are computed anywhere and added up give the bits of the whole
product; what is added to some rows leaves the others' bits.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch

from quire.kernels.cpu.program import Program
from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops.collective import linear_total
from quire.ops.segments import Addend
from quire.ops.select import select
from tests.kernels.cpu import native_ops, segment_worker
from tests.kernels.cpu.native_ops import dtype_id
from tests.kernels.cpu.segment_worker import DTYPES, FORMATS, INPUTS, OUT, draw, partial
from tests.support.native_levels import levels_with
from tests.support.needs import needs_native

pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
KERNELS = ("linear", "quantized", "dequantized")
cpu_ops = cache(segment_worker.cpu_ops)
ROWS = (0, 1, 2, 3, 5, 13, 33, 250)
SHAPES = {
    "plain": [(16, 1), (48, 33), (528, 31), (1040, 65)],
    "int8": [(16, 1), (48, 33), (1040, 65)],
    "int8-weight-only": [(16, 1), (528, 33)],
    "int4": [(256, 1), (768, 33), (1280, 65)],
    "int4-weight-only": [(128, 1), (640, 33)],
}


def has_own_code(isa, dtype, name):
    """Whether a level's products with a format are not those of the level before."""
    if name == "plain":
        return isa in levels_with("linear") and native_ops.has_own_code(isa, dtype)
    return isa in levels_with("quantized" if FORMATS[name].rounds_rows else "dequantized")


def total(ops, x, weight, bias, stored_as, parts, addend=None):
    packed = ops.pack_linear(weight, bias, stored_as, 4)
    return ops.linear_total(torch.stack(parts, 1), packed, ops.row_peaks(x), x.dtype, addend)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=has_own_code)
def test_segments_of_any_workers_add_up_to_the_product(isa, dtype, name):
    ops, stored_as = cpu_ops(dtype, isa), FORMATS[name]
    for width, out in SHAPES[name]:
        weight, bias = draw(out, width, dtype=dtype), draw(out, 1, dtype=dtype).flatten()
        packed = ops.pack_linear(weight, bias, stored_as, 4)
        for rows in ROWS:
            x = draw(rows, width, dtype=dtype, seed=2)
            whole, given = ops.linear(x, packed), (ops.row_peaks(x), ops.row_peaks(weight))
            for size in (1, 2, 4):
                parts = [
                    partial(ops, x, weight, stored_as, rank, size, given) for rank in range(size)
                ]
                found = total(ops, x, weight, bias, stored_as, parts)
                assert torch.equal(found, whole), (width, out, rows, size)


def test_segments_of_other_processes_add_up_to_the_product(tmp_path):
    program = [sys.executable, "-m", "tests.kernels.cpu.segment_worker", str(tmp_path)]
    running = [subprocess.Popen([*program, str(rank)]) for rank in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    for dtype in DTYPES:
        ops = cpu_ops(dtype)
        x = draw(segment_worker.ROWS, INPUTS, dtype=dtype)
        weight = draw(OUT, INPUTS, dtype=dtype, seed=1)
        for name, stored_as in FORMATS.items():
            whole = ops.linear(x, ops.pack_linear(weight, None, stored_as, 4))
            for size in (2, 4):
                files = [tmp_path / f"{name}-{dtype}-{size}-{rank}.pt" for rank in range(size)]
                parts = [torch.load(file) for file in files]
                assert torch.equal(total(ops, x, weight, None, stored_as, parts), whole)


@pytest.mark.parametrize("name", ["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_the_sum_of_any_number_of_parts_is_recorded_and_has_the_bits_of_the_definition(dtype, name):
    runtime = CpuRuntime(num_threads=2)
    ops = select(device="cpu", dtype=dtype, providers=["cpu"], runtime=runtime)
    bias = draw(37, 1, dtype=dtype).flatten()
    packed = ops.pack_linear(draw(37, 48, dtype=dtype), bias, FORMATS[name], 4)
    for segments in range(1, 9):
        parts = draw(6, segments, 37, dtype=torch.float32, seed=segments)
        parts = (parts * 1e4).int() if name == "int8" else parts
        peaks = torch.tensor([0.0, 1e-31, 3.7, float("nan"), 1e20, 1.0])
        rows = torch.tensor([1, -1, 0, -1, 1, -1], dtype=torch.int32)
        for addend in (None, Addend(draw(2, 37, dtype=torch.float32), rows)):
            given = parts, packed, peaks, dtype, addend
            right = linear_total.definition(*given)
            program = Program(runtime, capacity=6)
            with program.recording():
                recorded = ops.linear_total(*given)
            assert len(program) == 1 and not program._calls
            program.replay(5)
            for found in (ops.linear_total(*given)[:5], recorded[:5]):
                assert same_numbers(found, right[:5]), (segments, addend)


def same_numbers(found, right):
    """Equal to the bit, but for the bits of NaN."""
    return torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))


def one_after_the_other(parts):
    while parts.shape[1] > 1:
        parts = torch.cat([parts[:, :1] + parts[:, 1:2], parts[:, 2:]], 1)
    return parts


def rounded(parts):
    return parts.bfloat16().float()


def crosswise(parts):
    return parts[:, [0, 2, 1, 3]] if parts.shape[1] == 4 else parts


@pytest.mark.parametrize("wrong", [one_after_the_other, rounded, crosswise])
@pytest.mark.parametrize("name", ["plain", "int4", "int8-weight-only"])
def test_another_order_has_other_bits(name, wrong):
    """Whole numbers have one sum in any order; all other formats show it."""
    ops, stored_as = cpu_ops(torch.float32), FORMATS[name]
    x, weight = draw(40, 768, dtype=torch.float32), draw(64, 768, dtype=torch.float32, seed=1)
    weight *= draw(64, 12, dtype=torch.float32, seed=2).repeat_interleave(64, 1).mul(3).exp()
    whole = ops.linear(x, ops.pack_linear(weight, None, stored_as, 4))
    parts = [partial(ops, x, weight, stored_as, rank, 4) for rank in range(4)]
    assert torch.equal(total(ops, x, weight, None, stored_as, parts), whole)
    others = wrong(torch.stack(parts, 1)).unbind(1)
    assert not torch.equal(total(ops, x, weight, None, stored_as, others), whole)


def test_a_part_that_is_rounded_by_its_own_peaks_has_other_bits():
    ops, stored_as = cpu_ops(torch.float32), FORMATS["int8"]
    x, weight = draw(40, 768, dtype=torch.float32), draw(64, 768, dtype=torch.float32, seed=1)
    whole = ops.linear(x, ops.pack_linear(weight, None, stored_as, 4))
    for wrong in (ops.row_peaks(x[:, :384]), ops.row_peaks(x) * 2):
        given = (wrong, ops.row_peaks(weight))
        parts = [partial(ops, x, weight, stored_as, rank, 2, given) for rank in range(2)]
        assert not torch.equal(total(ops, x, weight, None, stored_as, parts), whole)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=has_own_code)
def test_an_addend_reaches_its_rows_and_no_others(isa, dtype, name):
    ops, stored_as = cpu_ops(dtype, isa), FORMATS[name]
    weight, bias = draw(70, 256, dtype=dtype), draw(70, 1, dtype=dtype).flatten()
    packed = ops.pack_linear(weight, bias, stored_as)
    gates = ops.pack_linear(weight, bias, stored_as, gated=True)
    zero = ops.pack_linear(torch.zeros_like(weight), None, stored_as)
    values = draw(3, 70, dtype=torch.float32, seed=5)
    for rows in (1, 2, 7, 40):
        x = draw(rows, 256, dtype=dtype, seed=2)
        which = torch.arange(rows, dtype=torch.int32) % 4 - 1
        addend, has = Addend(values, which), which >= 0
        for run in (
            lambda some, given: ops.linear(some, packed, given),
            lambda some, given: ops.hidden(some, gates, "silu", True, given),
            lambda some, given: ops.hidden(some, packed, "gelu", False, given),
            lambda some, given: ops.logits(some, packed, 0.5, 20.0, given),
        ):
            y, without = run(x, addend), run(x, None)
            assert torch.equal(y[~has], without[~has])
            for t in range(rows):
                alone = Addend(values, which[t : t + 1]) if has[t] else None
                assert torch.equal(run(x[t : t + 1], alone), y[t : t + 1])
        exact = torch.where(has[:, None], values[which.clamp_min(0).long()], 0.0)
        assert torch.equal(ops.linear(x, zero, addend), exact.to(dtype))
        assert torch.equal(ops.logits(x, zero, addend=addend), exact.to(dtype).float())


def test_an_addend_comes_before_activation_and_rounding():
    ops = cpu_ops(torch.bfloat16)
    x, weight = draw(5, 64, dtype=torch.bfloat16), draw(48, 64, dtype=torch.bfloat16, seed=1)
    packed, values = ops.pack_linear(weight, None), draw(5, 48, dtype=torch.float32, seed=3)
    wide = x.double() @ weight.double().T + values.double()
    y = ops.linear(x, packed, Addend(values, torch.arange(5, dtype=torch.int32)))
    assert ((y - wide).abs() <= wide.abs() / 256 + 1e-4).all()
    twice = ops.linear(x, packed).float() + values  # rounded before it
    assert (y.float() != twice.bfloat16().float()).any()
    h = ops.hidden(x, packed, "silu", False, Addend(values, torch.arange(5, dtype=torch.int32)))
    truth = torch.nn.functional.silu(wide)
    assert ((h - truth).abs() <= truth.abs() / 128 + 1e-4).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_shares_of_the_outputs_are_the_whole_side_by_side(dtype, name):
    ops = cpu_ops(dtype)
    weight, bias = draw(256, 256, dtype=dtype), draw(256, 1, dtype=dtype).flatten()
    packed = ops.pack_linear(weight, bias, FORMATS[name])
    x = draw(5, 256, dtype=dtype, seed=2)
    whole = ops.logits(x, packed, 0.5, 20.0)
    for size in (2, 4):
        parts = [ops.logits(x, packed.share(rank, size), 0.5, 20.0) for rank in range(size)]
        assert torch.equal(torch.cat(parts, 1), whole)
    gates = ops.pack_linear(weight, bias, FORMATS[name], gated=True)
    narrow = ops.pack_linear(weight[:250], None, FORMATS[name])
    assert packed.share(0, 3) is None and narrow.share(0, 2) is None and gates.share(0, 2) is None
