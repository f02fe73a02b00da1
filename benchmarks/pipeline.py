"""How full is a pipeline? Stages whose layers sleep instead of computing, so that a busy machine
measures the same as a quiet one: what is left over is what stages wait for each other.

    python -m benchmarks.pipeline [--stages 1,2,4]

The whole model sleeps `--fixed-ms` for a step and `--token-us` for each of its tokens, and a stage
its share of that. Ranks, links, scheduler and core are those of any engine. Prints for each crowd
tokens in a second, and how much of the time the busiest stage and the idlest one have slept; what
the busiest lacks is the bubble.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.report import add_output_flag, conclude
from quire.executor.worker import Worker
from quire.step.plan import StepPlan
from quire.testing.checkpoints import make_checkpoint

LAYERS = 4
CROWDS: dict[str, tuple[int, int, int]] = {
    "decode 1": (1, 4, 33),
    "decode 2": (2, 4, 33),
    "decode 4": (4, 4, 33),
    "decode 8": (8, 4, 33),
    "decode 16": (16, 4, 33),
    "prompt 1": (1, 1000, 1),
    "prompts 8": (8, 512, 1),
    "both 8": (8, 128, 17),
}
"""Requests, tokens of each prompt, and of each answer."""


class SleepingWorker(Worker):
    """A worker whose steps take as long as those of a larger model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slept_s = self.fixed_s = self.token_s = 0.0
        launch = self._launch

        def sleeping(plan: StepPlan, *given: Any, **named: Any) -> Any:
            step = launch(plan, *given, **named)
            if plan.num_tokens:
                began = time.monotonic()
                time.sleep(self.fixed_s + self.token_s * plan.num_tokens)
                self.slept_s += time.monotonic() - began
            return step

        self.launch = self._launch = sleeping

    def sleep_for(self, fixed_s: float, token_s: float) -> None:
        """Sleep so long in each step from now on, and for each token: a whole model's times."""
        spec: Any = self.get_model().spec
        share = len(spec.blocks) / LAYERS
        self.slept_s, self.fixed_s, self.token_s = 0.0, fixed_s * share, token_s * share

    def time_slept(self) -> float:
        """Seconds since `sleep_for`."""
        return self.slept_s


def measure(llm: LLM, crowd: tuple[int, int, int], fixed_s: float, token_s: float) -> Any:
    """Tokens in a second, and the shares of the time that stages have slept, of one crowd."""
    count, prompt, answer = crowd
    llm.collective_rpc("sleep_for", args=(fixed_s, token_s))
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [(7 * place + 31 * number) % 900 + 5 for place in range(prompt)]}
        for number in range(count)
    ]
    llm.reset_prefix_cache()
    began = time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - began
    busy = [slept / seconds for slept in llm.collective_rpc("time_slept")]
    return count * (answer if answer > 1 else prompt) / seconds, max(busy), min(busy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="1,2,4", help="numbers of stages")
    parser.add_argument("--fixed-ms", type=float, default=20.0)
    parser.add_argument("--token-us", type=float, default=1000.0)
    parser.add_argument("--only", default="", help="crowds whose name has this word")
    add_output_flag(parser)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        shape = {"num_hidden_layers": LAYERS}
        folder = make_checkpoint(Path(root), shape, "qwen3", dtype="float32")
        for stages in map(int, args.stages.split(",")):
            with LLM(
                str(folder), skip_tokenizer_init=True, pipeline_parallel_size=stages,
                worker_cls="benchmarks.pipeline.SleepingWorker", max_num_batched_tokens=256,
                max_model_len=1024, num_gpu_blocks_override=800, max_num_seqs=32, device="cpu",
                dtype="float32", cpu_threads=stages,
            ) as llm:  # fmt: skip
                for name, crowd in CROWDS.items():
                    if args.only not in name:
                        continue
                    speed, most, least = measure(
                        llm, crowd, args.fixed_ms / 1e3, args.token_us / 1e6
                    )
                    busy = f"stages busy {least:.2f} to {most:.2f}"
                    found[f"pp {stages}, {name}"] = f"{speed:.0f} tokens/s, {busy}"
    return conclude(found, [], args.output_json)


if __name__ == "__main__":
    sys.exit(main())
