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
from quire.grammar.regular import narrowed, one_of
from quire.grammar.source import GrammarSource
from quire.grammar.structural_tag import TagError, tag_grammar
from quire.grammar.vocabulary import Vocabulary

_INTERNAL = re.compile("<(?:state|backtrace|non-verbose)")
"""What begins the parts of an error that are of no use to users."""
_TOO_LARGE = re.compile("[Tt]oo (many|large)|max is|fuel exhausted|assertion failed: grammar.sym")
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
    def takes(source: GrammarSource) -> bool:
        """Return True: it enforces every form."""
        return True

    def compile(self, source: GrammarSource) -> GuidanceForm:
        """See `GrammarLibrary`. The first mask is computed here, so that copies need not."""
        try:
            matcher = self._library.LLMatcher(
                self._tokenizer, self._lowered(source), log_level=0, limits=self._limits
            )
        except BaseException as error:
            raise _as_grammar_error(error) from None
        if matcher.is_error():
            raise GrammarError(_first_words(matcher.get_error()))
        first = np.zeros((1, mask_words(len(self._vocabulary.tokens))), dtype=np.int32)
        self.fill([(tried := GuidanceMatcher(self, matcher), 0)], first)
        if tried.failure is not None or not first.any():
            raise GrammarError(tried.failure or "no text matches it")
        return GuidanceForm(self, matcher)

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        """See `GrammarLibrary.fill`. The interpreter's lock is not held."""
        try:
            self._fill(matchers, masks)
        except BaseException as error:
            raise _as_grammar_error(error) from None

    def _fill(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
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

    def _lowered(self, source: GrammarSource) -> str:
        """The source in the library's own notation."""
        matcher, text = self._library.LLMatcher, source.text
        if source.kind == "json":
            return str(matcher.grammar_from_json_schema(text, overrides=_json_options(source)))
        if source.kind == "choice":
            return str(matcher.grammar_from_regex(one_of(json.loads(text))))
        if source.kind == "regex":
            return str(matcher.grammar_from_regex(narrowed(text)))
        if source.kind == "grammar":
            return str(matcher.grammar_from_lark(self._lark(text)))
        if source.kind == "structural_tag":
            return self._tags(source)
        raise GrammarError(f"{source.kind} is not known")

    def _tags(self, source: GrammarSource) -> str:
        special = [text for text in self._vocabulary.special_texts if text]
        try:
            return tag_grammar(source.text, special, _json_options(source), self._lark)
        except TagError as error:
            raise GrammarError(str(error)) from None

    def _lark(self, text: str) -> str:
        """A grammar in Lark's notation, or in GBNF, which has `::=`."""
        if "::=" not in text:
            return text
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return str(any_to_lark(text))
        except Exception as error:
            raise GrammarError(f"it is no GBNF: {_first_words(str(error))}") from None


class GuidanceForm:
    """A compiled grammar."""

    def __init__(self, library: Guidance, prototype: Any) -> None:
        self._library = library
        self._prototype = prototype

    def matcher(self) -> GuidanceMatcher:
        """A matcher at the beginning of a text."""
        return GuidanceMatcher(self._library, self._prototype.deep_copy())


class GuidanceMatcher:
    """The state of one text in its grammar; see `Matcher`."""

    def __init__(self, library: Guidance, native: Any) -> None:
        self.library = library
        self.native = native

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. Raises GrammarError if they are not allowed."""
        try:
            is_allowed = self.advance_by(token_ids)
        except BaseException as error:
            raise _as_grammar_error(error) from None
        if not is_allowed:
            raise GrammarError(self.failure or "the output left the grammar")

    def try_token(self, token_id: int) -> bool:
        """See `Matcher.try_token`."""
        try:
            return bool(self.native.try_consume_tokens([token_id]) == 1)
        except BaseException as error:
            raise _as_grammar_error(error) from None

    def roll_back(self, count: int) -> None:
        """See `Matcher.roll_back`."""
        try:
            self.native.rollback(count)
        except BaseException as error:
            raise _as_grammar_error(error) from None
        if self.native.is_error():
            raise GrammarError(self.failure or "it cannot go back")

    def advance_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the library accepted all these tokens."""
        return all(map(self.native.consume_token, token_ids))

    @property
    def failure(self) -> str | None:
        """The error after which the matcher can no longer be used; None without an error."""
        return _first_words(self.native.get_error()) if self.native.is_error() else None

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and nothing may follow it."""
        return bool(self.native.is_stopped())


def _json_options(source: GrammarSource) -> dict[str, Any]:
    if not source.whitespace:
        return {"whitespace_flexible": False, "lenient": False}
    return {"whitespace_pattern": source.whitespace, "lenient": False}


def _as_grammar_error(error: BaseException) -> BaseException:
    """Convert a panic of the library, which is not an Exception, to a GrammarError."""
    if type(error).__module__ == "pyo3_runtime":
        return GrammarError("the library that makes masks failed")
    return error


def _first_words(error: str) -> str:
    """The first lines of the library's text, without its internal state."""
    text = in_short(_INTERNAL.split(error)[0])
    if _TOO_LARGE.search(text):
        return f"it is too large for the library that makes masks ({text})"
    return text
