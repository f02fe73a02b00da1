"""Print what a model is made of: its layers as pseudo-code, parameters, memory per token."""

from __future__ import annotations

import argparse
import json

from quire.config.args.command_line import add_options
from quire.config.args.engine_args import EngineArgs
from quire.config.facts import ModelFacts
from quire.config.offload import choose_offload, is_wanted
from quire.config.resolve.dtype import ITEMSIZE

_OPTIONS = (
    *("revision", "hf_token", "hf_overrides", "strict_config", "download_dir", "model_impl"),
    *("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step"),
    "offload_params",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire show`."""
    parser.add_argument("model", nargs="?", help="folder or hub id; none: the embedded model")
    parser.add_argument(
        "--architectures", action="store_true", help="list the architectures that are known"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    add_options(parser, EngineArgs, only=_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Print the description; of the model's files only the small ones are read."""
    from quire.config.planning import gather_model_facts, without_tokenizer, without_weights
    from quire.models.families import architectures
    from quire.models.show import describe, figures_of

    if args.architectures:
        print("\n".join(architectures()))
        return 0
    engine_args = without_weights(without_tokenizer(EngineArgs.from_cli_args(args)))
    facts = gather_model_facts(engine_args)
    size = ITEMSIZE.get(facts.checkpoint_dtype, 2)
    model = facts.decoder
    if args.json:
        stored = {
            "model": facts.name,
            "architecture": facts.architecture,
            "dtype": facts.checkpoint_dtype,
        }
        print(json.dumps({**stored, **figures_of(model, weight_bytes=size, kv_bytes=size)}))
        return 0
    print(f"model             {facts.name}")
    print(f"architecture      {facts.architecture}, stored as {facts.checkpoint_dtype}")
    if facts.part_of is not None:
        print(f"text part of      {facts.part_of}, whose other parts are left out")
    if facts.foreign_keys:
        print(f"keys without use  {facts.foreign_keys}")
    if is_wanted(engine_args):
        print(f"offloaded         {_offloaded(engine_args, facts, size)}")
    print(describe(model, weight_bytes=size, kv_bytes=size))
    return 0


def _offloaded(args: EngineArgs, facts: ModelFacts, value_bytes: int) -> str:
    """The weights that stay in host memory when a GPU runs the model in the stored type."""
    sizes = [{n: count * value_bytes for n, count in p.items()} for p in facts.layer_products]
    offload = choose_offload(args, sizes)
    return f"layers {' '.join(map(str, offload.layers))}: {offload.describe()}"
