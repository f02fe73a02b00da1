"""Whole engines on the device: answers beside those of the CPU, bits beside themselves, deaths."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu.told import Line

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "num_hidden_layers": 3, "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
FAMILY_OF = {"features": "gemma2", "eager": "mistral", "int4": "qwen3_moe", "memory": "gemma2"}
DRAFTS = ("draft_model", "ngram", "eagle3")

BITS_SHAPE = {
    "num_hidden_layers": 4, "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""Heads as large models have them, so that their tiles are those of large models."""


def smoke() -> Iterator[Line]:
    """The embedded model, which was trained: its texts are those of the CPU."""
    from quire import LLM, SamplingParams

    prompts = ["def fibonacci(n):", "import os\n", "class Stack:\n    def __init__(self"]
    greedy = SamplingParams(temperature=0.0, max_tokens=48)

    def texts(device: str, **settings: Any) -> list[str]:
        with LLM(device=device, max_model_len=512, max_num_seqs=8, **settings) as llm:
            return [o.outputs[0].text for o in llm.generate(prompts, greedy, use_tqdm=False)]

    start = time.perf_counter()
    exact = texts("cuda", dtype="float32")
    yield Line("smoke: embedded model in float32, first use", time.perf_counter() - start, "s")
    wrong = [
        text
        for text, right in zip(exact, texts("cpu", dtype="float32"), strict=True)
        if text != right
    ]
    note = "; ".join(repr(text) for text in wrong)
    yield Line("smoke: texts that differ from the CPU's", len(wrong), "", 0, False, note)
    start = time.perf_counter()
    rounded = texts("cuda")
    yield Line("smoke: in bfloat16", time.perf_counter() - start, "s", note=repr(rounded[0][:60]))


REAL = {"QUIRE_TEST_REAL_GPU": "1"}


def life(name: str, variables: dict[str, str] | None = None) -> Iterator[Line]:
    """A life of tests/gpu on this device: answers, waits of the host, and late compilations."""
    with tempfile.TemporaryDirectory() as folder:
        script, *arguments = _script(name, Path(folder))
        environment = os.environ | (REAL if variables is None else variables)
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/gpu" / script), *arguments],
            capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
        )  # fmt: skip
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        yield Line(f"life {name}", None, note=" ".join(last)[:300])
        return
    found = json.loads(done.stdout.splitlines()[-1])
    if "stages" in found:
        yield from _memory(name, found)
        return
    off = list(_differences(found["found"], found["right"]))
    yield Line(f"life {name}: answers that differ", len(off), "", 0, False, "; ".join(off[:5]))
    waits = found["waits"]
    note = ", ".join(f"{where} x {count}" for where, count in waits.items())
    yield Line(f"life {name}: waits of the host", sum(waits.values()), "", 0, False, note)
    compiled = found["compiled"]
    yield Line(
        f"life {name}: compiled after the start", len(compiled), "", 0, False, ", ".join(compiled)
    )
    if "accepted" in found:
        yield Line(f"life {name}: drafts accepted", found["accepted"], f"of {found['drafted']}")
    elif "replays" in found:
        yield Line(f"life {name}: replays of graphs", found["replays"])


def _script(name: str, folder: Path) -> Iterator[str]:
    """The script under tests/gpu and its arguments, whose checkpoints are written to `folder`."""
    from quire.testing import make_checkpoint

    if name in DRAFTS:
        yield from _drafts(name, folder)
        return
    yield "gpu_lives.py"
    if name == "awq":
        from tests.quantization.coded_checkpoints import FORMATS, write

        write(make_checkpoint(folder / "plain", TINY, "qwen2", dtype="float32"), folder / "awq",
              FORMATS["awq"])  # fmt: skip
        yield from ("codes", str(folder / "awq"))
        return
    yield name
    if name == "vectors":
        from tests.models.hostile.encoders import ENCODERS, make_encoder

        yield str(make_encoder(ENCODERS["ModernBertModel"], folder).folder)
        return
    family = FAMILY_OF.get(name, "qwen2")
    yield str(make_checkpoint(folder, TINY, family, dtype="float32"))


def _drafts(method: str, folder: Path) -> Iterator[str]:
    from quire.testing import make_checkpoint
    from tests.runner.drafting.draft_checkpoints import write_eagle3

    target = make_checkpoint(folder / "target", TINY, "qwen2", dtype="float32")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    config["num_speculative_tokens_per_batch_size"] = [[1, 9, 2]]
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    else:
        make = {
            "draft_model": lambda _, target: target,
            "eagle3": partial(write_eagle3, layers=[0, 1, 2], vocab=150),
        }
        config["model"] = str(make[method](folder / "draft", target))
    yield from ("draft_lives.py", str(target), json.dumps(config))


def _differences(found: Any, right: Any, where: str = "") -> Iterator[str]:
    """Places where two answers differ by more than rounding."""
    if isinstance(right, list) and isinstance(found, list) and len(found) == len(right):
        for i, (one, other) in enumerate(zip(found, right, strict=True)):
            yield from _differences(one, other, f"{where}.{i}")
    elif isinstance(right, float) and isinstance(found, float):
        if abs(found - right) > 2e-3:
            yield f"{where}: {found} {right}"
    elif found != right:
        yield f"{where}: {found} {right}"


