"""The native mixture of experts: its products are those of the experts one by one, to the bit, in
any company, and recorded.
"""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import ops_of
from quire.kernels.cpu.expert_ops import ExpertOps
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import RouteArgs, select
from quire.ops.formats.lora import LoraPart, LoraShape
from quire.ops.moe import ExpertAdapters, MoeArgs
from quire.ops.quantized import WeightFormat
from tests.kernels.cpu.native_ops import DTYPES, case_id, cpu_ops, dtype_id, has_own_code, is_sharp
from tests.support.needs import needs_native
from tests.support.op_cases import CASES, CODED_CASES
from tests.support.op_cases.case import Draw
from tests.support.op_cases.coded import coded_weight
from tests.support.op_cases.lora import pieces_of
from tests.support.op_conformance import check

KERNELS = ("experts", "route", "linear", "quantized", "dequantized", "coded", "coded_digits")
pytestmark = [needs_native, pytest.mark.usefixtures("one_torch_thread")]
HOSTILE = [
    case for case in (*CASES, *CODED_CASES) if case.op in ops_of(ExpertOps) and not case.is_bench
]
EXPERTS, TOP_K, WIDTH, FFN, TOKENS = 5, 3, 64, 128, 120

FORMATS = {
    "plain": None,
    "int8": WeightFormat("int8"),
    "int4": WeightFormat("int4", 32),
    "int8 alone": WeightFormat("int8", rounds_rows=False),
    "int4 alone": WeightFormat("int4", 32, rounds_rows=False),
    "codes4": 4,
    "codes8": 8,
}
ARGS = [
    MoeArgs(),
    MoeArgs("gelu_tanh", gated=False),
    MoeArgs(clamp=0.6),
    MoeArgs(weighs_input=True),
]


