"""One start in a fresh process: `python -m quire.bench.first_token ENGINE_ARGS` prints the times at
which its parts were done, as JSON.

ENGINE_ARGS is a JSON object of engine arguments. Moments are seconds of the monotonic clock, which
processes share.
"""

from __future__ import annotations

import time

_BEGUN = time.monotonic()  # before anything else is imported

import importlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

STAGES = {
    "weights.load_model": "weights",
    "worker_builder.KVCache": "kv_memory",
    "worker_builder.record_steps": "recording",
}
"""Function that the executor's modules call -> the part of the start that it is. In this process,
which ends soon, the functions are replaced by ones that take the time.
"""

_PROMPT_LEN = 16


def main(engine_args: dict[str, Any]) -> dict[str, Any]:
    """Build the engine, generate one token; the moments and the seconds of a worker's parts."""
    from quire import LLM, EngineArgs, LLMEngine, SamplingParams
    from quire.executor.packed_file import preparation
    from quire.hardware.prepared_memory import prepare
    from quire.start_up import quick_imports

    plan = EngineArgs(**engine_args).create_engine_config()
    planned = time.monotonic()
    prepare(preparation(plan.model, plan.parallel))  # as engines do before these imports
    parts = dict.fromkeys(STAGES.values(), 0.0)
    for name, part in STAGES.items():
        module_name, function = name.split(".")
        with quick_imports():  # nor do engines collect
            module = importlib.import_module(f"quire.executor.{module_name}")
        # in the module that calls it: a function that was imported by name is looked up there
        setattr(module, function, _timed(getattr(module, function), parts, part))
    imported = time.monotonic()
    engine = LLMEngine.from_vllm_config(plan, disable_log_stats=True)
    ready = time.monotonic()
    with LLM.from_engine(engine) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        llm.generate({"prompt_token_ids": [1] * _PROMPT_LEN}, params, use_tqdm=False)
        first = time.monotonic()
    return {
        "moments": {
            "begun": _BEGUN,
            "planned": planned,
            "imported": imported,
            "ready": ready,
            "first_token": first,
        },
        "parts": parts,
    }


def _timed(function: Callable[..., Any], parts: dict[str, float], part: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            parts[part] += time.monotonic() - start

    return call


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
