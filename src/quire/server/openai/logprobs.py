"""The engine's logprobs in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Raw, json

from quire.outputs import Logprob
from quire.server.openai.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TokenLogprobs,
)

FLOOR = -9999.0
"""JSON has no infinity; this stands for it."""


def chat_logprobs(
    positions: Iterable[Mapping[int, Logprob]],
    token_ids: Iterable[int],
    num_top: int,
    *,
    as_ids: bool,
) -> ChatLogprobs:
    """One entry per generated token; its list has the first `num_top` that the engine reports (all
    for -1), of which the generated one is the first.
    """
    return ChatLogprobs(
        [
            _chat_entry(position, token_id, num_top, as_ids)
            for position, token_id in zip(positions, token_ids, strict=True)
        ]
    )


def _chat_entry(
    position: Mapping[int, Logprob], token_id: int, num_top: int, as_ids: bool
) -> TokenLogprobs:
    listed = list(position.items())[: None if num_top < 0 else num_top]
    top = [TokenLogprob(*_shown(id, entry, as_ids)) for id, entry in listed]
    return TokenLogprobs(*_shown(token_id, position[token_id], as_ids), top)


def _shown(token_id: int, entry: Logprob, as_ids: bool) -> tuple[str, float, list[int]]:
    text = token_name(token_id, entry, as_ids)
    return text, max(entry.logprob, FLOOR), list(text.encode("utf-8", "replace"))


def token_name(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """How a token is written in logprobs: its text, or `token_id:N`."""
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def completion_logprobs(
    positions: Iterable[Mapping[int, Logprob] | None],
    token_ids: Iterable[int],
    texts: Iterable[str],
    *,
    offset: int,
    as_ids: bool,
) -> CompletionLogprobs:
    """Parallel lists; `texts` names the tokens of positions that have no logprob (a prompt's first
    token). `offset` is how many characters of token texts came before.
    """
    found = CompletionLogprobs([], [], [], [])
    for position, token_id, text in zip(positions, token_ids, texts, strict=True):
        name = f"token_id:{token_id}" if as_ids else text
        found.text_offset.append(offset)
        found.tokens.append(name)
        offset += len(name)
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
