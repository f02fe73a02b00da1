"""The operator's decisions about conversations, prompts that are pooled and replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.server.output_parsing import ParserPlan


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The ways from conversations to prompts and from outputs to answers. `trusts_requests` with
    their own templates, `trusts_media_options` with options of decoding and processing pictures.
    """

    template: str | None = None
    content_format: str = "auto"
    trusts_requests: bool = False
    trusts_media_options: bool = False
    default_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    hides_tools: bool = False
    parser_plan: ParserPlan = field(default_factory=ParserPlan)


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """Settings of pooling. `prompts`: what may be put before texts, by name. `window`: number of
    inputs of one request that are in the engine at a time. `longest`: the most tokens of a text
    that is embedded (None: any number); `has_pieces`: it may be longer than the model takes;
    `cuts`: one that is longer is cut unless the request says how.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    window: int = 256
    longest: int | None = None
    has_pieces: bool = False
    cuts: bool = False


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """Parts of replies in addition to the answer."""

    tokens_as_ids: bool = False
    forces_usage: bool = False
    prompt_details: bool = True
    keep_alive_s: float = 15.0
    fingerprint: str | None = None
