"""The engine's logprobs in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import Raw, json

from quire.outputs import Logprob
from quire.server.openai.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TokenLogprobs,
)
from quire.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""JSON has no infinity; this stands for it."""


def chat_logprobs(
    positions: Iterable[Mapping[int, Logprob]],
    token_ids: Iterable[int],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    asked_ids: Collection[int] | None = None,
    as_ids: bool = False,
) -> ChatLogprobs:
    """One entry per generated token; its list has the `num_top` likeliest tokens (-1: all), or
    `asked_ids`, the likeliest first. The generated token is among them only if it is one of them.
    """

    def shown(token_id: int, entry: Logprob) -> tuple[str, float, list[int]]:
        text = token_name(token_id, entry, as_ids)
        return text, max(entry.logprob, FLOOR), list(tokenizer.token_bytes(token_id))

    entries = []
    for position, token_id in zip(positions, token_ids, strict=True):
        listed = _likeliest(position, num_top, asked_ids)
        top = [TokenLogprob(*shown(*each)) for each in listed]
        entries.append(TokenLogprobs(*shown(token_id, position[token_id]), top))
    return ChatLogprobs(entries)


def _likeliest(
    position: Mapping[int, Logprob], num_top: int, asked_ids: Collection[int] | None
) -> list[tuple[int, Logprob]]:
    """The entries of a position to list. The engine's has the generated token first, whether or not
    it is one of the likeliest or of those that were asked for.
    """
    if asked_ids is not None:
        listed = [(id, entry) for id, entry in position.items() if id in asked_ids]
    else:
        own, *others = position.items()
        # one entry more than asked for: the drawn token is not among the likeliest
        is_extra = len(position) > num_top >= 0
        listed = others if is_extra else [own, *others]
    return sorted(listed, key=lambda each: -each[1].logprob)


def token_name(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """A token in logprobs: its text, or `token_id:N`."""
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def completion_logprobs(
    positions: Iterable[Mapping[int, Logprob] | None],
    token_ids: Iterable[int],
    texts: Iterable[str],
    offsets: list[int],
    *,
    as_ids: bool,
) -> CompletionLogprobs:
    """Parallel lists; `texts` names the tokens of positions that have no logprob (a prompt's first
    token). `offsets`: where the tokens begin in the text.
    """
    found = CompletionLogprobs(offsets, [], [], [])
    for position, token_id, text in zip(positions, token_ids, texts, strict=True):
        found.tokens.append(f"token_id:{token_id}" if as_ids else text)
        if position is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        found.token_logprobs.append(max(position[token_id].logprob, FLOOR))
        found.top_logprobs.append(
            {token_name(id, e, as_ids): max(e.logprob, FLOOR) for id, e in position.items()}
        )
    return found


def prompt_logprobs(positions: Iterable[Mapping[int, Logprob] | None] | None) -> Raw | None:
    """The prompt's logprobs as JSON, objects by token id; null for the first position.

    Encoded position by position, since one call for all would hold up other threads, and once for
    all choices.
    """
    if positions is None:
        return None
    encode = json.Encoder().encode
    return Raw(b"[" + b",".join([encode(_prompt_position(p)) for p in positions]) + b"]")


def _prompt_position(position: Mapping[int, Logprob] | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        str(token_id): {
            "logprob": max(entry.logprob, FLOOR),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }
