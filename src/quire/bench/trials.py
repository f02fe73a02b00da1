"""Trials of a batch: when first and last tokens came, between two looks at the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.machine_limits import LimitProbe, MachineLimits, between
from quire.bench.workload_limits import (
    Workload,
    decode_seconds,
    least_seconds,
    operand_of,
    prefill_seconds,
    store_of,
)
from quire.config.plan import EnginePlan
from quire.errors import NotBuiltYet
from quire.models import read_spec
from quire.models.spec import Decoder

if TYPE_CHECKING:
    from quire import LLM, LLMEngine
    from quire.params import SamplingParams


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one run: until every completion had its first token, and until the end; and how
    many tokens came between the two.
    """

    elapsed_s: float
    cpu_s: float
    first_s: float
    num_late_tokens: int


@dataclass(frozen=True, slots=True)
class Bench:
    """The parts that all trials of a benchmark share."""

    plan: EnginePlan
    work: Workload
    probe: LimitProbe
    decoder: Decoder

    @classmethod
    def of(cls, plan: EnginePlan, work: Workload) -> Bench:
        """Measures torch's products, which takes less than a second."""
        if plan.model.is_foreign:
            raise NotBuiltYet(
                "model_impl",
                "transformers",
                "Benchmarks compare with limits that only Quire's own descriptions of models give.",
            )
        probe = LimitProbe(operand_of(plan), plan.parallel.num_threads)
        return cls(plan, work, probe, read_spec(plan.model.hf_config))

    def trials(self, count: int, run: Callable[[], Timing]) -> list[tuple[Timing, MachineLimits]]:
        done = []
        before = self.probe.measure()
        for _ in range(count):
            timing = run()
            after = self.probe.measure()
            done.append((timing, between(before, after)))
            before = after
        return done

    def figures(self, trials: Sequence[tuple[Timing, MachineLimits]]) -> dict[str, Any]:
        """The median share of the machine's limit, its parts, and what the limit is.

        A share is a trial's least time over its time; `limit_seconds` is that of the median trial.
        """
        limits = trials[-1][1]
        read, flops = (
            statistics.median(getattr(limit, name) for _, limit in trials)
            for name in ("read_bytes_per_s", "flops_per_s")
        )
        elapsed = statistics.median(timing.elapsed_s for timing, _ in trials)
        share = self._share(trials, least_seconds, lambda timing: timing.elapsed_s)
        machine = msgspec.to_builtins(limits) | {
            "read_bytes_per_s": read,
            "flops_per_s": flops,
            "torch_flops_per_s": self.probe.torch_flops_per_s,
        }
        return {"share_of_machine_limit": share, "limit_seconds": share * elapsed,
                "machine": machine, **self._parts(trials)}  # fmt: skip

    def _parts(self, trials: Sequence[tuple[Timing, MachineLimits]]) -> dict[str, Any]:
        """Prefill and decode by themselves, where the trials saw the first tokens come."""
        timings = [timing for timing, _ in trials if timing.first_s > 0]
        # run_offline does not see first tokens
        if len(timings) < len(trials):
            return {}
        figures: dict[str, Any] = {
            "prefill_seconds": statistics.median(t.first_s for t in timings),
            "prefill_share_of_machine_limit": self._share(
                trials, prefill_seconds, lambda timing: timing.first_s
            ),
        }
        if all(t.num_late_tokens for t in timings):
            figures |= {
                "decode_tokens_per_second": statistics.median(decode_rate(t) for t in timings),
                "decode_share_of_machine_limit": self._share(
                    trials, decode_seconds, self._decode_time
                ),
            }
        return figures

    def _decode_time(self, timing: Timing) -> float:
        """Seconds for all tokens but the first ones, at the rate of those that came late."""
        work = self.work
        return work.num_requests * (work.output_len - 1) / decode_rate(timing)

    def _share(
        self,
        trials: Sequence[tuple[Timing, MachineLimits]],
        least: Callable[..., float],
        took: Callable[[Timing], float],
    ) -> float:
        store = store_of(self.plan)
        return statistics.median(
            least(self.decoder, self.work, store, limits.read_bytes_per_s, limits.flops_per_s)
            / took(timing)
            for timing, limits in trials
        )


def decode_rate(timing: Timing) -> float:
    """Tokens per second after the first ones."""
    return timing.num_late_tokens / (timing.elapsed_s - timing.first_s)


def run_offline(llm: LLM, prompts: list[Any], params: SamplingParams) -> tuple[Timing, list[Any]]:
    """`LLM.generate` by the clock; it does not tell when first tokens came."""
    start, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed, spent = time.perf_counter() - start, time.process_time() - cpu
    return Timing(elapsed, spent, 0.0, 0), outputs


def run_stepwise(engine: LLMEngine, prompts: list[Any], params: SamplingParams) -> Timing:
    """The engine step by step, `params` with output_kind DELTA; sees when first tokens come."""
    return run_in_turn([engine], [(prompt, params) for prompt in prompts])[0]


def run_in_turn(
    engines: Sequence[LLMEngine], requests: Sequence[tuple[Any, SamplingParams]]
) -> list[Timing]:
    """Run the same requests on several engines, a step of each in turn, so that what slows the
    machine down slows all of them; each one's time is that of its own steps.
    """
    runs = [_Stepwise(engine, requests) for engine in engines]
    unfinished = runs
    while unfinished:
        unfinished = [run for run in unfinished if run.step()]
    return [run.timing for run in runs]


class _Stepwise:
    """One engine's requests, and what its steps have taken so far."""

    def __init__(self, engine: LLMEngine, requests: Sequence[tuple[Any, SamplingParams]]) -> None:
        self._engine = engine
        self._waiting = sum(params.n for _, params in requests)
        self._seen: set[tuple[str, int]] = set()
        start, cpu = time.perf_counter(), time.process_time()
        for number, (prompt, params) in enumerate(requests):
            engine.add_request(str(number), prompt, params)
        self.timing = Timing(time.perf_counter() - start, time.process_time() - cpu, 0.0, 0)

    def step(self) -> bool:
        """Return False when there is nothing left to do."""
        if not self._engine.has_unfinished_requests():
            return False
        start, cpu = time.perf_counter(), time.process_time()
        outputs = self._engine.step()
        before, late = self.timing, self.timing.num_late_tokens
        elapsed = before.elapsed_s + time.perf_counter() - start
        for output in outputs:
            for completion in output.outputs:
                # in a step that gives the last first token, all tokens are still of the prefill
                late += len(completion.token_ids) if before.first_s else 0
                if completion.token_ids:
                    self._seen.add((output.request_id, completion.index))
        has_all = not before.first_s and len(self._seen) == self._waiting
        self.timing = Timing(
            elapsed,
            before.cpu_s + time.process_time() - cpu,
            elapsed if has_all else before.first_s,
            late,
        )
        return True
