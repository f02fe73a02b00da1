"""FlashAttention 3 as a provider: what it is called with, what it leaves to others, when it steps
back. Its function is a double, since the real one needs a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types

import pytest
import torch

from quire.ops import CATALOG, AttentionArgs, Facts, bind
from quire.ops.step_rows import StepRows
from tests.kernels.flash_attn_double import flash_attn_with_kvcache
from tests.support.op_cases import CASES
from tests.support.op_conformance import check

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from quire.kernels import fa3

KV_OPS = [name for name, record in CATALOG.items() if record.group == "kv"]
ATTENDS = [case for case in CASES if case.op == "attend" and not case.is_bench]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HOPPER = Facts(torch.device("cuda"), torch.bfloat16)


class Kernel:
    """The double, counting its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, **given):
        self.calls.append(given)
        return flash_attn_with_kvcache(**given)


def fa3_ops(kernel, dtype):
    facts = Facts(torch.device("cpu"), dtype)
    return bind(facts, fa3.offered(facts, kernel, lambda _: True), ["fa3"])


def refusal_of(case, dtype=torch.bfloat16):
    given = case.prepare(fa3_ops(Kernel(), dtype), case.draw(dtype)).arguments
    return fa3.why_not(**given)


CLAIMED = [case for case in ATTENDS if not refusal_of(case)]


def test_the_cases_that_it_claims():
    """Prompts, whatever else is in the step, without and with a soft cap."""
    assert {case.name for case in CLAIMED} == {
        "mixed-plain", "mixed-wide_window", "mixed-softcap", "one_chunk-plain",
        "one_chunk-wide_window", "one_chunk-softcap", "mixed-mqa", "row_without_new_tokens",
        "long", "long-softcap", "mixed-shared",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CLAIMED, ids=lambda case: case.name)
def test_conforms(case, dtype):
    kernel, dtype = Kernel(), DTYPES[dtype]
    check(case, dtype, fa3_ops(kernel, dtype))
    assert kernel.calls


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_tokens", "no row has more"),
        ("decode-plain", "no row has more"),
        ("mixed-window", "before the window"),
        ("mixed-sinks", "neither sinks"),
        ("mixed-alibi", "neither sinks"),
        ("mixed-mha-odd", "head dim"),
        ("int8-mixed-plain", "not of one 16-bit type"),
    ],
)
def test_what_does_not_suit_is_left_to_triton(name, reason, monkeypatch):
    case = next(case for case in ATTENDS if case.name == name)
    assert reason in refusal_of(case)
    kernel, left = Kernel(), []
    monkeypatch.setattr(fa3, "triton_attend", lambda q, kv, plan, args: left.append((plan, args)))
    ops = fa3_ops(kernel, torch.bfloat16)
    given = case.prepare(ops, case.draw(torch.bfloat16)).arguments
    ops.attend(**given)
    assert left == [(given["plan"].inner, given["args"])] and not kernel.calls


def test_float32_is_left_to_triton():
    case = next(case for case in ATTENDS if case.name == "mixed-plain")
    assert "16-bit" in refusal_of(case, torch.float32)


def test_a_refilled_plan_looks_its_rows_up_in_the_table_of_the_device():
    """As a step does it: few of the table's rows, in another order."""
    case = next(case for case in ATTENDS if case.name == "mixed-plain")
    kernel = Kernel()
    ops = fa3_ops(kernel, torch.float16)
    given = case.prepare(ops, case.draw(torch.float16)).arguments
    wanted = ops.attend(**given)
    inner = given["plan"].inner
    order = torch.randperm(len(inner.table_rows), generator=torch.Generator().manual_seed(3))
    table = torch.full((len(order) + 2, inner.block_table.shape[1]), -7, dtype=torch.int32)
    table[order + 1] = inner.block_table
    on_device = table.clone()
    rows = (order + 1).to(torch.int32).numpy()
    step = StepRows(*inner.host, table.numpy(), rows, on_device)
    plan = given["plan"].refill(step)
    assert torch.equal(ops.attend(**given | {"plan": plan}), wanted)
    kernel.calls.clear()
    for _ in range(2):
        ops.attend(**given | {"plan": plan})
    first, second = (call["page_table"].data_ptr() for call in kernel.calls)
    assert first == second, "the table is put in order once a step"


def package(monkeypatch, function):
    module = types.ModuleType(fa3.PACKAGE)
    module.__spec__ = importlib.util.spec_from_loader(fa3.PACKAGE, None)
    if function is not None:
        setattr(module, fa3.FUNCTION, function)
    monkeypatch.setitem(sys.modules, fa3.PACKAGE, module)


def verdict(facts):
    verdicts = {i.supports(facts) for i in fa3.implementations(facts)}
    assert len(verdicts) == 1
    return verdicts.pop()


def test_serves_models_in_16_bits_on_hopper(monkeypatch):
    package(monkeypatch, flash_attn_with_kvcache)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert verdict(HOPPER) is True
    assert verdict(dataclasses.replace(HOPPER, dtype=torch.float16)) is True
    assert verdict(dataclasses.replace(HOPPER, dtype=torch.float32)) == "has no float32"
    fixed = dataclasses.replace(HOPPER, is_deterministic=True)
    assert "how a prompt is cut" in verdict(fixed)
    assert "not for cpu" in verdict(dataclasses.replace(HOPPER, device=torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert verdict(HOPPER) == "is for compute capability 9.0, not 8.6"


def of_another_generation(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal):
    raise AssertionError("is not called")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (None, "has no flash_attn_with_kvcache"),
        (of_another_generation, "takes no page_table, cu_seqlens_q, max_seqlen_q, softcap"),
    ],
    ids=["nothing", "flash_attn 2"],
)
def test_another_package_of_that_name_is_refused(monkeypatch, function, reason):
    package(monkeypatch, function)
    assert reason in verdict(HOPPER)


def test_a_package_that_cannot_be_imported_is_refused(monkeypatch, tmp_path):
    (tmp_path / f"{fa3.PACKAGE}.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported (OSError: undefined symbol" in verdict(HOPPER)


TORCH_ONLY = {"channel_delta", "gated_linear", "row_peaks", "scale_queries", "xielu"}
"""Elementwise or nearly so, or of rare mixers: no provider has a kernel for them."""


def test_without_the_package_triton_serves_and_the_report_says_why():
    ops = bind(
        HOPPER,
        [
            *fa3.implementations(HOPPER),
            *(
                dataclasses.replace(i, supports=lambda _: True)
                for i in fa3.triton.implementations(HOPPER)
            ),
        ],
        ["fa3", "triton"],
    )
    for op, provider, why in ops.report():
        if op in TORCH_ONLY or CATALOG[op].only_for:
            continue
        assert provider == "triton", op
        about_fa3 = "fa3: allocate_kv: the package flash_attn_interface"
        assert why.startswith(about_fa3) if op in KV_OPS else why == ""


def test_it_does_not_claim_to_be_invariant():
    claims = {i.op: i.batch_invariant for i in fa3.implementations(HOPPER)}
    assert set(claims) == set(KV_OPS)
    assert not claims["attend"] and not claims["plan_attention"]


def test_a_plan_for_another_window_is_noticed():
    case = next(case for case in ATTENDS if case.name == "mixed-plain")
    ops = fa3_ops(Kernel(), torch.bfloat16)
    given = case.prepare(ops, case.draw(torch.bfloat16)).arguments
    with pytest.raises(AssertionError, match="another window"):
        ops.attend(**given | {"args": AttentionArgs(scale=0.6, window=900)})
