"""Offsets of a completion's tokens in the text that is sent."""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


class TextOffsets:
    """The offsets of one choice's tokens, in their order: those of an echoed prompt, if there is
    one, then those of the output. A token that begins within a character points at it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._length = 0

    def of_prompt(self, text: str) -> list[int]:
        """Offsets of the prompt's tokens in its text, which lacks special tokens that were put
        before it and the blank that some tokenizers begin a text with.
        """
        special = frozenset(self._tokenizer.all_special_tokens)
        whole = IncrementalDetokenizer(self._tokenizer, (), skip_special_tokens=False)
        offsets: list[int] = []
        place = 0
        for token_id in self._prompt_ids:
            offsets.append(place)
            piece = whole.feed([token_id])
            if not text.startswith(piece, place):
                piece = "" if piece in special else piece.lstrip()
            # a text that the tokenizer has normalised may be shorter than its tokens' texts
            place = min(place + len(piece), len(text))
        self._length += len(text)
        return offsets

    def of_output(self, token_ids: Sequence[int], most: int | None) -> list[int]:
        """Offsets of the output's next tokens. `most`: where the text ends, once that is known; the
        tokens of a stop string that is not sent point there.
        """
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length if most is None else min(self._length, most))
            self._length += len(self._detokenizer.feed([token_id]))
        return offsets
