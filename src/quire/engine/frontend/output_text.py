"""The tokens of one completion and their text, however the tokens are grouped into steps."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.frontend.stop_strings import StopMatch, StopStringFinder, length_of_beginning
from quire.params import RequestOutputKind, SamplingParams
from quire.text.detokenizer import IncrementalDetokenizer

DECODE_EVERY = 512
"""Tokens that are decoded at a time when the text is not needed before the end."""


class OutputText:
    """Collects ids, decodes them, finds stop strings, and holds back text in which one may begin.

    Use either `take()` (the text that has become visible since the last call) or `so_far()` (all
    visible text); with `detokenizer` None there is no text at all. The result does not depend on
    how the ids are split into `feed` calls. Invariants: `"".join(_pieces)` is the text
    from character `_taken` on; what was taken is never taken back.
    """

    __slots__ = (
        *("token_ids", "_detokenizer", "_finder", "_includes_stop", "_may_come", "_min_tokens"),
        *("_num_decoded", "_num_textual", "_pieces", "_taken", "_waits"),
    )

    def __init__(self, detokenizer: IncrementalDetokenizer | None, params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self._detokenizer = detokenizer
        self._finder = StopStringFinder(params.stop) if params.stop else None
        # text that may become a stop string is held back only where that is left out
        self._may_come = () if params.include_stop_str_in_output else tuple(params.stop or ())
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._waits = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._num_decoded = 0
        self._num_textual = 0
        self._pieces: list[str] = []
        self._taken = 0

    def feed(self, ids: Sequence[int], ends_request: bool = False) -> str | None:
        """Add the next ids and return the stop string that they complete, if any; then no more ids
        may follow. Ids after the one that completes it are dropped. `ends_request`: the last of the
        ids is a stop token, whose text counts only if stop strings are to be included.
        """
        silent = ends_request and not self._includes_stop
        if self._finder is not None:
            return self._feed_searching(self._finder, ids, silent)
        token_ids = self.token_ids
        if self._num_decoded == len(token_ids) and not (silent or self._waits):
            token_ids += ids  # the fast path of nearly every call
            self._num_decoded = self._num_textual = len(token_ids)
            if self._detokenizer is not None:
                self._pieces.append(self._detokenizer.feed(ids))
            return None
        token_ids += ids
        self._num_textual = len(token_ids) - silent
        if not self._waits or self._num_textual - self._num_decoded >= DECODE_EVERY:
            self._decode()
        return None

    def close(self) -> None:
        """End the completion: all its text becomes visible."""
        self._decode()
        self._may_come = ()

    def abandon(self) -> None:
        """Decode no more text, after an error in it."""
        self._num_decoded = self._num_textual

    def take(self) -> str:
        """The text that has become visible since the last call."""
        pieces = self._pieces
        visible = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        if self._may_come and (hold := length_of_beginning(visible, self._may_come)):
            border = len(visible) - hold
            pieces.append(visible[border:])
            visible = visible[:border]
        self._taken += len(visible)
        return visible

    def so_far(self) -> str:
        text = "".join(self._pieces)
        self._pieces = [text]
        if not self._may_come:
            return text
        return text[: len(text) - length_of_beginning(text, self._may_come)]

    def _decode(self) -> None:
        if self._num_decoded < self._num_textual:
            ids = self.token_ids[self._num_decoded : self._num_textual]
            self._num_decoded = self._num_textual
            if self._detokenizer is not None:
                self._pieces.append(self._detokenizer.feed(ids))

    def _feed_searching(
        self, finder: StopStringFinder, ids: Sequence[int], silent: bool
    ) -> str | None:
        last = len(ids) - silent
        for place, token_id in enumerate(ids):
            self.token_ids.append(token_id)
            if place < last:
                self._num_textual += 1
                match = self._search(finder)
                if match is not None:
                    self._cut(match)
                    return match.stop
        return None

    def _search(self, finder: StopStringFinder) -> StopMatch | None:
        num_pieces = len(self._pieces)
        self._decode()
        new = self._pieces[-1] if len(self._pieces) > num_pieces else ""
        if self._num_decoded > self._min_tokens:
            return finder.feed(new) if new else None
        finder.skip(new)
        return None

    def _cut(self, match: StopMatch) -> None:
        end = match.end if self._includes_stop else match.start
        self._pieces = ["".join(self._pieces)[: end - self._taken]]
        self._may_come = ()
