"""Flags for the fields of SamplingParams, in one table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from quire.config.args.command_line import parse_object

FLAGS: dict[str, tuple[Any, str]] = {
    "n": (int, "completions of the prompt"),
    "max_tokens": (int, "most new tokens (default: the model's, else 128; in a chat 512)"),
    "min_tokens": (int, "no end before this many new tokens"),
    "temperature": (float, "randomness; 0 always takes the likeliest token"),
    "top_p": (float, "keep the likeliest tokens that have this share of the probability"),
    "top_k": (int, "keep this many of the likeliest tokens; 0: all"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest one's probability"),
    "presence_penalty": (float, "lower the logits of tokens in the output, once each"),
    "frequency_penalty": (float, "lower the logits of tokens in the output, for each occurrence"),
    "repetition_penalty": (float, "divide the logits of tokens in prompt and output"),
    "stop": ("texts", "end before this text; may be given several times"),
    "stop_token_ids": ("ids", "end after one of these tokens"),
    "include_stop_str_in_output": (bool, "keep the stop text"),
    "ignore_eos": (bool, "continue after the end-of-text token"),
    "bad_words": ("texts", "never generate this word; may be given several times"),
    "allowed_token_ids": ("ids", "generate these tokens only"),
    "logit_bias": ("json", 'add to logits, as {"token id": number}'),
    "logprobs": (int, "report the logprobs of this many tokens at each place (with --json)"),
    "prompt_logprobs": (int, "report those of the prompt (with --json)"),
    "logprob_token_ids": ("ids", "report the logprobs of these tokens (with --json)"),
    "detokenize": (bool, "make text of the tokens"),
    "skip_special_tokens": (bool, "leave special tokens out of the text"),
    "spaces_between_special_tokens": (bool, "put spaces between special tokens"),
    "repetition_detection": (
        "json",
        "end when the output repeats itself, as "
        '{"max_pattern_size": 8, "min_pattern_size": 1, "min_count": 4}',
    ),
    "thinking_token_budget": (int, "most tokens of reasoning"),
    "structured_outputs": ("json", "constrain the output"),
    "skip_reading_prefix_cache": (bool, "compute the whole prompt again"),
    "extra_args": ("json", "arguments of custom logits processors"),
}
"""Field -> (type or form, its help)."""

FIRST_SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop")
"""The flags that `--help` alone lists."""


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per entry of the table; what is not given does not appear in the namespace."""
    # absent and not None: a default of this process must not overrule the model's own
    group = parser.add_argument_group("Sampling", argument_default=argparse.SUPPRESS)
    for name, (form, help) in FLAGS.items():
        flags = ["--" + name.replace("_", "-")]
        if len(name) == 1:
            flags.insert(0, f"-{name}")
        group.add_argument(*flags, help=help, **_reading(form))


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given."""
    given = {name: value for name, value in vars(args).items() if name in FLAGS}
    if "logit_bias" in given:
        given["logit_bias"] = _by_token_id(given["logit_bias"])
    if "repetition_detection" in given:
        from quire.params import RepetitionDetectionParams

        given["repetition_detection"] = RepetitionDetectionParams(**given["repetition_detection"])
    if "structured_outputs" in given:
        from quire.params import StructuredOutputsParams

        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return given


def _reading(form: Any) -> dict[str, Any]:
    forms: dict[Any, dict[str, Any]] = {
        bool: {"action": argparse.BooleanOptionalAction},
        "texts": {"action": "append", "type": unescaped, "metavar": "TEXT"},
        "ids": {"type": token_ids, "metavar": "ID,ID"},
        "json": {"type": parse_object, "metavar": "JSON"},
    }
    named: Callable[..., Any] = form
    return forms[form] if form in forms else {"type": named, "metavar": form.__name__.upper()}


def unescaped(text: str) -> str:
    r"""`text` with \n and \t as in a JSON string, since a shell makes them hard to type."""
    try:
        return str(json.loads('"' + text.replace('"', '\\"') + '"'))
    except ValueError:
        return text


def token_ids(text: str) -> list[int]:
    """Token ids with commas between them."""
    from quire.params import checks

    return checks.token_ids("token ids", [part.strip() for part in text.split(",")])


def _by_token_id(bias: dict[str, Any]) -> dict[Any, Any]:
    """The bias by token ids: JSON has text keys only."""
    from quire.params import checks

    return dict(zip(checks.token_ids("logit_bias", list(bias)), bias.values(), strict=True))
