"""The Triton kernels on the cases of the ops, in Triton's interpreter.

The interpreter cuts bfloat16 off instead of rounding it, and multiplies its bits as whole numbers,
so there is no bfloat16 here: that is for a GPU to show (tools/gpu_report.py). It is slow, too: a
program takes a millisecond. `--full` runs what is left out by default. Every launch is
watched (triton_memory), which takes a seventh more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.triton_cases import CHUNKED, CODED, CODED_ROUNDED, ROUNDED, WIDE
from tests.support.needs import needs_triton
from tests.support.op_cases import CASES, FP8_CASES

pytestmark = needs_triton

KINDS = ("float32 fixed", "float16 fast")
FLOAT32 = {
    "mask_logits", "bias_logits", "penalize", "forbid_words", "greedy", "draw", "truncate", "rank",
}  # fmt: skip
"""Ops on logits, which are float32 in a model of any type."""

WITHOUT_KERNEL = {
    *("row_peaks", "scale_queries", "xielu", "multiply", "modulate", "sparse_gated"),
    *("bounded_gated", "scale_heads", "mix_axes"),
    *(
        "join_streams",
        "enter_streams",
        "predict_streams",
        "correct_streams",
        "add_to_streams",
        "add_matched",
        "attend_relative",
        "channel_delta",
        "gated_linear",
        "index_select",
        "indexed_attend",
        "block_select",
        "block_attend",
        "recent_store",
        "entry_select",
        "recent_attend",
        "collapse_streams",
        "expand_streams",
        "route_softplus",
        "clamped_gated",
    ),
}
"""Ops that torch serves beside Triton's kernels."""

SLOW = {
    *("attend", "attend_prompts", "latent_attend", "moe", "draw", "truncate", "rank"),
    *("short_conv", "mamba_scan", "mamba2_scan", "gated_delta", "gated_norm"),
}
CHOSEN = {
    "attend/mixed-plain", "attend/mixed-all", "attend/mixed-mha-odd", "attend/decode-window1",
    "attend/one_chunk-alibi",
    "attend/row_without_new_tokens", "attend/int8-mixed-window", "attend/fp8-mixed-window",
    "attend/fp8-mixed-mqa",
    "attend_prompts/empty_row", "attend_prompts/ragged-odd-2", "attend_prompts/ragged-16",
    "latent_attend/no_tokens", "latent_attend/one_chunk", "latent_attend/row_without_new_tokens",
    "latent_attend/mixed-odd", "latent_attend/parts", "latent_attend/by_token",
    "moe/silu-1", "moe/clamp-bias", "moe/clamp-nan", "moe/weighs_input", "moe/not_gated-relu2",
    "moe/int4_g32",
    "short_conv/1,1,1-17x4-bias-silu", "mamba_scan/1,1,1-19x5-gate",
    "mamba2_scan/3,1-2x10x6-1groups", "gated_delta/3,1-2of1-10x6",
    "gated_norm/4x24of24-gate_first-weight24", "gated_norm/5x51of17-norm_first-weight17",
    "draw/wide-normal",
    "draw/0x16-coarse", "draw/1x67-coarse", "draw/3x64-coarse", "draw/12x200-equal",
    "truncate/12x200-masked", "rank/0x16-top5-coarse", "rank/3x130-top0-coarse",
    "rank/3x130-top3-coarse", "rank/3x130-top130-coarse", "rank/3x200-top60-far",
}  # fmt: skip
CHOSEN_FAST = {
    "attend/decode-all", "attend/one_row-sinks", "attend/int8-decode-softcap",
    "attend/fp8-decode-sinks", "attend/fp8-decode-small", "attend/fp8-ragged-window",
    "attend_prompts/ragged-None",
    "latent_attend/ragged", "latent_attend/mixed", "latent_attend/decode", "latent_attend/one_row",
    "moe/many_experts", "moe/int4_g32-40",
}  # fmt: skip
"""Of the slow ops: each feature in one case."""


WIDENED = (
    *("linear/codes4-g8-float16-5x24x40", "moe/codes-7"),
    *("linear/codes8-g8-float16-floats-5x24x40", "linear/codes4-g8-bfloat16-table-5x24x40"),
)
"""Of weights in codes, which become numbers of the activations' type: exactly so in float32."""


OF_OPS = tuple(
    f"linear/codes{form}"
    for form in (
        *("4-g32-float16-zeros-bias-13x96x33", "8-g32-float16-zeros-bias-13x96x33"),
        *("4-g24-float16-3x24x9", "8-g24-float16-3x24x9", "4-g16-float16-4x37x34"),
        *("4-g16-float16-4x150x34", "8-g16-float16-4x150x34", "4-g128-float16-zeros-2x272x5"),
        *("4-g16-float16-zeros-order-5x64x9", "8-g64-bfloat16-order-5x64x9"),
        *("4-g16-float32-zeros-3x64x40", "8-g64-float32-floats-bias-4x150x34"),
    )
)
CODES = (*OF_OPS, *(f"{case.op}/{case.name}" for case in CODED + CODED_ROUNDED))
"""Products with weights in codes, as they are stored."""


def is_run(kind, case, number):
    """Whether a case is run by default; `number` counts the cases: of eight quick ones, one runs in
    float32, another in float16.
    """
    if case.op in SLOW:
        return f"{case.op}/{case.name}" in (CHOSEN if kind == KINDS[0] else CHOSEN_FAST)
    return case.op in FLOAT32 or (number % 8, kind) in ((0, KINDS[0]), (4, KINDS[1]))


def pytest_generate_tests(metafunc):
    if "case_name" not in metafunc.fixturenames:
        return
    hostile = [
        case for case in CASES + FP8_CASES if not case.is_bench and case.op not in WITHOUT_KERNEL
    ]
    hostile += ROUNDED + CHUNKED + WIDE
    named = {f"{case.op}/{case.name}" for case in hostile}
    assert named.issuperset(CHOSEN | CHOSEN_FAST)
    cases = [
        pytest.param(
            *(kind, name),
            id=f"triton-{name}-{kind.replace(' ', '-')}",
            marks=() if is_run(kind, case, number) else pytest.mark.full,
        )
        for kind in KINDS
        for number, case in enumerate(hostile)
        if kind == KINDS[0] or case.op not in FLOAT32
        for name in [f"{case.op}/{case.name}"]
    ]
    product = "linear/fp8-5x32x48"  # of torch's
    cases.append(pytest.param("bfloat16 fast", product, id=f"triton-{product}-bfloat16-fast"))
    cases += [pytest.param(KINDS[0], name, id=f"triton-{name}-widened") for name in WIDENED]
    cases += [
        pytest.param(
            *(kind, name),
            id=f"triton-{name}-{kind.replace(' ', '-')}-stored",
            marks=() if number % 4 == which else pytest.mark.full,
        )
        for which, kind in enumerate(KINDS)
        for number, name in enumerate(CODES)
    ]
    metafunc.parametrize(("kind", "case_name"), cases)


@pytest.fixture(scope="module")
def worker():
    """A process in which Triton interprets: the choice is made at its first import."""
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("triton_worker.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


def test_conforms(worker, kind, case_name):
    print(kind, case_name, file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    assert answer, "the interpreter's process is gone"
    failure = json.loads(answer)
    assert failure is None, failure
