"""Prompts that come as embeddings: checked, and put into items that stand at their positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import InvalidParameter
from quire.media.digests import ContentHash
from quire.media.tensors import Numbers, checked_rows
from quire.params import SamplingParams
from quire.prompts import ParsedPrompt
from quire.step.media import EMBEDS, ROWS_OF_EMBEDS, MediaItem

PLACEHOLDER = 0
"""The id of a token whose embedding was given."""


class EmbeddedPrompts:
    """Puts given embeddings, rows as wide as the model's own, into prompts."""

    def __init__(self, width: int) -> None:
        self.width = width

    def placed(self, parsed: ParsedPrompt, params: object) -> tuple[list[int], PromptMedia]:
        """A prompt's ids, with placeholders for embeddings, and these. Raises RequestErrors."""
        given = parsed.embeds
        assert given is not None, "a prompt of embeddings"
        if isinstance(params, SamplingParams):
            for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
                if (asked := getattr(params, name)) is not None:
                    allowed = "a prompt of embeddings has no tokens to report"
                    raise InvalidParameter(name, asked, allowed)
        rows = checked_rows(given.rows, "prompt_embeds", self.width)
        if given.is_id is None:
            return [PLACEHOLDER] * len(rows), media_of(rows)
        assert parsed.token_ids is not None, "prompts are read with both"
        if len(given.is_id) != len(rows):
            allowed = f"prompt_embeds has {len(rows)} rows, and it has as many"
            raise InvalidParameter("prompt_is_token_ids", f"<{len(given.is_id)} items>", allowed)
        pairs = zip(parsed.token_ids, given.is_id, strict=True)
        ids = [token if is_one else PLACEHOLDER for token, is_one in pairs]
        return ids, media_of(rows, given.is_id)


def media_of(rows: Numbers, is_id: Sequence[bool] = ()) -> PromptMedia:
    """The embeddings of a prompt at their places; `is_id`: where its ids count instead."""
    return PromptMedia([_item(rows, start, end) for start, end in _pieces(len(rows), is_id)])


def _pieces(num_tokens: int, is_id: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The ranges of positions that have embeddings, none across a multiple of the items' size, so
    that what equal beginnings are cut into does not depend on what follows.
    """
    start = 0
    for end in range(1, num_tokens + 1):
        is_given = not is_id or not is_id[end - 1]
        if not is_given:
            start = end
        elif end == num_tokens or end % ROWS_OF_EMBEDS == 0 or (is_id and is_id[end]):
            yield start, end
            start = end


def _item(rows: Numbers, start: int, end: int) -> MediaItem:
    part = rows[start:end]
    content = ContentHash(EMBEDS)
    content.add_array("rows", part)
    return MediaItem(content.digest(), EMBEDS, end - start, [(start, end)], {EMBEDS: part})
