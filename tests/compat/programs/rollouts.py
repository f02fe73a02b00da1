"""What a worker of a reinforcement learner asks of its engine between two updates: several draws of
each prompt with their log-probabilities, a pause in the middle, sleep, and the same draws again.

The engine's core is in another process, where a logits processor of this file runs. Prints what it
found as JSON.
"""

import asyncio
import json
import os

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
)

PROMPTS = ["def add(a, b):", "class Stack:", "import os"]
BANNED = 203


class NoLineBreaks(LogitsProcessor):
    """Rows of requests that ask for it never draw a line break."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        asked = (params.extra_args or {}).get("one_line", False)
        if not isinstance(asked, bool):
            raise ValueError(f"one_line={asked!r}: it must be a bool")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: set[int] = set()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.discard(row)
        for row, params, _, _ in batch_update.added:
            self.rows.discard(row)
            if (params.extra_args or {}).get("one_line"):
                self.rows.add(row)
        for source, target, _ in batch_update.moved:
            self.rows = {target if row == source else row for row in self.rows}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[sorted(self.rows), BANNED] = -float("inf")
        return logits


class Unused(AdapterLogitsProcessor):
    """That it can be made is all."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return None


async def draws(engine: AsyncLLM, prompt: str, name: str) -> list[tuple]:
    params = SamplingParams(
        n=2, temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY, extra_args={"one_line": True},
    )  # fmt: skip
    async for output in engine.generate(prompt, params, name):
        assert output.finished
    return [
        (list(each.token_ids), [next(iter(at.values())).logprob for at in each.logprobs])
        for each in output.outputs
    ]


async def continued(engine: AsyncLLM) -> int:
    """Tokens of a request whose input comes in two pieces."""

    async def pieces():
        yield StreamingInput(prompt="import os")
        yield StreamingInput(prompt="def add(a, b):")

    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    count = 0
    async for output in engine.generate(pieces(), params, "pieces"):
        count += len(output.outputs[0].token_ids)
    return count


async def main() -> None:
    folder = os.environ["MODEL"]
    args = AsyncEngineArgs(
        model=folder, max_model_len=512, logits_processors=["rollouts:NoLineBreaks"],
        enable_sleep_mode=True, distributed_executor_backend="mp", disable_log_stats=True,
    )  # fmt: skip
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    assert config.parallel_config.world_size == 1
    engine = AsyncLLM(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False,
        usage_context=UsageContext.ENGINE_CONTEXT,
    )  # fmt: skip
    try:
        first = await asyncio.gather(*(draws(engine, p, f"a-{p}") for p in PROMPTS))
        running = asyncio.gather(*(draws(engine, p, f"b-{p}") for p in PROMPTS))
        await asyncio.sleep(0)
        await engine.pause_generation(mode="keep")
        was_paused = await engine.is_paused()
        await engine.resume_generation()
        second = await running
        await engine.sleep(level=1)
        await engine.wake_up(tags=["weights"])
        await engine.wake_up()
        await engine.reset_prefix_cache()
        third = await asyncio.gather(*(draws(engine, p, f"c-{p}") for p in PROMPTS))
        num_continued = await continued(engine)
    finally:
        engine.shutdown()
    ids = [token for drawn in first for tokens, _ in drawn for token in tokens]
    found = {
        "was_paused": was_paused,
        "same": first == second == third,
        "continued": num_continued > 6,
        "num_tokens": len(ids),
        "banned": BANNED in ids,
        "logprobs": all(value <= 0 for drawn in first for _, values in drawn for value in values),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
