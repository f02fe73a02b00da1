"""Adapters of a product in every format that a weight may have: what is added where the sums are
finished is the addend itself, and the other rows keep their bits.
"""

from functools import cache

import pytest
import torch

from quire.ops.formats.lora import LoraPart, LoraShape
from tests.kernels.cpu import segment_worker
from tests.kernels.cpu.native_ops import dtype_id
from tests.kernels.cpu.segment_worker import DTYPES, FORMATS, draw
from tests.support.needs import needs_native
from tests.support.op_cases import CODED_CASES
from tests.support.op_cases.lora import pieces_of

pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
cpu_ops = cache(segment_worker.cpu_ops)
ROWS = (1, 5, 33)
IN_CODES = [case for case in CODED_CASES if case.op in ("linear", "hidden", "logits")]


def bank_of(ops, width, sizes, dtype, segments=1, slots=4, rank=8):
    pieces = pieces_of(sizes, range(len(sizes)))
    bank = ops.allocate_lora(
        LoraShape(width, pieces, segments, slots, rank, dtype, torch.device("cpu"))
    )
    for slot in range(slots - 1):  # the last one stays empty
        ranks = [1 + (5 * slot + 3 * n) % rank for n in range(len(sizes))]
        parts = [
            LoraPart(
                draw(r, width, dtype=dtype, seed=slot) * width**-0.5,
                (draw(size, r, dtype=dtype, seed=7 + slot),),
            )
            for r, size in zip(ranks, sizes, strict=True)
        ]
        ops.load_lora(bank, slot, parts)
    return bank


def slots_of(rows, slots=4):
    return (torch.arange(rows, dtype=torch.int32) * 3 + 2) % (slots + 1) - 1


def check(ops, x, packed, product, bank):
    """The product with what adapters add, beside that with an addend of values."""
    slots = slots_of(len(x))
    found = product(x, packed, ops.lora(x, bank, slots))
    factors = ops.lora_partial(x, bank, slots)
    assert torch.equal(found, product(x, packed, ops.lora_total(factors, bank, slots)))
    plain = product(x, packed, None)
    is_same = (found == plain).all(1)
    assert torch.equal(is_same, (slots < 0) | (slots == 3))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=lambda isa, dtype, name: dtype is torch.bfloat16)
def test_rounded_weights(isa, dtype, name):
    ops, stored_as = cpu_ops(dtype, isa), FORMATS[name]
    for sizes, segments in (((33, 20), 4), ((64, 32, 32), 1)):
        width, out = 512, sum(sizes)
        packed = ops.pack_linear(draw(out, width, dtype=dtype), None, stored_as, segments)
        bank = bank_of(ops, width, sizes, dtype, segments)
        for rows in ROWS:
            check(ops, draw(rows, width, dtype=dtype, seed=3), packed, ops.linear, bank)


@pytest.mark.parametrize("case", IN_CODES, ids=lambda case: case.name)
def test_weights_in_codes(isa, case):
    ops = cpu_ops(torch.bfloat16, isa)
    arguments = case.prepare(ops, case.draw(torch.bfloat16)).arguments
    name = next(n for n in ("w", "up", "head") if n in arguments)
    packed, width = arguments[name], arguments[name].in_features
    bank = bank_of(ops, width, (packed.out_features,), torch.bfloat16, packed.segments)
    rest = {k: v for k, v in arguments.items() if k not in ("x", name, "addend")}

    def product(x, w, addend):
        return getattr(ops, case.op)(x, w, **rest, addend=addend)

    check(ops, draw(9, width, dtype=torch.bfloat16, seed=3), packed, product, bank)
