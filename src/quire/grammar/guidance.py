"""llguidance as a library that makes masks.

A grammar is compiled once; every request has a matcher of its own, which starts as a copy. The
library's own limits bound each call for a mask (about 20 ms).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.grammar.bits import mask_words
from quire.grammar.library import GrammarError, in_short
from quire.grammar.lowering import lark_of
from quire.grammar.regular import PatternError, narrowed, one_of
from quire.grammar.source import LoweredSource
from quire.grammar.vocabulary import Vocabulary

_INTERNAL = re.compile("<(?:state|backtrace|non-verbose)")
"""Beginnings of the parts of an error that are of no use to users."""
_TOO_LARGE = re.compile("[Tt]oo (many|large)|max is|fuel exhausted|assertion failed: grammar.sym")
_OUR_WORDS = {
    "NoExtensionBias": "no text goes on from here",
    "Unsatisfiable schema": "no text follows a part of it that has to be there",
    "are not disjoint": "patterns of patternProperties overlap, so that a name may have several",
    "min/maxProperties only": (
        "minProperties and maxProperties are supported where every declared property is required, "
        "or where at least one or at most one of those declared may be there"
    ),
}
"""Errors of the library that a user cannot read, in words."""
_MAX_LEXER_STATES = 50_000
"""The most states that a request's matcher may keep, of about 2 KB each."""


class Guidance:
    """Compiles sources for one vocabulary. Making it takes about a second for 152k tokens, all of
    it with the interpreter's lock held.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        import llguidance  # 8 MB that a server without such requests never loads

        self._library: Any = llguidance
        self._num_threads = num_threads
        self._executor: Any = None
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(vocabulary.tokens),
            eos_token=vocabulary.eos_ids,
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )

    @staticmethod
    def takes(source: LoweredSource) -> bool:
        return True

    def compile(self, source: LoweredSource) -> GuidanceForm:
        """See `GrammarLibrary`. The first mask is computed here, so that copies need not."""
        try:
            matcher = self._library.LLMatcher(
                self._tokenizer, self._grammar(source), log_level=0, limits=self._limits
            )
        except BaseException as error:
            raise _as_grammar_error(error) from None
        if matcher.is_error():
            raise GrammarError(_first_words(matcher.get_error()))
        first = np.zeros((1, mask_words(len(self._vocabulary.tokens))), dtype=np.int32)
        self.fill([(tried := GuidanceMatcher(self, matcher), 0)], first)
        # a grammar that matches nothing compiles, and would fail its request at the first token
        if tried.failure is not None or not first.any():
            raise GrammarError(tried.failure or "no text matches it")
        return GuidanceForm(self, matcher, source.unenforced)

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        """See `GrammarLibrary.fill`. The interpreter's lock is not held."""
        try:
            self._fill(matchers, masks)
        except BaseException as error:
            raise _as_grammar_error(error) from None

    def _fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        # one row needs no pool of threads, which would be started for it
        if len(matchers) == 1:
            matcher, row = matchers[0]
            matcher.native.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
            return
        if self._executor is None:
            self._executor = self._library.LLExecutor(self._num_threads)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.native, row) for matcher, row in matchers],
            masks.ctypes.data,
            masks.strides[0],
            len(masks),
        )

    def _grammar(self, source: LoweredSource) -> str:
        """The source in the library's own notation."""
        matcher, text = self._library.LLMatcher, source.text
        match source.kind:
            case "schema":
                return str(matcher.grammar_from_json_schema(text, overrides=source.json_options))
            case "lark":
                return str(matcher.grammar_from_lark(text))
            case "grammar":
                return str(matcher.grammar_from_lark(lark_of(text)))
            case "choice":
                return str(matcher.grammar_from_regex(one_of(json.loads(text))))
            case "regex":
                return str(matcher.grammar_from_regex(narrowed(text)))
        raise GrammarError(f"{source.kind} is not known")


class GuidanceForm:
    """A compiled grammar."""

    def __init__(self, library: Guidance, prototype: Any, unenforced: tuple[str, ...]) -> None:
        self.unenforced = unenforced
        self._library = library
        self._prototype = prototype

    def matcher(self) -> GuidanceMatcher:
        # a copy has the first mask computed, a new matcher would do that again
        return GuidanceMatcher(self._library, self._prototype.deep_copy())


class GuidanceMatcher:
    """The state of one text in its grammar; see `Matcher`."""

    def __init__(self, library: Guidance, native: Any) -> None:
        self.library = library
        self.native = native

    def consume(self, token_ids: Sequence[int]) -> None:
        try:
            is_allowed = self.advance_by(token_ids)
        except BaseException as error:
            raise _as_grammar_error(error) from None
        if not is_allowed:
            raise GrammarError(self.failure or "the output left the grammar")

    def try_token(self, token_id: int) -> bool:
        try:
            return self.advance_by([token_id])
        except BaseException as error:
            raise _as_grammar_error(error) from None

    def roll_back(self, count: int) -> None:
        try:
            self.native.rollback(count)
        except BaseException as error:
            raise _as_grammar_error(error) from None
        if self.native.is_error():
            raise GrammarError(self.failure or "it cannot go back")

    def advance_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the library accepted all these tokens."""
        return bool(self.native.try_consume_tokens(list(token_ids)) == len(token_ids))

    @property
    def failure(self) -> str | None:
        return _first_words(self.native.get_error()) if self.native.is_error() else None

    @property
    def has_ended(self) -> bool:
        return bool(self.native.is_stopped())


def _as_grammar_error(error: BaseException) -> BaseException:
    """Convert a panic of the library, which is not an Exception, to a GrammarError."""
    if isinstance(error, PatternError):
        return GrammarError(str(error))
    # by its name, since the class of a panic is not exported
    if type(error).__module__ == "pyo3_runtime":
        return GrammarError("the library that makes masks failed")
    return error


def _first_words(error: str) -> str:
    """The first lines of the library's text, without its internal state."""
    text = in_short(_INTERNAL.split(error)[0])
    for theirs, ours in _OUR_WORDS.items():
        if theirs in text:
            return ours
    if _TOO_LARGE.search(text):
        return f"it is too large for the library that makes masks ({text})"
    return text
