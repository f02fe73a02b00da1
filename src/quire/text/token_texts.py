"""The text of single tokens, as logprobs show them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as LibraryTokenizer

from quire.text.token_pieces import REPLACEMENT, token_of

METASPACE = "▁"
# How many earlier ids may help an id whose bytes are only a part of a character.
MAX_CONTEXT_IDS = 4


class TokenTexts:
    """Texts of single ids; kept, so that a repeated id that needs no context costs one look-up.

    The rule is that of `decoded_token` in vLLM's logprobs.
    """

    def __init__(self, library: LibraryTokenizer) -> None:
        self._library = library
        self._alone: dict[int, str] = {}

    def text(self, index: int, context: Sequence[int] = ()) -> str:
        """The id's text; `context` are the ids before it, oldest first. "" for other values."""
        text = self._alone.get(index)
        if text is None:
            if (token := token_of(self._library, index)) is None:
                return ""
            text = self._alone[index] = self._text_alone(index, token)
        return self._text_after(index, context) if text.endswith(REPLACEMENT) else text

    def _text_alone(self, index: int, token: str) -> str:
        decoder = self._library.decoder
        if token.startswith(METASPACE) and decoder is not None:
            # At the beginning a decoder drops the blanks; after another token they are text.
            return str(decoder.decode(["x", token]))[1:]
        return self._decode([index])

    def _text_after(self, index: int, context: Sequence[int]) -> str:
        for length in range(1, min(MAX_CONTEXT_IDS, len(context)) + 1):
            before = [i for i in context[-length:] if token_of(self._library, i) is not None]
            text = self._decode([*before, index])
            if not text.endswith(REPLACEMENT):
                return text[len(self._decode(before).rstrip(REPLACEMENT)) :]
        return ""

    def _decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids, skip_special_tokens=False))
