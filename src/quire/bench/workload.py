"""Shared parts of throughput and latency: the model, the prompts, the limit next to the figure."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.args.engine_args import EngineArgs
from quire.config.plan import EnginePlan
from quire.environment import read_environment
from quire.errors import InvalidParameter

if TYPE_CHECKING:
    from quire import LLM
    from quire.params import SamplingParams


_COMPARED = (
    "dtype", "quantization", "kv_dtype", "num_threads", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
"""The decisions of a plan that have to be equal for two figures to be comparable."""


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """`--random-model` and the flags of the engine."""
    parser.add_argument(
        "--random-model",
        metavar="SHAPE",
        help="random weights of a shape (tiny, 0.6b, 1b, 4b, 8b, 2b-experts, ...; an unknown one "
        "lists all), written to the cache once",
    )
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="leave the outputs as token ids"
    )
    EngineArgs.add_cli_args(parser)


def engine_args_from(args: argparse.Namespace) -> EngineArgs:
    """The engine's arguments; --random-model stands for --model."""
    engine_args = EngineArgs.from_cli_args(args)
    if args.random_model is not None:
        if engine_args.model is not None:
            raise InvalidParameter("--random-model", args.random_model, "--model was given as well")
        engine_args.model = str(random_model(args.random_model))
    return engine_args


def random_model(shape: str) -> Path:
    """The folder of a random checkpoint in bfloat16, written at the first use of the shape."""
    from quire.testing.checkpoints import checkpoint_config, make_checkpoint

    folder = read_environment().cache_dir / "random" / f"{shape}-bfloat16"
    file = folder / "config.json"
    # a later release may have changed the shape
    if not file.exists() or json.loads(file.read_text()) != checkpoint_config(shape):
        make_checkpoint(folder, shape=shape)
    return folder


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` ids: a function of its arguments, so that peers get the same."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def prompts_of(plan: EnginePlan, count: int, length: int) -> list[list[int]]:
    """Random prompts for the model of a plan, by its seed."""
    return random_prompts(count, length, plan.model.vocab_size, plan.model.seed)


def sampling(output_len: int, args: argparse.Namespace) -> SamplingParams:
    """Greedy, exactly `output_len` tokens."""
    from quire.params import SamplingParams

    return SamplingParams(
        n=args.n,
        # several greedy completions would be one
        temperature=0.0 if args.n == 1 else 1.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
    )


def open_llm(plan: EnginePlan) -> LLM:
    """The engine of a plan, without statistics."""
    from quire import LLM, LLMEngine

    return LLM.from_engine(LLMEngine.from_vllm_config(plan, disable_log_stats=True))


def as_prompts(prompts: list[list[int]]) -> list[Any]:
    """Token ids as the engine takes them."""
    return [{"prompt_token_ids": ids} for ids in prompts]


def model_id(args: argparse.Namespace, plan: EnginePlan) -> str:
    """The name of the model in figures."""
    name: str = args.random_model or plan.model.served_model_names[0]
    return name


def settings(plan: EnginePlan, args: argparse.Namespace) -> dict[str, Any]:
    """The settings that have to be equal for two figures to be comparable."""
    return {
        "model_id": model_id(args, plan),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "n": args.n,
        **{name: value for name, value in plan.decided() if name in _COMPARED},
    }
