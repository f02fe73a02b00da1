"""Continue a prompt and print the text as it comes.

Without --temperature, and if the model's files do not set it, the likeliest token is taken each
time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.sampling_flags import FIRST_SAMPLING_FLAGS, add_sampling_flags, given_sampling
from quire.cli.session import FIRST_ENGINE_FLAGS, Session, add_engine_flags, explain
from quire.config.args.command_line import QuireParser
from quire.errors import InvalidParameter

if TYPE_CHECKING:
    from quire.outputs import CompletionOutput, RequestOutput

_MAX_TOKENS = 128
NEED_JSON = ("logprobs", "prompt_logprobs", "logprob_token_ids")
"""Fields whose figures only JSON has room for."""


def add_arguments(parser: QuireParser) -> None:
    """The flags of `quire generate`."""
    parser.usage = "quire generate [PROMPT] [flags]"
    parser.add_argument("prompt", nargs="?", help="text to continue; none or -: standard input")
    parser.add_argument("--file", type=Path, help="take the prompt from a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--echo", action="store_true", help="print the prompt first")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.first_flags = {
        "Prompt and output": ("prompt", "file", "json", "echo"),
        "Model": FIRST_ENGINE_FLAGS,
        "Sampling": FIRST_SAMPLING_FLAGS,
    }


def run(args: argparse.Namespace) -> int:
    """Print the continuation, or with --explain the plan."""
    if args.explain:
        return explain(args)
    given = given_sampling(args)
    for name in NEED_JSON:
        if name in given and not args.json:
            raise InvalidParameter(name, given[name], "it is printed with --json only")
    prompt = read_prompt(args)
    with Session.open(args) as session:
        generate(
            session, prompt, with_defaults(given, session.sampling_defaults, _MAX_TOKENS), args
        )
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from the command line, a file or standard input; one of them."""
    if args.file is not None:
        if args.prompt is not None:
            raise InvalidParameter("--file", str(args.file), "a prompt was given as well")
        try:
            return str(args.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameter("--file", str(args.file), str(error)) from error
    if args.prompt is None or args.prompt == "-":
        return sys.stdin.read()
    return str(args.prompt)


def with_defaults(given: dict[str, Any], model: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Flags over the model's defaults over this command's: greedy, and `max_tokens`."""
    return {"temperature": 0.0, "max_tokens": max_tokens, **model, **given}


def generate(
    session: Session, prompt: str, sampling: dict[str, Any], args: argparse.Namespace
) -> None:
    """Run the request and print its output; on KeyboardInterrupt what there is, and re-raise."""
    num_completions = sampling.get("n", 1)
    # pieces of several answers come mixed: those are printed one after the other
    streams = not args.json and num_completions == 1
    outputs = session.stream(prompt, sampling, is_delta=streams)
    start = prompt if args.echo else ""
    if streams:
        print_stream(outputs, start)
        return
    for final in outputs:
        if args.json:
            print(json.dumps(as_json(final), ensure_ascii=False))
            continue
        for completion in final.outputs:
            print(f"--- {completion.index + 1} of {num_completions}")
            print(start + completion.text)


def print_stream(outputs: Iterable[RequestOutput], start: str) -> None:
    """Write new text at once, and end the last line, also of an answer that is cut short."""
    text, is_over = start, False
    sys.stdout.write(start)
    try:
        for output in outputs:
            piece = output.outputs[0].text
            sys.stdout.write(piece)
            sys.stdout.flush()
            text = piece or text
        is_over = True
    finally:
        # nothing is printed for a request that failed before its first piece
        if (text or is_over) and not text.endswith("\n"):
            sys.stdout.write("\n")


def as_json(output: RequestOutput) -> dict[str, Any]:
    """A finished request as plain data."""
    fields: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_completion(completion) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [_place(place) for place in output.prompt_logprobs]
    return fields


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.error is not None:
        fields["error"] = completion.error
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_place(place) for place in completion.logprobs]
    return fields


def _place(place: Any) -> list[dict[str, Any]] | None:
    """The logprobs at one place, the token itself first; None for the first token of a prompt."""
    if place is None:
        return None
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob,
            "rank": entry.rank,
            "token": entry.decoded_token,
        }
        for token_id, entry in place.items()
    ]
