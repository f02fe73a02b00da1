"""Several ranks compared with one, bit by bit: sizes and kinds of models, with drafts, grammars,
adapters, prefix hits and preemption; and mixers of every kind with hostile values.

    python -m benchmarks.ranks [--only WORD]

Each cell starts the ranks of its model. Exits with 1 if one differs in a bit.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire import SamplingParams, StructuredOutputsParams
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.errors import EngineError
from quire.testing import make_checkpoint
from tests.executor.test_shared_adapters import make_adapter
from tests.executor.worker_cores import Served, plan_of, requests, same_bits, serve
from tests.models.hostile.models import HOSTILE, write

SIZES = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 4": {"tensor_parallel_size": 4},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2 x pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
_FOUR = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128,
    "intermediate_size": 384,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "llama float32": ("llama", _FOUR, {}),
    "llama bfloat16": ("llama", _FOUR, {"dtype": "bfloat16"}),
    "llama int8": ("llama", _FOUR, {"dtype": "bfloat16", "quantization": "int8"}),
    "qwen3 float32": ("qwen3", _FOUR, {}),
    "gemma2 float32": ("gemma2", _FOUR, {}),
    "mixtral float32": (
        "mixtral", _FOUR | {"num_local_experts": 7, "intermediate_size": 96}, {}
    ),
}  # fmt: skip
MIXERS = ("deepseek_v3", "mamba2", "qwen3_next", "falcon_h1", "gpt_oss", "gemma2", "kimi_linear")
"""Latents, recurrent states, both, sinks with experts, windows, and shared experts."""
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
ON_TOP: dict[str, dict[str, Any]] = {
    "": {},
    "drafts": {"speculative_config": _DRAFTS},
    "few blocks": {"num_gpu_blocks_override": 22},
}


def asked() -> list[EngineCoreRequest]:
    """Requests of every kind, twice, so that the second ones find cached prefixes, and repeating
    ones.
    """
    found = [*requests(5), *requests(5), *requests(3, max_tokens=16)]
    for request in found[10:]:
        request.prompt_token_ids = (request.prompt_token_ids[:3] * 8)[:24]
    for handle, request in enumerate(found):
        request.handle = handle
    return found


def of_hostile() -> list[EngineCoreRequest]:
    """Requests for models of a hundred tokens."""
    found = asked()
    for request in found:
        request.prompt_token_ids = [3 + token % 90 for token in request.prompt_token_ids]
    return found


def adapted(root: Path, checkpoint: Path) -> list[EngineCoreRequest]:
    """Requests with one of three adapters or none, in turns."""
    refs: list[AdapterRef | None] = [None]
    for number in (1, 2, 3):
        folder = make_adapter(root / f"adapter-{number}", checkpoint, number)
        refs.append(AdapterRef(f"adapter{number}", number, str(folder)))
    found = asked()
    for request in found:
        request.adapter = refs[request.handle % 4]
    return found


def constrained() -> list[EngineCoreRequest]:
    """Requests with grammars, for the embedded model, which has a vocabulary."""
    kinds = ({"choice": ["yes", "no"]}, {"regex": "[a-f]{3,9}!"}, {"json": {"type": "object"}})
    return [
        EngineCoreRequest(
            handle,
            [60 + handle, 61, 62],
            SamplingParams(
                temperature=0.7,
                max_tokens=12,
                logprobs=2,
                structured_outputs=StructuredOutputsParams(**kind),
            ),
            seed=handle,
            arrival_time=0.0,
        )
        for handle, kind in enumerate(kinds)
    ]


def served(folder: Path | None, given: list[EngineCoreRequest], **wishes: Any) -> Served:
    """What a new engine answers."""
    if folder is None:
        from quire import EngineArgs

        args = EngineArgs(device="cpu", max_model_len=128, num_gpu_blocks_override=60, **wishes)
        core = build_core(args.create_engine_config())
    else:
        core = build_core(plan_of(folder, **wishes))
    try:
        return serve(core, given)
    finally:
        core.shutdown()


def promised(folder: Path, **wishes: Any) -> bool:
    """Whether the plan says that ranks have the bits of one."""
    return bool(plan_of(folder, **wishes).parallel.same_bits_as_one_rank)


def cells(root: Path) -> Iterator[tuple[str, Path | None, list[EngineCoreRequest], dict[str, Any]]]:
    """Name, model, requests and wishes of each cell."""
    for name, (family, shape, wishes) in MODELS.items():
        folder = make_checkpoint(root / name.replace(" ", "-"), shape, family, dtype="float32")
        for top, more in ON_TOP.items():
            if top == "few blocks" and family == "gemma2":  # layers with and without a window
                more = {"num_gpu_blocks_override": 40}
            yield f"{name} {top}".strip(), folder, asked(), wishes | more
        if name == "llama float32":
            wishes = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
            yield f"{name} adapters", folder, adapted(root, folder), wishes
        if name == "mixtral float32":
            wishes = {"enable_expert_parallel": True}
            yield f"{name} experts spread", folder, asked(), wishes
    for name in MIXERS:
        write(HOSTILE[name], root / name)
        yield f"hostile {name}", root / name, of_hostile(), {"num_gpu_blocks_override": 150}
    yield "embedded, grammars", None, constrained(), {}
    yield "embedded, grammars, drafts", None, constrained(), {"speculative_config": _DRAFTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name has this word")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    bad = 0
    with tempfile.TemporaryDirectory() as root:
        for name, folder, given, wishes in cells(Path(root)):
            if not any(args.only in f"{name}, {size}" for size in SIZES):
                continue
            right = served(folder, given, **wishes)
            for size, sizes in SIZES.items():
                if args.only not in f"{name}, {size}":
                    continue
                start = time.perf_counter()
                try:
                    found = served(folder, given, **wishes, **sizes)
                except EngineError as error:
                    print(f"{name}, {size}: refused: {str(error)[:120]}", flush=True)
                    continue
                seconds = time.perf_counter() - start
                has_own = folder is not None and not promised(folder, **wishes, **sizes)
                kind = "its own bits, twice the same" if has_own else "same bits"
                expected = served(folder, given, **wishes, **sizes) if has_own else right
                is_same = same_bits(found, expected)
                bad += not is_same
                print(
                    f"{name}, {size}: {kind if is_same else 'DIFFERENT'}, "
                    f"{found.num_accepted} drafts right, {found.num_preemptions} preemptions, "
                    f"{seconds:.1f} s",
                    flush=True,
                )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
