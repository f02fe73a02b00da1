"""Prompts that come as embeddings: checked, and put into items that stand at their positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import InvalidParameter, InvalidType
from quire.media.digests import ContentHash
from quire.params import SamplingParams
from quire.prompts import ParsedPrompt
from quire.step.media import EMBEDS, ROWS_OF_EMBEDS, MediaItem

Rows = npt.NDArray[Any]

PLACEHOLDER = 0
"""The id of a token whose embedding was given."""


class EmbeddedPrompts:
    """Puts given embeddings, rows as wide as the model's own, into prompts."""

    def __init__(self, width: int) -> None:
        self.width = width

    def placed(self, parsed: ParsedPrompt, params: object) -> tuple[list[int], PromptMedia]:
        """The ids of a prompt, placeholders where embeddings stand, and these. Raises
        RequestErrors.
        """
        given = parsed.embeds
        assert given is not None, "a prompt of embeddings"
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            allowed = "a prompt of embeddings has no tokens to report"
            raise InvalidParameter("prompt_logprobs", params.prompt_logprobs, allowed)
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


def media_of(rows: Rows, is_id: Sequence[bool] = ()) -> PromptMedia:
    """The embeddings of a prompt at their places; `is_id`: where its ids count instead."""
    return PromptMedia([_item(rows, start, end) for start, end in _pieces(len(rows), is_id)])


def checked_rows(given: Any, name: str, width: int) -> Rows:
    """A copy of embeddings as float16 or float32 [n, width]. `name`: what errors call them. Raises
    InvalidType or InvalidParameter.
    """
    rows = _as_array(given, name)
    if rows.ndim == 3 and len(rows) == 1:
        rows = rows[0]
    if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
        allowed = f"its shape must be [tokens, {width}], and this model's embeddings have {width}"
        raise InvalidParameter(name, list(np.shape(rows)), f"{allowed} numbers")
    if not np.isfinite(rows).all():
        raise InvalidParameter(name, "<tensor>", "it has numbers that are not finite (NaN or inf)")
    return rows


def _as_array(given: Any, name: str) -> Rows:
    """An array, or a tensor without importing its library."""
    allowed = "it must be a dense tensor or an array of float16, bfloat16 or float32"
    if type(given).__module__.partition(".")[0] == "torch" and hasattr(given, "is_floating_point"):
        if str(given.layout) != "torch.strided":
            raise InvalidParameter(name, str(given.layout), allowed, "Call to_dense().")
        given = given.detach().cpu()
        if str(given.dtype) == "torch.bfloat16":  # numpy has none; float32 holds its numbers
            given = given.float()
        given = given.numpy()
    if not isinstance(given, np.ndarray):
        raise InvalidType(name, type(given).__name__, allowed)
    if given.dtype.newbyteorder("=") not in (np.float16, np.float32):
        raise InvalidParameter(name, str(given.dtype), allowed)
    # A copy: the caller may change its own while the request runs.
    return np.array(given, given.dtype.newbyteorder("="), order="C")


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


def _item(rows: Rows, start: int, end: int) -> MediaItem:
    part = rows[start:end]
    content = ContentHash(EMBEDS)
    content.add("dtype", part.dtype.str.encode())
    content.add("shape", np.array(part.shape, "<i8").tobytes())
    content.add("rows", part.tobytes())
    return MediaItem(content.digest(), EMBEDS, end - start, [(start, end)], {EMBEDS: part})
