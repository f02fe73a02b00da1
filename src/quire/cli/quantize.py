"""Round the weights of a checkpoint, and write it in the format of compressed-tensors, which other
engines read, too. The model is never whole in memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.config.args.command_line import add_options
from quire.config.args.engine_args import EngineArgs

_OPTIONS = (
    *("quantization", "quantization_config", "revision", "hf_token", "hf_overrides"),
    *("strict_config", "download_dir"),
)
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire quantize`."""
    parser.add_argument("model", help="folder or hub id of a checkpoint that is not quantised")
    parser.add_argument("--out", required=True, help="folder to write, new or empty")
    parser.add_argument(
        "--max-shard-size",
        type=float,
        default=5.0,
        help="GiB of weights in a file, at most (default: 5)",
    )
    add_options(parser, EngineArgs, only=_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, and print what has become of it."""
    from quire.config.planning import gather_model_facts, without_tokenizer
    from quire.config.resolve.dtype import asked_rounding
    from quire.errors import InvalidParameter
    from quire.models.formats.rounding_rules import read_rounding_rules
    from quire.models.loading.rounding.quantized_files import write_quantized

    engine_args = without_tokenizer(EngineArgs.from_cli_args(args))
    if args.max_shard_size <= 0:
        raise InvalidParameter("max_shard_size", args.max_shard_size, "more than 0 GiB")
    chosen = asked_rounding(engine_args) or "int8"
    # other engines read heads as they are stored, so that this one is rounded where it is asked for
    config = {"head": None} | (engine_args.quantization_config or {})
    rules = read_rounding_rules(chosen, config)
    assert rules is not None, "there is a config"
    facts = gather_model_facts(engine_args)
    if facts.is_foreign:
        raise InvalidParameter("model", facts.name, "a model with a family of Quire's")
    written = write_quantized(
        Path(facts.folder),
        facts.hf_config,
        rules,
        Path(args.out),
        most_bytes=int(args.max_shard_size * _GIB),
    )
    print(json.dumps(written.as_json()))
    return 0
