"""Conversations with parts of the type `prompt_embeds`; templates see a mark in their place."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.engine.frontend.embeds.prompts import PLACEHOLDER, media_of
from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import RequestError
from quire.media.tensors import Numbers, checked_rows, tensor_of_text

PART = "prompt_embeds"
DATA = "data"


def has_embeds(messages: Any) -> bool:
    """Whether parts of messages are embeddings."""
    return any(
        isinstance(part, Mapping) and part.get("type") == PART
        for message in (messages if isinstance(messages, list | tuple) else ())
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


class EmbeddedChat:
    """A conversation without its embeddings; `messages` have marks there that nobody can guess."""

    def __init__(self, messages: Sequence[Any], width: int) -> None:
        """Raises RequestErrors for what is not embeddings of rows with `width` numbers."""
        self._width = width
        self._nonce = secrets.token_hex(16)
        self._rows: list[Numbers] = []
        self.messages = [
            self._without(message, f"messages[{index}]") for index, message in enumerate(messages)
        ]

    def _without(self, message: Any, name: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        parts = []
        for index, part in enumerate(content):
            if isinstance(part, Mapping) and part.get("type") == PART:
                field = f"{name}.content[{index}].{DATA}"
                given = part.get(DATA)
                if isinstance(given, str | bytes) or given is None:
                    given = tensor_of_text(field, given)
                self._rows.append(checked_rows(given, field, self._width))
                part = {"type": "text", "text": self._mark(len(self._rows) - 1)}
            parts.append(part)
        return {**message, "content": parts}

    def _mark(self, index: int) -> str:
        return f"[{self._nonce}:{index}]"

    def pieces(self, rendered: str) -> list[str]:
        """The texts around the embeddings. Raises RequestError for a template that loses some."""
        pieces = []
        for index in range(len(self._rows)):
            before, mark, rendered = rendered.partition(self._mark(index))
            if not mark or self._nonce in before:
                raise RequestError(
                    "The chat template leaves out embeddings of a message, or changes their order.",
                    parameter="messages",
                )
            pieces.append(before)
        if self._nonce in rendered:
            raise RequestError(
                "The chat template repeats embeddings of a message.", parameter="messages"
            )
        return [*pieces, rendered]

    def num_tokens(self, pieces: Sequence[Sequence[int]]) -> int:
        return sum(map(len, pieces)) + sum(map(len, self._rows))

    def prompt(self, pieces: Sequence[Sequence[int]]) -> EmbeddedPrompt:
        ids: list[int] = []
        is_id: list[bool] = []
        rows = np.zeros((self.num_tokens(pieces), self._width), np.result_type(*self._rows))
        for piece, given in zip(pieces, [*self._rows, rows[:0]], strict=True):
            ids += piece
            is_id += [True] * len(piece)
            rows[len(ids) : len(ids) + len(given)] = given
            ids += [PLACEHOLDER] * len(given)
            is_id += [False] * len(given)
        return EmbeddedPrompt(rows, ids, is_id)


class EmbeddedPrompt(NamedTuple):
    """A prompt of ids and embeddings."""

    rows: Numbers
    ids: list[int]
    is_id: list[bool]

    def media(self) -> PromptMedia:
        return media_of(self.rows, self.is_id)

    def content(self) -> dict[str, Any]:
        return {
            "prompt_embeds": self.rows,
            "prompt_token_ids": self.ids,
            "prompt_is_token_ids": self.is_id,
        }