@pytest.mark.parametrize("case", HOSTILE, ids=case_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(when=is_sharp)
def test_native_op_conforms(isa, dtype, case):
    check(case, dtype, cpu_ops(isa, dtype).replace(batch_invariant=True))


def drawn(kind, args, dtype):
    """Weights up and down, and how they are stored."""
    draw = Draw(7, dtype)
    inner, stored_as = FFN * (1 + args.gated), FORMATS[kind]
    if isinstance(stored_as, int):
        size = 2.0 ** (4 - stored_as)  # float16 holds the products of products
        up = [coded_weight(draw, inner, WIDTH, stored_as, 32, zeros=e == 1) for e in range(EXPERTS)]
        down = [coded_weight(draw, WIDTH, FFN, stored_as, 32) for _ in range(EXPERTS)]
        return [w.scaled(size) for w in up], [w.scaled(size) for w in down], None
    up = draw.normal(EXPERTS, inner, WIDTH, scale=WIDTH**-0.5)
    return up, draw.normal(EXPERTS, WIDTH, FFN, scale=FFN**-0.5), stored_as


def routed(num_tokens, dtype=torch.float32, seed=0, num_experts=EXPERTS, top_k=TOP_K, width=WIDTH):
    """x, choices and weights; the first expert is chosen by most tokens, the last one by few."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_tokens, num_experts, generator=generator)
    noise += torch.linspace(0.8, 0, num_experts)
    chosen = noise.topk(top_k).indices.int()
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return torch.randn(num_tokens, width, generator=generator).to(dtype), chosen, weights


def one_by_one(ops, x, chosen, weights, up, down, stored_as, args):
    """Each choice as products of its own, weighed and added in torch."""
    finish = {"act": args.act, "gated": args.gated}
    totals = []
    for row, choice, shares in zip(x, chosen, weights, strict=True):
        total = None
        for e, share in zip(choice.tolist(), shares, strict=True):
            one = row[None] * share.to(x.dtype) if args.weighs_input else row[None]
            pack_up = ops.pack_linear(up[e], None, stored_as, gated=args.gated)
            hidden = ops.hidden(one, pack_up, **finish)
            y = ops.linear(hidden, ops.pack_linear(down[e], None, stored_as, segments=4)).float()
            y = y if args.weighs_input else y * share
            total = y if total is None else total + y
        totals.append(total)
    return torch.cat(totals).to(x.dtype)


@pytest.mark.parametrize("args", [ARGS[0], ARGS[1], ARGS[3]], ids=["silu", "no gate", "weighs"])
@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(
    when=lambda isa, dtype, kind, args: (
        has_own_code(isa, dtype) and (dtype is torch.bfloat16 or kind == "plain")
    )
)
def test_a_mixture_is_the_products_of_its_experts(isa, dtype, kind, args):
    ops = cpu_ops(isa, dtype)
    up, down, stored_as = drawn(kind, args, dtype)
    packed = ops.pack_experts(up, down, stored_as=stored_as, segments=4, gated=args.gated)
    x, chosen, weights = routed(9, dtype)
    y = ops.moe(x, chosen, weights, packed, args)
    assert torch.equal(y, one_by_one(ops, x, chosen, weights, up, down, stored_as, args))


@pytest.mark.parametrize("args", ARGS, ids=["silu", "no gate", "limited", "weighs"])
@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.sharp(
    when=lambda isa, dtype, kind, args: has_own_code(isa, dtype) and dtype is torch.bfloat16
)
def test_a_token_has_the_same_bits_in_any_company(isa, dtype, kind, args):
    one, two = cpu_ops(isa, dtype, num_threads=1), cpu_ops(isa, dtype, num_threads=2)
    up, down, stored_as = drawn(kind, args, dtype)
    packed = one.pack_experts(up, down, stored_as=stored_as, gated=args.gated)
    routing = routed(TOKENS, dtype)

    def run(ops, start, stop):
        return ops.moe(*(part[start:stop] for part in routing), packed, args)

    alone = torch.cat([run(one, t, t + 1) for t in range(TOKENS)])
    for ops in (one, two):
        assert torch.equal(run(ops, 0, TOKENS), alone)
        for start, stop in ((0, 1), (1, 4), (4, 21), (21, 22), (22, TOKENS)):
            assert torch.equal(run(ops, start, stop), alone[start:stop])


def test_more_rows_than_are_computed_at_once():
    """Rows so long that a step is several blocks of tokens, and each several regions."""
    ops, width, num_tokens = cpu_ops(None), 1 << 16, 300
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(2, 2, width, generator=generator) / width
    down = torch.randn(2, width, 1, generator=generator)
    packed = ops.pack_experts(up, down, gated=True)
    x, chosen, weights = routed(num_tokens, num_experts=2, top_k=2, width=width)
    y = ops.moe(x, chosen, weights, packed, MoeArgs())
    for t in (0, 1, 254, 255, 256, 257, num_tokens - 1):
        part = slice(t, t + 1)
        assert torch.equal(
            y[part], ops.moe(x[part], chosen[part], weights[part], packed, MoeArgs())
        )


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 2**31 - 1, -(2**31)])
def test_a_choice_that_is_not_an_expert_is_refused(wrong):
    runtime = CpuRuntime(num_threads=2)
    ops = select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime)
    packed = ops.pack_experts(*drawn("plain", MoeArgs(), torch.float32)[:2], gated=True)
    x, chosen, weights = routed(8)
    program = Program(runtime, capacity=8)
    with program.recording():
        y = ops.moe(x, chosen, weights, packed, MoeArgs())
    chosen[5, 1] = wrong
    with pytest.raises(IndexError, match="out of range"):
        ops.moe(x, chosen, weights, packed, MoeArgs())
    with pytest.raises(IndexError, match="out of range"):
        program.replay(8)
    program.replay(5)  # the tokens before it
    assert torch.equal(y[:5], ops.moe(x[:5], chosen[:5], weights[:5], packed, MoeArgs()))


def bank_of(ops, width, out, seed):
    pieces = pieces_of([out], [0])
    shape = LoraShape(width, pieces, 1, 2 * EXPERTS, 4, torch.float32, torch.device("cpu"))
    bank = ops.allocate_lora(shape)
    generator = torch.Generator().manual_seed(seed)
    for slot in range(2 * EXPERTS):
        a, b = torch.randn(3, width, generator=generator), torch.randn(out, 3, generator=generator)
        ops.load_lora(bank, slot, [LoraPart(a / width, (b,)) if slot % 4 else None])
    return bank


@pytest.mark.parametrize("has_adapters", [False, True], ids=["plain", "adapters"])
def test_a_recorded_mixture_is_native_and_serves_any_routing(has_adapters):
    runtime = CpuRuntime(num_threads=2)
    ops = select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime)
    packed = ops.pack_experts(*drawn("plain", MoeArgs(), torch.float32)[:2], gated=True)
    router = ops.pack_linear(torch.randn(EXPERTS, WIDTH), None)
    route = RouteArgs(TOP_K, "softmax", renorm=True)
    slots = torch.full((TOKENS,), -1, dtype=torch.int32)
    banks = bank_of(ops, WIDTH, 2 * FFN, 1), bank_of(ops, FFN, WIDTH, 2)
    inputs = torch.zeros(TOKENS, WIDTH)

    def layer(count):
        chosen, weights = ops.route(ops.linear(inputs[:count], router), route)
        adapters = ExpertAdapters(*banks, EXPERTS, slots[:count]) if has_adapters else None
        return ops.moe(inputs[:count], chosen, weights, packed, MoeArgs(), adapters)

    program = Program(runtime, capacity=TOKENS)
    with program.recording():
        recorded = layer(TOKENS)
    assert len(program) == 3 and not program._calls
    seen = set()
    for seed, rows in enumerate((1, 17, TOKENS, 2, 0)):
        inputs.copy_(routed(TOKENS, seed=seed)[0])
        slots[:] = torch.arange(TOKENS) % 3 - 1
        program.replay(rows)
        assert torch.equal(recorded[:rows], layer(rows))
        seen.add(recorded[:1].sum().item())
    assert len(seen) == 4  # none at 0 rows


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_the_panels_of_a_layer_are_one_piece_of_memory(kind):
    up, down, stored_as = drawn(kind, MoeArgs(), torch.float32)
    packed = cpu_ops(None).pack_experts(up, down, stored_as=stored_as, gated=True)
    panels = [weight.panels for pair in zip(packed.up, packed.down, strict=True) for weight in pair]
    assert len({part.untyped_storage().data_ptr() for part in panels}) == 1
    place = panels[0].data_ptr()
    for part in panels:
        assert part.data_ptr() == place and place % 64 == 0
        place += part.nbytes


def test_equal_scores_are_chosen_in_order_and_nan_is_above_all(isa):
    ops = cpu_ops(isa)
    logits = torch.zeros(4, 40)
    logits[1, 21] = logits[1, 5] = 1
    logits[2, 33] = float("nan")
    logits[3] = float("-inf")
    for args in (
        RouteArgs(3, "softmax", True),
        RouteArgs(3, "sigmoid", True, groups=4, top_groups=2),
    ):
        chosen, weights = ops.route(logits, args)
        assert chosen[0].tolist() == [0, 1, 2] and weights[0].tolist() == pytest.approx([1 / 3] * 3)
        assert chosen[1].tolist() == [5, 21, 0]
        assert weights[2].isnan().all() and ((chosen >= 0) & (chosen < 40)).all()
        assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_rows_of_logits_may_lie_apart(isa):
    ops, args = cpu_ops(isa), RouteArgs(2, "softmax_topk", False)
    wide = torch.randn(9, 3, 7)
    found, right = ops.route(wide[:, 1], args), ops.route(wide[:, 1].contiguous(), args)
    assert torch.equal(found[0], right[0]) and torch.equal(found[1], right[1])
    alone = ops.route(wide[4:5, 1], args)
    assert torch.equal(found[0][4:5], alone[0]) and torch.equal(found[1][4:5], alone[1])
