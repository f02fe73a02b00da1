"""The worth of drafts: tokens per second with and without them on one engine, in turn, by batch
size and temperature; which of them were accepted; and whether the answers are the same.

With --oracle the drafts are those of the run without, each spoiled with a probability, so that the
gain can be compared with what acceptance and the times of steps predict. A network that was asked
for computes its own, which they replace.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.report import add_output_flag, at_least, finish
from quire.bench.workload import (
    add_model_flags,
    as_prompts,
    engine_args_from,
    open_llm,
    random_prompts,
    settings,
)
from quire.cli.bench import run_measurement
from quire.config.plan import EnginePlan
from quire.config.speculation import SpeculationPlan

if TYPE_CHECKING:
    from benchmarks.stand_ins.replay import Watched
    from quire import LLM
    from quire.params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `python -m benchmarks.speculation`."""
    parser.usage = "python -m benchmarks.speculation [flags]"
    parser.add_argument("--batch-size", type=at_least(1), nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--input-len", type=at_least(1), default=32)
    parser.add_argument("--output-len", type=at_least(2), default=128)
    parser.add_argument("--num-iters", type=at_least(1), default=3)
    parser.add_argument(
        "--prompts", type=Path, help="a text whose paragraphs are prompts; default: random tokens"
    )
    parser.add_argument(
        "--oracle",
        type=float,
        nargs="+",
        metavar="ERROR",
        help="replay the answers, each token spoiled with such a probability",
    )
    parser.add_argument("--fixed", action="store_true", help="always draft as much as allowed")
    parser.set_defaults(n=1)
    add_output_flag(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every combination. Without a method, `auto` drafts."""
    engine_args = engine_args_from(args)
    if not engine_args.speculative_config and engine_args.spec_method is None:
        engine_args.spec_method = "auto"
    if engine_args.enable_prefix_caching is None:
        engine_args.enable_prefix_caching = False
    plan = engine_args.create_engine_config()
    results, most = [], _without_draft(plan).num_tokens
    with open_llm(msgspec.structs.replace(plan, speculation=None)) as plain, open_llm(plan) as llm:
        for batch_size in args.batch_size:
            prompts = partial(_prompts, args, llm, batch_size, plan.model.vocab_size)
            for temperature in args.temperature:
                for error in args.oracle or [None]:
                    found = _measure(plain, llm, prompts, temperature, error, args, most)
                    results.append(found)
                    print(_line(found))
    said = settings(plan, args) | {"speculation": msgspec.to_builtins(_without_draft(plan))}
    finish({**said, "results": results}, args.output_json)
    return 0 if all(found["same_answers"] for found in results) else 1


def _measure(
    plain: LLM,
    llm: LLM,
    prompts: Callable[[int], list[Any]],
    temperature: float,
    error: float | None,
    args: argparse.Namespace,
    num_tokens: int,
) -> dict[str, Any]:
    """One batch size, temperature and kind of drafts: run without and with drafts in turn.

    Each trial has prompts and noise of its own, or drafts of earlier outputs were always right;
    but where answers are replayed all have the same.
    """
    from quire.bench.trials import decode_rate, run_in_turn

    requests = _requests(prompts(0), args.output_len, temperature, 0)
    answers = _answers(plain, requests)
    without: list[float] = []
    with_drafts: list[float] = []
    with _drafting(llm, answers, error, num_tokens if args.fixed else None) as watch:
        same = _answers(llm, requests) == answers
        for trial in range(args.num_iters):
            if error is None:
                requests = _requests(prompts(trial + 1), args.output_len, temperature, trial + 1)
            engines = [plain.llm_engine, llm.llm_engine]
            timings = run_in_turn(engines, [(p, _in_pieces(params)) for p, params in requests])
            for rates, timing in zip((without, with_drafts), timings, strict=True):
                rates.append(decode_rate(timing))
    base, rate = statistics.median(without), statistics.median(with_drafts)
    return {
        "batch_size": len(requests),
        "temperature": temperature,
        "error": error,
        "tokens_per_second_without": base,
        "tokens_per_second": rate,
        "speed_up": rate / base,
        "same_answers": same,
        **_acceptance(watch),
    }


def _acceptance(watch: Watched) -> dict[str, Any]:
    """Counts of accepted drafts, the times of steps by how many tokens they computed, and those of
    drafting by the most that were wanted of a row.
    """
    verified = watch.verified
    num_drafts = sum(drafts for drafts, _ in verified)
    num_accepted = sum(accepted for _, accepted in verified)
    longest = max((drafts for drafts, _ in verified), default=0)
    return {
        "mean_acceptance_length": 1 + num_accepted / len(verified) if verified else 1.0,
        "acceptance_rate": num_accepted / num_drafts if num_drafts else 0.0,
        "acceptance_by_position": [
            sum(accepted > place for _, accepted in verified) / len(verified)
            for place in range(longest)
        ],
        "step_seconds": _medians(watch.seconds),
        "drafting_seconds": _medians(watch.drafting),
    }


def _medians(times: Mapping[int, list[float]]) -> dict[int, float]:
    return {size: statistics.median(found) for size, found in sorted(times.items())}


@contextmanager
def _drafting(
    llm: LLM,
    answers: Mapping[tuple[int, ...], Sequence[int]],
    error: float | None,
    num_tokens: int | None,
) -> Iterator[Watched]:
    """Have an engine's drafts watched, replayed where there is an `error`, and always of
    `num_tokens` unless that is None.
    """
    from benchmarks.stand_ins.replay import ReplayDrafter, Watched
    from quire.params import SamplingParams
    from quire.runner.drafting.drafting import Drafting
    from quire.runner.drafting.networks import NetworkDrafter
    from quire.runner.drafting.pace import FixedPace

    [worker] = llm.collective_rpc(_itself)
    head = worker.model_runner.heads.of(SamplingParams())
    own = head.drafting
    drafter = own.drafter
    if error is not None:
        vocab = worker.model_runner.model.spec.vocab
        network = drafter if isinstance(drafter, NetworkDrafter) else None
        drafter = ReplayDrafter(answers, error, vocab, network)
    watch = Watched(own.pace if num_tokens is None else FixedPace(num_tokens))
    head.drafting = Drafting(drafter, watch)
    try:
        yield watch
    finally:
        head.drafting = own


def _itself(worker: Any) -> Any:
    return worker


def _answers(
    llm: LLM, requests: Sequence[tuple[Any, SamplingParams]]
) -> dict[tuple[int, ...], Any]:
    """The outputs by prompt."""
    prompts, params = [prompt for prompt, _ in requests], [params for _, params in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {tuple(o.prompt_token_ids or ()): list(o.outputs[0].token_ids) for o in outputs}


def _requests(
    prompts: list[Any], output_len: int, temperature: float, trial: int
) -> list[tuple[Any, SamplingParams]]:
    """The prompts, each with noise of its own."""
    from quire.params import SamplingParams

    params = SamplingParams(
        temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    first = _fresh(len(prompts), trial) << 10
    return [
        (prompt, msgspec.structs.replace(params, seed=first + number))
        for number, prompt in enumerate(prompts)
    ]


def _fresh(batch_size: int, trial: int) -> int:
    """A seed that no other batch size or trial has, so that the tries know nothing of it."""
    return batch_size << 10 | trial


def _in_pieces(params: SamplingParams) -> SamplingParams:
    from quire.params import RequestOutputKind

    return msgspec.structs.replace(params, output_kind=RequestOutputKind.DELTA)


def _prompts(
    args: argparse.Namespace, llm: LLM, count: int, vocab_size: int, trial: int
) -> list[Any]:
    """Different prompts: paragraphs of a text, the same for each trial, or tokens by chance."""
    if args.prompts is None:
        seed = args.seed + _fresh(count, trial)
        return as_prompts(random_prompts(count, args.input_len, vocab_size, seed))
    parts = [part for part in args.prompts.read_text("utf-8").split("\n\n\n") if part.strip()]
    tokenizer = llm.get_tokenizer()
    every = [tokenizer.encode(part) for part in parts]
    return as_prompts([every[i % len(every)][i // len(every) :] for i in range(count)])


def _line(found: Mapping[str, Any]) -> str:
    by_place = " ".join(f"{rate:.2f}" for rate in found["acceptance_by_position"])
    error = "" if found["error"] is None else f", error {found['error']:g}"
    return (
        f"batch {found['batch_size']}, temperature {found['temperature']:g}{error}: "
        f"{found['tokens_per_second_without']:.2f} -> {found['tokens_per_second']:.2f} tokens/s "
        f"({found['speed_up']:.2f}x), mean acceptance length "
        f"{found['mean_acceptance_length']:.2f}, by position {by_place or 'none'}"
        + ("" if found["same_answers"] else "; THE ANSWERS DIFFER")
    )


def _without_draft(plan: EnginePlan) -> SpeculationPlan:
    """The plan of the drafts without the config of their model, which is long."""
    assert plan.speculation is not None, "some method was asked for"
    return msgspec.structs.replace(plan.speculation, draft=None)


if __name__ == "__main__":
    sys.exit(run_measurement(sys.modules[__name__], "python -m benchmarks.speculation"))
