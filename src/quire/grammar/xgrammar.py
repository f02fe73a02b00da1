"""xgrammar as a library that makes masks (Dong et al. 2024), where it is installed.

Its masks are cheap where a grammar does not depend on what was written before, which is worked out
when a form is compiled. No limit bounds the time of one mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.grammar import xgrammar_subset
from quire.grammar.bits import forbid, mask_words
from quire.grammar.library import GrammarError, in_short
from quire.grammar.source import LoweredSource
from quire.grammar.vocabulary import Vocabulary


class XGrammar:
    """Compiles sources for one vocabulary. Importing it imports torch and transformers too."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        tokens = list(vocabulary.tokens)
        for index in vocabulary.special_ids:
            tokens[index] = b""  # no part of a text
        info = xgrammar.TokenizerInfo(tokens, stop_token_ids=vocabulary.eos_ids)
        self._library: Any = xgrammar
        # forms are cached by GrammarCompiler, within a bound
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._num_words = mask_words(len(tokens))
        self._no_eos = np.full((1, self._num_words), -1, dtype=np.int32)
        for index in vocabulary.eos_ids:
            forbid(self._no_eos[0], index)

    @staticmethod
    def takes(source: LoweredSource) -> bool:
        return xgrammar_subset.takes(source)

    def compile(self, source: LoweredSource) -> XGrammarForm:
        try:
            form = XGrammarForm(self, self._compiled(source), source.unenforced)
        except Exception as error:  # RuntimeError, or a class of the library's own
            raise _as_grammar_error(error) from None
        # what allows no first token is refused with its request, rather than fail while it runs
        first = self.mask(tried := form.matcher())
        if tried.failure is not None or not first.any():
            raise GrammarError(tried.failure or "no text matches it")
        return form

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        """See `GrammarLibrary.fill`. In one thread: the library's batches start threads for each
        call, and two of them at once end the process.
        """
        for matcher, row in matchers:
            matcher.fill(masks, row)

    def mask(self, matcher: XGrammarMatcher) -> np.ndarray:
        """The mask [1, ceil(V/32)] int32 of one matcher."""
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        matcher.fill(mask, 0)
        return mask

    def may_go_on(self, matcher: XGrammarMatcher) -> bool:
        """Whether anything other than the end of the text may come, as far as is known."""
        mask = self.mask(matcher)
        return matcher.failure is not None or bool((mask & self._no_eos).any())

    def start(self, compiled: Any) -> Any:
        """The library's own matcher at the beginning of a text."""
        return self._library.GrammarMatcher(compiled)

    def _compiled(self, source: LoweredSource) -> Any:
        compiler, text = self._compiler, source.text
        if source.kind == "schema":
            blanks: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": 1}
            if not source.whitespace:
                blanks = {"any_whitespace": False, "separators": (",", ":")}
            return compiler.compile_json_schema(text, strict_mode=False, **blanks)
        if source.kind == "regex":
            pattern = xgrammar_subset.regex(text)
            assert pattern is not None, "takes() has checked this"
            return compiler.compile_regex(pattern)
        if source.kind == "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            text = "root ::= " + " | ".join(quoted)
        return compiler.compile_grammar(text)


class XGrammarForm:
    """A compiled grammar."""

    def __init__(self, library: XGrammar, compiled: Any, unenforced: tuple[str, ...]) -> None:
        self.unenforced = unenforced
        self._library = library
        self._compiled = compiled

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._library, self._library.start(self._compiled))


class XGrammarMatcher:
    """The state of one text in its grammar; see `Matcher`."""

    def __init__(self, library: XGrammar, native: Any) -> None:
        self.library = library
        self.failure: str | None = None
        self._native = native

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write its mask into a row of masks [G, ceil(V/32)] int32, or set `failure`."""
        try:
            self._native.fill_next_token_bitmask(masks, row)
        except Exception as error:
            self.failure = str(_as_grammar_error(error))

    def consume(self, token_ids: Sequence[int]) -> None:
        try:
            is_allowed = all(map(self._native.accept_token, token_ids))
        except Exception as error:
            raise _as_grammar_error(error) from None
        if not is_allowed:
            raise GrammarError("the output left the grammar")

    def try_token(self, token_id: int) -> bool:
        try:
            return not self._native.is_terminated() and bool(self._native.accept_token(token_id))
        except Exception as error:
            raise _as_grammar_error(error) from None

    def roll_back(self, count: int) -> None:
        try:
            self._native.rollback(count)
        except Exception as error:
            raise _as_grammar_error(error) from None

    @property
    def has_ended(self) -> bool:
        """See `Matcher`. The library knows complete texts; its mask whether more may follow."""
        if self._native.is_terminated():
            return True
        return bool(self._native.is_completed()) and not self.library.may_go_on(self)


def _as_grammar_error(error: Exception) -> GrammarError:
    """The library's words without the place in its source."""
    return GrammarError(in_short(re.sub(r"^\[[\d:]+\] \S+: ", "", str(error))))
