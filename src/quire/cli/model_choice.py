"""Chooses a model in this process or on a server, by the flags of `quire chat` and `complete`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.cli.answers import Model
from quire.cli.generate import NEED_JSON, with_defaults
from quire.cli.sampling_flags import FIRST_SAMPLING_FLAGS, add_sampling_flags, given_sampling
from quire.cli.session import FIRST_ENGINE_FLAGS, Session, add_engine_flags
from quire.config.args.command_line import QuireParser
from quire.config.args.engine_args import EngineArgs
from quire.environment import read_environment
from quire.errors import InvalidParameter

DEFAULT_URL = "http://localhost:8000/v1"
_REMOTE_FLAGS = ("model_name", "api_key")
_OF_REQUESTS = ("seed",)
"""Options of the engine that are fields of requests, too."""


def add_answer_flags(parser: QuireParser, first: Sequence[str]) -> None:
    """Add the flags of answers, sampling and the engine after `first`, the command's own."""
    parser.add_argument(
        "--stats", action="store_true", help="print the time to the first token and tokens/s"
    )
    group = parser.add_argument_group("Server")
    group.add_argument(
        "--url",
        nargs="?",
        const="",
        help=f"ask a server there instead of a model in this process (no URL: OPENAI_BASE_URL, "
        f"else {DEFAULT_URL})",
    )
    group.add_argument("--model-name", help="the server's model (default: its first)")
    group.add_argument("--api-key", metavar="KEY", help="default OPENAI_API_KEY, or QUIRE_API_KEY")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.first_flags = {
        "Questions": (*first, "stats"),
        "Server": ("url", *_REMOTE_FLAGS),
        "Model": FIRST_ENGINE_FLAGS,
        "Sampling": FIRST_SAMPLING_FLAGS,
    }


@contextmanager
def open_model(
    args: argparse.Namespace, max_tokens: int
) -> Iterator[tuple[Model, Mapping[str, Any]]]:
    """Open the model that the flags name. Yields it with the sampling fields for its requests;
    `max_tokens` is the default.

    Raises InvalidParameter for flags that mean nothing here.
    """
    given = given_sampling(args)
    for name in NEED_JSON:
        if name in given:
            raise InvalidParameter(name, given[name], "`quire generate --json` prints it")
    if given.get("n", 1) != 1:
        raise InvalidParameter("n", given["n"], "an answer is one completion")
    if args.url is not None:
        _check_remote(args)
        yield _remote(args), {"max_tokens": max_tokens, **given, **_given_of_requests(args)}
        return
    for name in _REMOTE_FLAGS:
        if vars(args)[name] is not None:
            raise InvalidParameter(name, vars(args)[name], "it goes with --url")
    with Session.open(args) as session:
        yield session, with_defaults(given, session.sampling_defaults, max_tokens)


def _remote(args: argparse.Namespace) -> Model:
    from quire.cli.remote import RemoteModel

    environment = read_environment()
    keys = (args.api_key, environment.openai_api_key, *environment.api_keys[:1])
    url = args.url or environment.openai_base_url or DEFAULT_URL
    return RemoteModel(url, next((key for key in keys if key), None), args.model_name)


def _check_remote(args: argparse.Namespace) -> None:
    """Raise InvalidParameter for a flag of the engine: the server has its own."""
    engine_args = EngineArgs.from_cli_args(args)
    neutral = EngineArgs()
    for field in dataclasses.fields(EngineArgs):
        value = getattr(engine_args, field.name)
        if field.name not in _OF_REQUESTS and value != getattr(neutral, field.name):
            hint = "Give --model-name." if field.name == "model" else "Leave it out."
            raise InvalidParameter(field.name, value, "the engine is the server's", hint)


def _given_of_requests(args: argparse.Namespace) -> dict[str, Any]:
    neutral = vars(EngineArgs())
    given = {name: getattr(args, name) for name in _OF_REQUESTS}
    return {name: value for name, value in given.items() if value != neutral[name]}
