"""Chooses the library that compiles a form."""

from __future__ import annotations

from quire.grammar.guidance import Guidance
from quire.grammar.library import Form, GrammarLibrary
from quire.grammar.lowering import lowered
from quire.grammar.source import GrammarSource
from quire.grammar.vocabulary import Vocabulary
from quire.grammar.xgrammar import XGrammar

_OF_BACKEND: dict[str, tuple[type[GrammarLibrary], ...]] = {
    "guidance": (Guidance,),
    "xgrammar": (XGrammar, Guidance),
}
"""A form is compiled by the first library that takes it."""


class GrammarLibraries:
    """A backend's libraries, made with their first form; llguidance has `num_threads` threads."""

    def __init__(self, vocabulary: Vocabulary, backend: str, num_threads: int = 1) -> None:
        self._vocabulary = vocabulary
        self._kinds = _OF_BACKEND[backend]
        self._num_threads = num_threads
        self._made: dict[type, GrammarLibrary] = {}

    def prepare(self) -> None:
        """Make all of them now."""
        for kind in self._kinds:
            self._library(kind)

    def compile(self, source: GrammarSource) -> Form:
        """Compile a source. Raises GrammarError if invalid, unenforceable, too large or empty."""
        special = [text for text in self._vocabulary.special_texts if text]
        form = lowered(source, special)
        # of the lowered form: what is enforced can be read from its few keywords
        kind = next(kind for kind in self._kinds if kind.takes(form))
        return self._library(kind).compile(form)

    def _library(self, kind: type[GrammarLibrary]) -> GrammarLibrary:
        if kind not in self._made:
            self._made[kind] = (
                Guidance(self._vocabulary, self._num_threads)
                if kind is Guidance
                else XGrammar(self._vocabulary)
            )
        return self._made[kind]
