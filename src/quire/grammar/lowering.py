"""Turns requested forms into what libraries compile: unfolded schemas, tags as a grammar."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from quire.grammar.json_schema.openness import Openness
from quire.grammar.json_schema.patterns import all_but, for_library
from quire.grammar.json_schema.places import SchemaError, joined
from quire.grammar.json_schema.preparing import PreparedSchema
from quire.grammar.library import GrammarError, in_short
from quire.grammar.regular import PatternError, check_escapes
from quire.grammar.source import GrammarSource, LoweredSource
from quire.grammar.structural_tag import TagError, tag_grammar

_NO_TEXT = "Unsatisfiable"


def lowered(source: GrammarSource, special_texts: Collection[str]) -> LoweredSource:
    """Lower a form. `special_texts` are those of the vocabulary's control tokens.

    Raises GrammarError for a form that is invalid or cannot be enforced.
    """
    if source.kind == "json":
        return _schema(source)
    if source.kind == "structural_tag":
        schemas = _TagSchemas(source)
        try:
            text = tag_grammar(source.text, special_texts, schemas.expression, lark_of)
        except (TagError, PatternError) as error:
            raise GrammarError(str(error)) from None
        unenforced = tuple(schemas.unenforced)
        return LoweredSource("lark", text, source.whitespace, unenforced=unenforced)
    if source.kind == "grammar" and "::=" not in source.text:
        return LoweredSource("lark", source.text, source.whitespace)
    return LoweredSource(source.kind, source.text, source.whitespace)


def lark_of(text: str) -> str:
    """A grammar in Lark's notation, or in GBNF, which has `::=`. Raises GrammarError."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:
        raise GrammarError(f"it is not GBNF: {in_short(str(error))}") from None


def _schema(source: GrammarSource) -> LoweredSource:
    prepared = PreparedSchema(
        json.loads(source.text), Openness(source.openness), GuidancePatterns()
    )
    given = json_options(source.whitespace)
    if not prepared.is_exact:
        text = prepared.lark(given)
        return LoweredSource("lark", text, source.whitespace, unenforced=prepared.unenforced)
    text, options = json.dumps(prepared.schema()), prepared.options(given)
    return LoweredSource("schema", text, source.whitespace, options, prepared.unenforced)


class _TagSchemas:
    """Lowers the schemas of a structural tag."""

    def __init__(self, source: GrammarSource) -> None:
        self.unenforced: list[str] = []
        self._openness = Openness(source.openness)
        self._options = json_options(source.whitespace)
        self._patterns = GuidancePatterns()

    def expression(self, schema: Any) -> str:
        """Return an expression in Lark's notation for the JSON of a schema."""
        prepared = PreparedSchema(schema, self._openness, self._patterns)
        self.unenforced += prepared.unenforced
        return f"%lark {{\n{prepared.lark(self._options)}\n}}"


def json_options(whitespace: str) -> dict[str, Any]:
    """The options of llguidance for JSON with this between its tokens."""
    if not whitespace:
        return {"whitespace_flexible": False, "lenient": False}
    return {"whitespace_pattern": whitespace, "lenient": False}


class GuidancePatterns:
    """The answers of llguidance to questions about patterns."""

    def __init__(self) -> None:
        self._errors: dict[str, str] = {}

    def error_of(self, pattern: str) -> str | None:
        try:
            check_escapes(pattern)
        except PatternError as invalid:
            return str(invalid)
        if pattern not in self._errors:
            error = _error_of({"type": "string", "pattern": for_library(pattern)})
            reason = error.rpartition("error: ")[2] or error
            # a pattern that no text has is valid, and pruned later
            self._errors[pattern] = "" if _NO_TEXT in error else in_short(reason)
        return self._errors[pattern] or None

    def has_other_names(self, pattern: str, names: Sequence[str]) -> bool:
        """See `PatternRules`. Where there are none, it would let an object go on that cannot."""
        others = all_but(names)
        if others is None:
            raise SchemaError(joined("#", "patternProperties"), "a name is too long to be compared")
        rules = [{"pattern": for_library(pattern)}, {"pattern": others}]
        # the library finds out whether both patterns have a text in common
        return _NO_TEXT not in _error_of({"type": "string", "allOf": rules})


def _error_of(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