def _memory(name: str, found: dict[str, Any]) -> Iterator[Line]:
    stages, kv = found["stages"], found["kv"]
    share = stages["awake"] / found["total"]
    yield Line(f"life {name}: share of memory in use, 0.5 asked", share, note=f"{stages}")
    off = list(_differences(found["rounds"][1:], [found["rounds"][0]] * 2))
    yield Line(f"life {name}: answers after sleep that differ", len(off), "", 0, False)
    for level in (1, 2):
        back = stages["awake"] - stages[f"asleep {level}"]
        yield Line(f"life {name}: given back at level {level}", back / kv, "of the K/V", 1.0)


def bits() -> Iterator[Line]:
    """Under `deterministic`, ids and log-probabilities alone, in a crowd, in chunks, after
    preemption and with prefix hits are the same bits; and how many differ without it.
    """
    with tempfile.TemporaryDirectory() as folder:
        from quire.testing import make_checkpoint

        path = str(make_checkpoint(folder, BITS_SHAPE, "qwen3", dtype="bfloat16"))
        for is_fixed in (True, False):
            yield from _bits(path, is_fixed)


def _bits(path: str, is_fixed: bool) -> Iterator[Line]:
    rng = random.Random(1)
    prefix = [rng.randrange(10, 4000) for _ in range(200)]
    prompts = [
        (prefix if n % 3 == 0 else []) + [rng.randrange(10, 4000) for _ in range(n)]
        for n in (1, 3, 17, 40, 66, 130, 257, 300, 511, 700, 33, 90)
    ]
    base = {"max_num_seqs": 16, "deterministic": is_fixed, "max_model_len": 1024}
    engines = {
        "in a crowd": {},
        "in chunks of 64": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
        "with 80 blocks": {"num_gpu_blocks_override": 80, "block_size": 16},
        "without graphs": {"enforce_eager": True},
    }
    with _engine(path, base) as llm:
        alone = [_answers(llm, [prompt])[0] for prompt in prompts]
        again = [_answers(llm, [prompt])[0] for prompt in prompts]
    label = "bits" if is_fixed else "bits without deterministic"
    target = 0 if is_fixed else None
    yield _compared(f"{label}: prefix hits", again, alone, prompts, target)
    for name, settings in engines.items():
        with _engine(path, base | settings) as llm:
            found = _answers(llm, prompts)
        yield _compared(f"{label}: {name}", found, alone, prompts, target)


def _engine(path: str, settings: dict[str, Any]) -> Any:
    from quire import LLM

    defaults = {"device": "cuda", "num_gpu_blocks_override": 2000, "skip_tokenizer_init": True}
    return LLM(path, **defaults | settings)


def _answers(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from quire import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(
        temperature=0.9, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True, logprobs=2
    )
    found = []
    for params in (greedy, drawn):
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        for output in llm.generate(given, params, use_tqdm=False):
            one = output.outputs[0]
            columns = [[(i, v.logprob) for i, v in sorted(c.items())] for c in one.logprobs]
            found.append((list(one.token_ids), columns))
    return [list(pair) for pair in zip(found[: len(prompts)], found[len(prompts) :], strict=True)]


def _compared(
    label: str, found: list[Any], right: list[Any], prompts: list[list[int]], target: int | None
) -> Line:
    """How many prompts have other bits, and where: the first token whose id or, else, whose
    log-probabilities differ.
    """
    wrong = []
    for prompt, one, other in zip(prompts, found, right, strict=True):
        for kind, (ids, columns), (ids2, columns2) in zip(
            ("greedy", "drawn"), one, other, strict=True
        ):
            places = [i for i, (a, b) in enumerate(zip(columns, columns2, strict=False)) if a != b]
            if ids != ids2 or places:
                what = "ids" if ids != ids2 else "log-probabilities"
                wrong.append(f"{kind}, prompt of {len(prompt)}: {what} from token {places[:1]}")
    count = len({text.split(":")[0].split(",")[1] for text in wrong})
    return Line(f"{label}, differ", count, "", target, False, "; ".join(wrong))


def death() -> Iterator[Line]:
    """Streams beside a request that breaks the GPU, and beside a killed core: all others right."""
    from tests.support import kill_table

    kill_table.SETTINGS |= {"device": "cuda", "deterministic": True}
    kinds = {
        "a killed core": lambda: kill_table.signal_cores(kill_table.signal.SIGKILL, 1),
        "a request that breaks the GPU": lambda: kill_table.poison(1, harm="fault_at"),
    }
    for name, run in kinds.items():
        row = asyncio.run(run())
        wrong = row.num_wrong + row.num_failed
        times = ", ".join(f"{seconds:.1f} s" for seconds in row.resumed_s)
        note = f"{row.num_right} right, {row.num_restarts} restarts, {times}, left: {row.leaks}"
        yield Line(f"death: {name}, streams wrong or lost", wrong, "", 0, False, note)
