"""Whether the kernels conform on the device, in bfloat16 too, and the engine says what transformers
says.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.told import Line
from quire.models.families import family_names
from quire.ops import Facts, Ops, WeightFormat, bind, select
from quire.ops.cases import CASES, FP8_CASES, Case, Draw
from quire.testing import op_oracle
from quire.testing.op_conformance import check, relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = (WeightFormat("fp8"), WeightFormat("int8"), WeightFormat("int4", 64))
_NEW_TOKENS = 16
_PROMPTS = ([1, 5, 9, 200, 31, 7], [3, 3, 3, 90, 4, 17, 250, 6, 11], [42] * 33)


def conformance(until: float) -> Iterator[Line]:
    """All cases of all ops, each with kernels that may and that may not depend on the batch; stops
    at `until` (time.monotonic) and says how far it came.
    """
    for dtype in DTYPES:
        for deterministic in (True, False):
            ops = select(device="cuda", dtype=dtype, deterministic=deterministic)
            kind = "fixed" if deterministic else "fast"
            yield _conformance(ops, dtype, kind, until)
            yield _rounded_products(ops, dtype, kind)


def _conformance(ops: Ops, dtype: torch.dtype, kind: str, until: float) -> Line:
    cases = [case for case in CASES + FP8_CASES if not case.is_bench]
    failures: list[str] = []
    done = 0
    for case in cases:
        if time.monotonic() > until:
            break
        done += 1
        failure = failure_of(case, dtype, ops)
        if failure:
            failures.append(f"{case.op}/{case.name}: {failure}")
    name = f"conformance {str(dtype).removeprefix('torch.')} {kind}: failing cases"
    note = "; ".join([f"{done} of {len(cases)} run", *failures])
    return Line(name, len(failures), "", 0, is_least=False, note=note)


def failure_of(case: Case, dtype: torch.dtype, ops: Ops, device: str = "cuda") -> str | None:
    """What is wrong with the case, or None."""
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    oracle = bind(Facts(torch.device("cpu"), dtype), op_oracle.IMPLEMENTATIONS, ["oracle"])
    try:
        check(case, dtype, ops, plain, oracle, device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _rounded_products(ops: Ops, dtype: torch.dtype, kind: str) -> Line:
    wrong = [
        f"{form.name} {rows} x {width} x {out}: error {error:.3g}"
        for form in FORMATS
        for rows, width, out in ((1, 64, 48), (5, 96, 32), (66, 33, 5), (3, 70, 40))
        if (error := product_error(ops, dtype, form, rows, width, out)) > 4 * torch.finfo(dtype).eps
    ]
    name = f"rounded products {str(dtype).removeprefix('torch.')} {kind}: that differ"
    return Line(name, len(wrong), "", 0, is_least=False, note="; ".join(wrong))


def product_error(
    ops: Ops,
    dtype: torch.dtype,
    form: WeightFormat,
    rows: int,
    width: int,
    out: int,
    device: str = "cuda",
) -> float:
    """Largest difference of a product with a rounded weight from plain torch's on the CPU, over the
    largest result. Widths that are and that are not multiples of 16 take different ways.
    """
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    found = []
    for using, where in ((ops, device), (plain, "cpu")):
        draw = Draw(0, dtype, where)
        w = using.pack_linear(draw.normal(out, width, scale=width**-0.5), draw.normal(out), form)
        found.append(using.linear(draw.normal(rows, width), w).cpu())
    return relative_error(*found)


def parity(until: float) -> Iterator[Line]:
    """Greedy tokens of a tiny model of each family, float32, against transformers."""
    if importlib.util.find_spec("transformers") is None:
        yield Line("parity with transformers", None, note="transformers is not installed")
        return
    wrong, done, names = [], 0, family_names()
    for family in names:
        if time.monotonic() > until:
            break
        done += 1
        try:
            is_equal = _says_the_same(family)
        except Exception as error:
            wrong.append(f"{family}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        wrong += [] if is_equal else [f"{family}: other tokens"]
    note = "; ".join([f"{done} of {len(names)} run", *wrong])
    yield Line("parity, float32: families that differ", len(wrong), "", 0, False, note)


def _says_the_same(family: str) -> bool:
    from quire.testing import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), "tiny", family, dtype="float32")
        return _ours(path) == _theirs(path)


def _ours(path: Path) -> list[list[int]]:
    from quire import LLM, SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in _PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    with LLM(str(path), device="cuda", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    gc.collect()
    return [list(output.outputs[0].token_ids) for output in outputs]


def _theirs(path: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to("cuda").eval()
    answers = []
    for prompt in _PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=_NEW_TOKENS,
            min_new_tokens=_NEW_TOKENS,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
