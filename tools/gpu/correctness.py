"""Whether the kernels conform on the device, in bfloat16 too, and the engine says what transformers
says.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.parts import CASES_AT_ONCE
from gpu.told import Line
from quire.ops import Ops, WeightFormat, select
from quire.testing.model_shapes import FAMILIES
from tests.kernels.triton.triton_cases import CHUNKED, CODED, CODED_ROUNDED, ROUNDED, WIDE
from tests.support.op_cases import CASES, FP8_CASES, Case, Draw
from tests.support.op_conformance import check, relative_error, results_of

ALL_CASES = (*CASES, *FP8_CASES, *ROUNDED, *CHUNKED, *WIDE, *CODED, *CODED_ROUNDED)
FORMATS = (WeightFormat("fp8"), WeightFormat("int8"), WeightFormat("int4", 64))
_NEW_TOKENS = 16
_ROUNDING = 2.0**-9
"""Log-probabilities that near are the same, however near those of transformers are. On a CPU the
families are off by 0.004 to 0.015, allowed 0.01 to 0.04, and by ten times as much where scores are
scaled wrongly by a third, except in the Gemmas and granite, whose heads are normalised or capped.
"""

_PROMPTS = ([1, 5, 9, 200, 31, 7], [3, 3, 3, 90, 4, 17, 250, 6, 11], [42] * 33)


def conformance(dtype_name: str, kind: str, share: int, until: float) -> Iterator[Line]:
    """Cases of all ops, with kernels that may ("fast") or may not ("fixed") depend on the batch:
    every second one, from `share` on, or all where one process has the type. Stops at `until`
    (time.monotonic) and says how far it came.
    """
    dtype = getattr(torch, dtype_name)
    step = CASES_AT_ONCE if dtype is torch.bfloat16 else 1
    ops = select(device="cuda", dtype=dtype, deterministic=kind == "fixed")
    yield _conformance(ops, dtype, f"{kind} {share}", until, share, step)
    if share == 0:
        yield _rounded_products(ops, dtype, kind)


def _conformance(ops: Ops, dtype: torch.dtype, kind: str, until: float, *part: int) -> Line:
    share, step = part
    cases = [case for case in ALL_CASES if not case.is_bench]
    random.Random(0).shuffle(cases)  # one that is cut short has been everywhere
    cases = cases[share::step]
    plain = select(device="cpu", dtype=dtype, providers=["torch"])
    failures: list[str] = []
    done = 0
    for case in cases:
        if time.monotonic() > until:
            break
        done += 1
        failure = failure_of(case, dtype, ops, plain)
        if failure:
            failures.append(f"{case.op}/{case.name}: {failure}")
            print(failures[-1], file=sys.stderr)
            if "CUDA error" in failure:  # nothing runs in this process any more
                break
    name = f"conformance {str(dtype).removeprefix('torch.')} {kind}: failing cases"
    note = "; ".join([f"{done} of {len(cases)} run", *failures])
    return Line(name, len(failures), "", 0, is_least=False, note=note)


def failure_of(
    case: Case, dtype: torch.dtype, ops: Ops, plain: Ops, device: str = "cuda"
) -> str | None:
    """What is wrong with the case, or None. `plain`: torch's definitions on the CPU, which say what
    weights in codes mean.
    """
    try:
        if case in ROUNDED + CODED_ROUNDED:
            _check_against(plain, case, dtype, ops, device)
        else:
            check(case, dtype, ops, device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _check_against(plain: Ops, case: Case, dtype: torch.dtype, ops: Ops, device: str) -> None:
    found = results_of(case, dtype, ops, device)
    wanted = results_of(case, dtype, plain)
    error = relative_error(found["0"], wanted["0"])
    assert error <= 8 * torch.finfo(dtype).eps, f"error {error:.3g}"


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


def parity(share: int, step: int, until: float) -> Iterator[Line]:
    """A tiny model of each family, every `step`-th from `share` on, against transformers: the same
    greedy tokens in float32, and log-probabilities as near in bfloat16 as transformers' own.
    """
    if importlib.util.find_spec("transformers") is None:
        yield Line("parity with transformers", None, note="transformers is not installed")
        return
    kinds: dict[str, Callable[[str], str | None]] = {"float32": other_tokens, "bfloat16": drift}
    names = FAMILIES[share::step]
    wrong: dict[str, list[str]] = {kind: [] for kind in kinds}
    done = 0
    for family in names:
        if time.monotonic() > until:
            break
        done += 1
        for kind, failure_in in kinds.items():
            failure = _attempt(failure_in, family)
            wrong[kind] += [f"{family}: {failure}"] if failure else []
    for kind, found in wrong.items():
        note = "; ".join([f"{done} of {', '.join(names)} run", *found])
        yield Line(f"parity {share}, {kind}: differ", len(found), "", 0, False, note)


def _attempt(failure_in: Callable[[str], str | None], family: str) -> str | None:
    try:
        return failure_in(family)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def other_tokens(family: str, device: str = "cuda") -> str | None:
    """What is wrong with the family in float32: it must say what transformers says."""
    with _checkpoint(family, "float32") as path:
        answers = _ours(path, "float32", device)
        is_equal = [answer.token_ids for answer in answers] == _theirs(path, device)
        return None if is_equal else "other tokens"


def drift(family: str, device: str = "cuda") -> str | None:
    """What is wrong with the family in bfloat16: of the tokens that the engine chose, its
    log-probabilities may be twice as far from float32's as those of transformers in bfloat16, on
    the average, and the tokens themselves as far from the likeliest.
    """
    with _checkpoint(family, "bfloat16") as path:
        answers = _ours(path, "bfloat16", device)
        truth, theirs = (
            torch.cat([_chances(model, answer) for answer in answers])
            for model in (_model(path, dtype, device) for dtype in ("float32", "bfloat16"))
        )
    chosen = torch.tensor([i for answer in answers for i in answer.token_ids])[:, None]
    ours = torch.tensor([x for answer in answers for x in answer.chances])[:, None]
    right = truth.gather(1, chosen)
    allowed = 2 * (theirs.gather(1, chosen) - right).abs().mean() + _ROUNDING
    distance = (ours - right).abs().mean()
    regret = (truth.amax(1, keepdim=True) - right).mean()
    if distance <= allowed and regret <= allowed:
        return None
    return f"off by {distance:.3g}, {regret:.3g} from the likeliest, {allowed:.3g} allowed"


@dataclass(frozen=True)
class Answer:
    """A prompt, the tokens that the engine chose, and their log-probabilities."""

    prompt: list[int]
    token_ids: list[int]
    chances: list[float]


@contextmanager
def _checkpoint(family: str, dtype: str) -> Iterator[Path]:
    from quire.testing import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        yield make_checkpoint(Path(folder), "tiny", family, dtype=dtype)


def _ours(path: Path, dtype: str, device: str) -> list[Answer]:
    from quire import LLM, SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in _PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=0)
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 128, "max_num_seqs": 4}
    settings |= {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 64}
    with LLM(str(path), device=device, **settings) as llm:
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    gc.collect()
    return [
        Answer(
            prompt, ids, [chances[i].logprob for i, chances in zip(ids, out.logprobs, strict=True)]
        )
        for prompt, out in zip(_PROMPTS, outputs, strict=True)
        for ids in [list(out.token_ids)]
    ]


def _model(path: Path, dtype: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()


@torch.no_grad()
def _chances(model: Any, answer: Answer) -> torch.Tensor:
    """Log-probabilities [n, V] of all tokens where the answer's stand, given those before."""
    ids = torch.tensor([answer.prompt + answer.token_ids], device=model.device)
    logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits[len(answer.prompt) - 1 : -1].float().log_softmax(-1).cpu()


def _theirs(path: Path, device: str) -> list[list[int]]:
    model = _model(path, "float32", device)
    answers = []
    for prompt in _PROMPTS:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=_NEW_TOKENS,
            min_new_tokens=_NEW_TOKENS,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
