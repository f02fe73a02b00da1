"""The library that makes masks: llguidance, behind the few names that the rest of this folder uses.

A grammar is compiled once into a `Form`; every request has a `Matcher` of its own, which starts as
a copy. Nothing here limits time; the library's own limits bound each call (about 20 ms).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import EngineError
from quire.grammar.regular import narrowed, one_of
from quire.grammar.source import GrammarSource
from quire.grammar.structural_tag import TagError, tag_grammar
from quire.grammar.vocabulary import Vocabulary

_MAX_LEXER_STATES = 50_000
"""Of some 2 KB each: what a request's matcher may keep."""
_MAX_SHOWN = 300


class GrammarError(EngineError):
    """A grammar cannot be compiled, or an output does not follow it; the text says why."""


class Guidance:
    """Compiles sources for one vocabulary. Making it takes about a second for 152k tokens, all of
    it with the interpreter's lock held.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance  # 8 MB that a server without such requests never loads

        self._library: Any = llguidance
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(vocabulary.tokens),
            eos_token=vocabulary.eos_ids,
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )

    def compile(self, source: GrammarSource) -> Form:
        """Raises GrammarError for a source that is wrong, too large, or that nothing matches.

        The first mask is computed here, so that copies need not.
        """
        try:
            matcher = self._library.LLMatcher(
                self._tokenizer, self._lowered(source), log_level=0, limits=self._limits
            )
        except BaseException as error:
            raise _told(error) from None
        if matcher.is_error():
            raise GrammarError(_first_words(matcher.get_error()))
        first = np.zeros((1, -(-len(self._vocabulary.tokens) // 32)), dtype=np.int32)
        MaskFiller(1).fill([(Matcher(matcher), 0)], first)
        if (failure := Matcher(matcher).failure) is not None or not first.any():
            raise GrammarError(failure or "no text matches it")
        return Form(matcher)

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


class Form:
    """A compiled grammar. Matchers may be taken from it by one thread at a time."""

    def __init__(self, prototype: Any) -> None:
        self._prototype = prototype

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        return Matcher(self._prototype.deep_copy())


class Matcher:
    """How far one text has come in its grammar."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens. Raises GrammarError if they are not what may come."""
        try:
            is_allowed = self.advance_by(token_ids)
        except BaseException as error:
            raise _told(error) from None
        if not is_allowed:
            raise GrammarError(self.failure or "the output left the grammar")

    def advance_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the library took all these tokens."""
        return all(map(self.native.consume_token, token_ids))

    @property
    def failure(self) -> str | None:
        """What went wrong, from which on the matcher is of no more use; None: nothing."""
        return _first_words(self.native.get_error()) if self.native.is_error() else None

    @property
    def has_ended(self) -> bool:
        """Whether the text is complete and nothing may follow it."""
        return bool(self.native.is_stopped())


class MaskFiller:
    """Computes many masks at once, on `num_threads` threads without the interpreter's lock."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor: Any = None

    def fill(self, matchers: Sequence[tuple[Matcher, int]], masks: np.ndarray) -> None:
        """Write the mask of each matcher into its row of masks [G, ceil(V/32)] int32: bit i of word
        w is token 32 * w + i, 1 where it may come. A matcher that fails says so in `failure`.
        Raises GrammarError where it cannot be told which one failed.
        """
        try:
            self._fill(matchers, masks)
        except BaseException as error:
            raise _told(error) from None

    def _fill(self, matchers: Sequence[tuple[Matcher, int]], masks: np.ndarray) -> None:
        if len(matchers) == 1:
            matcher, row = matchers[0]
            matcher.native.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.native, row) for matcher, row in matchers],
            masks.ctypes.data,
            masks.strides[0],
            len(masks),
        )


def _json_options(source: GrammarSource) -> dict[str, Any]:
    if not source.whitespace:
        return {"whitespace_flexible": False, "lenient": False}
    return {"whitespace_pattern": source.whitespace, "lenient": False}


def _told(error: BaseException) -> BaseException:
    """A panic of the library, which is no Exception, as an error of the grammar; others stay."""
    if type(error).__module__ == "pyo3_runtime":
        return GrammarError("the library that makes masks failed")
    return error


def _first_words(error: str) -> str:
    """The first lines of the library's text, without what it says of its own state."""
    said = " ".join(error.split("<state>")[0].split())
    return said if len(said) <= _MAX_SHOWN else said[:_MAX_SHOWN] + "..."
