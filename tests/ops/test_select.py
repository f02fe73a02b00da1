"""Who serves which op, and that ops which share a format come from one provider."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.errors import InvalidParameter, NotBuiltYet
from quire.ops import CATALOG, Facts, Implementation, bind, select
from tests.support import op_contracts
from tests.support.op_cases import CASES

FACTS = Facts(torch.device("cpu"), torch.float32)
KV_OPS = [name for name, record in CATALOG.items() if record.group == "kv"]


def yes(facts):
    return True


def no(facts):
    return f"has no kernel for {facts.dtype}"


def fast(*names, supports=yes, batch_invariant=False):
    """A provider named fast, whose functions return their own names."""
    return [
        Implementation(n, "fast", lambda *_, n=n, **__: n, supports, batch_invariant) for n in names
    ]


def choice(ops, name):
    return next(c for c in ops.report() if c.op == name)


def test_every_op_is_an_attribute():
    facts = {"choices", "batch_invariant", "invariance_reason", "takes_rows"}
    assert set(vars(select(device="cpu", dtype=torch.float32))) - facts == set(CATALOG)


def test_every_op_has_cases_or_serves_one_that_has():
    packing = {"pack_linear", "pack_experts", "allocate_kv", "allocate_shared_kv", "plan_attention"}
    packing |= {"pack_heads", "plan_latent", "plan_indexed", "plan_prompts"}
    packing |= {"allocate_lora", "load_lora", "lora", "lora_partial", "lora_total"}
    contracts = op_contracts.CONTRACTS
    assert {name for name, contract in contracts.items() if not contract.cases} == packing
    assert {name for name, contract in contracts.items() if not contract.cost} == packing


def test_case_names_are_unique():
    names = [(case.op, case.name) for case in CASES]
    assert len(set(names)) == len(names)


def test_the_namespace_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        select(device="cpu", dtype=torch.float32).norm = print


def test_plain_torch_serves_without_kernels():
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    assert {c.provider for c in ops.report()} == {"torch"}
    assert {c.why for c in ops.report()} == {""}
    assert not ops.batch_invariant
    assert ops.invariance_reason == "plain torch picks other kernels for few rows"
    assert ops.linear is CATALOG["linear"].definition


def test_a_better_provider_is_taken_op_by_op():
    ops = bind(FACTS, fast("norm", "add"), ["fast", "torch"])
    assert ops.norm() == "norm"
    assert choice(ops, "norm") == ("norm", "fast", "")
    assert choice(ops, "embed") == ("embed", "torch", "fast: has no embed")


def test_the_report_says_why_a_better_provider_was_refused():
    ops = bind(FACTS, fast("norm", supports=no), ["fast", "torch"])
    why = "fast: norm: has no kernel for torch.float32"
    assert choice(ops, "norm") == ("norm", "torch", why)


def test_a_format_is_taken_whole_or_not_at_all():
    ops = bind(FACTS, fast(*KV_OPS[1:]), ["fast", "torch"])
    assert choice(ops, "attend") == ("attend", "torch", "fast: has no allocate_kv")
    assert {choice(ops, name).provider for name in KV_OPS} == {"torch"}
    ops = bind(FACTS, fast(*KV_OPS), ["fast", "torch"])
    assert {choice(ops, name).provider for name in KV_OPS} == {"fast"}


def test_one_refusal_refuses_the_format():
    some = fast(*KV_OPS[1:]) + fast(KV_OPS[0], supports=no)
    ops = bind(FACTS, some, ["fast", "torch"])
    assert {choice(ops, name).provider for name in KV_OPS} == {"torch"}


def test_experts_come_from_the_provider_of_linear():
    """Experts are packed as linear weights are, so the two formats belong together."""
    ops = bind(FACTS, fast("pack_experts", "moe"), ["fast", "torch"])
    assert choice(ops, "moe").provider == choice(ops, "linear").provider == "torch"


def test_forcing_one_op_settles_its_format():
    ops = bind(FACTS, fast(*KV_OPS, "norm"), ["fast", "torch"], {"attend": "torch"})
    assert {choice(ops, name).provider for name in KV_OPS} == {"torch"}
    assert choice(ops, "norm").provider == "fast"


def test_forcing_a_provider_that_refuses_raises():
    with pytest.raises(InvalidParameter, match="has no kernel for torch.float32"):
        bind(FACTS, fast("norm", supports=no), ["torch"], {"norm": "fast"})


@pytest.mark.parametrize(
    ("providers", "text"),
    [
        (["triton_for_toasters"], "is not part of this installation"),
        (["norm=nobody"], "is not part of this installation"),
        (["normal=torch"], "there is no such op"),
        (["attend=torch", "rope_store=oracle"], "share a format"),
    ],
    ids=["provider", "forced provider", "op", "split format"],
)
def test_wrong_wishes_are_refused(providers, text):
    with pytest.raises(InvalidParameter, match=text):
        select(device="cpu", dtype=torch.float32, providers=providers)


def test_invariance_needs_every_op_to_claim_it():
    ops = bind(FACTS, op_contracts.ORACLE, ["oracle"])
    assert ops.batch_invariant
    all_but_norm = [i for i in op_contracts.ORACLE if i.op != "norm"]
    assert not bind(FACTS, all_but_norm, ["oracle"]).batch_invariant
    ops = bind(FACTS, [*fast("norm"), *all_but_norm], ["fast", "oracle"])
    assert ops.invariance_reason == "norm may compute a row differently in another batch"


def test_three_positions_per_token_are_refused():
    ops = select(device="cpu", dtype=torch.float32)
    kv = ops.allocate_kv(1, 4, 1, 4, torch.float32)
    with pytest.raises(NotBuiltYet, match="M-RoPE"):
        ops.rope_store(
            torch.zeros(2, 12),
            kv,
            torch.arange(2),
            torch.zeros(3, 2, dtype=torch.int64),
            heads=1,
            kv_heads=1,
            head_dim=4,
            rotary=None,
            qk_norm=None,
            clip=None,
        )


# the other benchmarks take hundreds of megabytes, under the same formulas
LIGHT = [case for case in CASES if "logits_0.6b" not in case.name and "4096" not in case.name]


@pytest.mark.parametrize("case", LIGHT, ids=lambda c: f"{c.op}/{c.name}")
def test_formulas_count_something(case):
    ops = select(device="cpu", dtype=torch.bfloat16)
    arguments = case.prepare(ops, case.draw(torch.bfloat16)).arguments
    assert case.num_bytes(arguments) >= 0
    assert case.flops(arguments) >= 0
    if case.is_bench:
        assert case.num_bytes(arguments) > 1e6
        assert case.flops(arguments) > 1e6


def test_the_promise_of_invariance_is_kept_by_definitions_that_look_at_one_row():
    """Ops that plain torch computes row by row do not break what the others promise."""
    row_wise = [name for name, record in CATALOG.items() if record.is_invariant]
    assert {
        "embed", "xielu", "multiply", "modulate", "row_peaks",
        "sparse_gated", "bounded_gated", "scale_heads", "join_streams",
        "enter_streams", "predict_streams", "correct_streams", "add_to_streams", "add_matched",
        "scale_queries", "mix_axes", "route", "greedy", "draw", "truncate",
        "rank", "mask_logits", "bias_logits", "penalize", "forbid_words",
        "short_conv", "mamba_scan", "mamba2_scan", "gated_delta", "gated_norm", "sum_chunks",
        "channel_delta", "gated_linear", "index_select", "indexed_attend",
        "block_select", "block_attend", "clamped_gated",
        "recent_store", "entry_select", "recent_attend", "collapse_streams", "expand_streams",
        "route_softplus",
    } == set(row_wise)  # fmt: skip
    others = [name for name in CATALOG if name not in row_wise]
    offered = [
        Implementation(name, "fixed", lambda *_: None, lambda _: True, batch_invariant=True)
        for name in others
    ]
    assert bind(FACTS, offered, ["fixed"]).batch_invariant
    missing = bind(FACTS, offered[1:], ["fixed"])
    assert not missing.batch_invariant and "plain torch" in missing.invariance_reason


def test_every_row_of_a_definition_that_says_so_is_the_same_alone():
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    row_wise = {"greedy", "draw", "truncate", "rank"}
    cases = [case for case in CASES if case.op in row_wise and not case.is_bench]
    assert {case.op for case in cases} == row_wise
    for case in cases:
        arguments = list(case.prepare(ops, case.draw(torch.float32)).arguments.values())
        function = CATALOG[case.op].definition
        together = function(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
        logits = arguments[0]
        for row in range(len(logits)):
            own = [
                a[row : row + 1].clone()
                if isinstance(a, torch.Tensor) and len(a) == len(logits) and a.dim() > 0
                and not (case.op == "draw" and a is arguments[-1])
                else a
                for a in arguments
            ]  # fmt: skip
            alone = function(*own)
            both = ((x if isinstance(x, tuple) else (x,)) for x in (alone, together))
            for one, many in zip(*both, strict=True):
                assert one[0].numpy().tobytes() == many[row].numpy().tobytes(), case.name
