"""Structural tags: free text with parts in a form, as one grammar in the library's notation.

Two shapes are in use. The older one has `structures` (what begins each part, its JSON schema, what
ends it) and `triggers`; the newer one has a `format`, which is built of formats. The first is a
case of the second.

A stretch of free text ends with the first occurrence of what must follow it, which is a lexeme that
matches as little as it can; so a free text is followed by a literal, or by nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import EngineError
from quire.grammar.regular import escaped, narrowed, terminal

_ANY = "(?s:.*)"
_NOTHING = '""'


class TagError(EngineError):
    """A structural tag is invalid, or needs something that does not exist."""


@dataclass(frozen=True)
class _Literal:
    text: str


@dataclass(frozen=True)
class _Text:
    """Free text without any of `excludes`."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rule:
    """An expression of the grammar."""

    text: str


_Item = _Literal | _Text | _Rule
_Tag = Mapping[str, Any]


def tag_grammar(
    text: str,
    special_texts: Collection[str],
    json_expression: Callable[[Any], str],
    lark: Callable[[str], str],
) -> str:
    """The grammar of a structural tag (JSON text).

    `special_texts` are written with control tokens of the vocabulary, `json_expression` is that of
    a schema, and `lark` turns a grammar of a part into its notation. Raises TagError.
    """
    writer = _Writer(special_texts, json_expression, lark)
    start = writer.joined(writer.items(tag_format(json.loads(text))), True)
    return "\n".join(["%llguidance {}", f"start: {start or _NOTHING}", *writer.rules])


def tag_format(given: _Tag) -> dict[str, Any]:
    """The format of a structural tag in either shape. Raises TagError."""
    if "structures" in given or "triggers" in given:
        return _of_structures(given)
    _only(given, "structural_tag", "format", "type")
    found: dict[str, Any] = _need(given, "format", dict, "structural_tag")
    return found


class _Writer:
    """Collects the rules; a format becomes a list of items, a list of items one expression."""

    def __init__(
        self,
        special_texts: Collection[str],
        json_expression: Callable[[Any], str],
        lark: Callable[[str], str],
    ) -> None:
        self.rules: list[str] = []
        # the longest first: one may be within another
        self._special = sorted(special_texts, key=len, reverse=True)
        self._json_expression = json_expression
        self._lark = lark
        self._formats: dict[str, Callable[[_Tag], list[_Item]]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def items(self, given: object) -> list[_Item]:
        """The items that a format consists of."""
        if not isinstance(given, dict) or given.get("type") not in self._formats:
            kind = given.get("type") if isinstance(given, dict) else given
            known = ", ".join(self._formats)
            raise TagError(
                f"{str(kind)[:60]!r} is not a format of a structural tag; there is {known}"
            )
        return self._formats[given["type"]](given)

    def joined(self, items: Sequence[_Item], is_last: bool) -> str:
        """The items one after the other; `is_last`: nothing follows them."""
        parts: list[str] = []
        rest = list(items)
        while rest:
            item = rest.pop(0)
            if isinstance(item, _Rule):
                parts.append(item.text)
            elif isinstance(item, _Literal):
                parts.append(self._quoted(item.text))
            elif rest and isinstance(rest[0], _Literal) and rest[0].text:
                end = rest.pop(0)
                assert isinstance(end, _Literal)
                parts.append(self._until(item, end.text))
            elif not rest and is_last:
                parts.append(self._free(item.excludes))
            else:
                raise TagError("any_text must be followed by a text that ends it, or by nothing")
        return " ".join(filter(None, parts))

    # formats

    def _const(self, given: _Tag) -> list[_Item]:
        _only(given, "const_string", "type", "value")
        return [_Literal(_need(given, "value", str, "const_string"))]

    def _schema(self, given: _Tag) -> list[_Item]:
        _only(given, "json_schema", "type", "json_schema", "style")
        if given.get("style", "json") != "json":
            style = str(given["style"])[:60]
            raise TagError(f"json_schema has no style {style!r} here; there is json")
        if not isinstance(schema := given.get("json_schema"), dict | bool):
            raise TagError("json_schema needs a schema")
        return [_Rule(self._json_expression(schema))]

    def _regex(self, given: _Tag) -> list[_Item]:
        _only(given, "regex", "type", "pattern")
        return [_Rule(terminal(narrowed(_need(given, "pattern", str, "regex"))))]

    def _grammar(self, given: _Tag) -> list[_Item]:
        _only(given, "grammar", "type", "grammar")
        text = self._lark(_need(given, "grammar", str, "grammar"))
        return [_Rule(f"%lark {{\n{text}\n}}")]

    def _any_text(self, given: _Tag) -> list[_Item]:
        _only(given, "any_text", "type", "excludes")
        return [_Text(tuple(_texts(given, "excludes", "any_text", least=0)))]

    def _sequence(self, given: _Tag) -> list[_Item]:
        _only(given, "sequence", "type", "elements")
        return [item for each in _list(given, "elements", "sequence") for item in self.items(each)]

    def _or(self, given: _Tag) -> list[_Item]:
        _only(given, "or", "type", "elements")
        each = [self.items(element) for element in _list(given, "elements", "or")]
        return [self._one_of([self.joined(items, False) for items in each])]

    def _tag(self, given: _Tag) -> list[_Item]:
        _only(given, "tag", "type", "begin", "content", "end")
        return self._tag_items(given, _need(given, "begin", str, "tag"))

    def _tag_items(self, given: _Tag, begin: str) -> list[_Item]:
        """The items of a tag with its own beginning, or what a trigger leaves of `begin`."""
        ends = given.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            raise TagError("a tag needs an end: a text, or several of them")
        content = self.items(given.get("content"))
        end: _Item = _Literal(ends[0])
        if len(ends) > 1:
            end = self._one_of([self._quoted(text) for text in ends])
        return [_Literal(begin), *content, end]

    def _triggered(self, given: _Tag) -> list[_Item]:
        kind = "triggered_tags"
        _only(given, kind, *_TRIGGERED)
        triggers, tags = _texts(given, "triggers", kind), _list(given, "tags", kind)
        if any(a != b and b.startswith(a) for a in triggers for b in triggers):
            raise TagError("no trigger may begin with another one")
        excludes = tuple(_texts(given, "excludes", kind, least=0))
        untriggered = set(range(len(tags)))
        choices = []
        for trigger in dict.fromkeys(triggers):
            rests = []
            for place, tag in enumerate(tags):
                begin = _begin(tag)
                if begin.startswith(trigger):
                    untriggered.discard(place)
                    # the trigger itself ends the free text before, and is common to all its tags
                    items = self._tag_items(tag, begin.removeprefix(trigger))
                    rests.append(self.joined(items, False))
            if rests:
                head = self._until(_Text(excludes), trigger)
                choices.append(f"{head} {self._one_of(rests).text}")
        if untriggered:
            raise TagError(f"{_begin(tags[untriggered.pop()])[:60]!r} begins with no trigger")
        one = self._one_of(choices).text
        free = self._free((*excludes, *triggers))
        if given.get("stop_after_first", False):
            return [_Rule(one if given.get("at_least_one", False) else f"({one} | {free})")]
        return [_Rule(f"{one}{'+' if given.get('at_least_one', False) else '*'} {free}")]

    def _separated(self, given: _Tag) -> list[_Item]:
        kind = "tags_with_separator"
        _only(given, kind, "type", "tags", "separator", "at_least_one", "stop_after_first")
        tags = [
            self.joined(self._tag_items(t, _begin(t)), False) for t in _list(given, "tags", kind)
        ]
        one = self._one_of(tags).text
        separator = self._quoted(_need(given, "separator", str, kind))
        several = one if given.get("stop_after_first", False) else f"{one} ({separator} {one})*"
        return [_Rule(several if given.get("at_least_one", False) else f"({several})?")]

    # expressions

    def _one_of(self, choices: Sequence[str]) -> _Rule:
        if len(choices) == 1:
            return _Rule(f"({choices[0] or _NOTHING})")
        return _Rule(self._new_rule("either", " | ".join(choice or _NOTHING for choice in choices)))

    def _until(self, text: _Text, end: str) -> str:
        """Free text up to and including the first `end`."""
        free = self._free(text.excludes)
        if self._is_special(end):
            return f"{free} {self._quoted(end)}"
        if any(special in end for special in self._special):
            raise TagError(f"{end[:60]!r} mixes a control token with letters after free text")
        # lazy: the first occurrence ends the text
        return self._new_rule("until", f"{free} {json.dumps(end)}", "[lazy]")

    def _free(self, excludes: Sequence[str]) -> str:
        """A rule for any text without these; control tokens are not text."""
        name = f"TEXT_{len(self.rules)}"
        parts = [f"/{_ANY}/"]
        letters = (text for text in excludes if not self._is_special(text))
        parts += [f"~{terminal(_ANY + escaped(text) + _ANY)}" for text in letters]
        self.rules.append(f"{name}: {' & '.join(parts)}")
        return name

    def _new_rule(self, stem: str, body: str, options: str = "") -> str:
        name = f"{stem}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _is_special(self, text: str) -> bool:
        return text in self._special

    def _quoted(self, text: str) -> str:
        """A literal; control tokens in it are written as tokens."""
        for special in self._special:
            before, found, after = text.partition(special)
            if found:
                name = special if special.startswith("<") and special.endswith(">") else None
                if name is None:
                    raise TagError(f"the control token {special[:60]!r} cannot be asked for")
                return " ".join(filter(None, [self._quoted(before), name, self._quoted(after)]))
        return json.dumps(text) if text else ""


_TRIGGERED = ("type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes")


def _of_structures(given: _Tag) -> dict[str, Any]:
    """The older shape in the newer one."""
    _only(given, "structural_tag", "type", "structures", "triggers")
    tags = []
    for each in _list(given, "structures", "structural_tag"):
        if not isinstance(each, dict):
            raise TagError("a structure is an object with begin, schema and end")
        _only(each, "a structure", "begin", "schema", "end")
        schema = {"type": "json_schema", "json_schema": each.get("schema", True)}
        tags.append({"begin": each.get("begin"), "content": schema, "end": each.get("end", "")})
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


def _begin(tag: object) -> str:
    if not isinstance(tag, dict):
        raise TagError("a tag is an object with begin, content and end")
    _only(tag, "tag", "type", "begin", "content", "end")
    return str(_need(tag, "begin", str, "tag"))


def _only(given: _Tag, what: str, *names: str) -> None:
    if unknown := sorted(set(given) - set(names)):
        raise TagError(f"{what} has no field {', '.join(map(str, unknown))[:80]}")


def _need(given: _Tag, name: str, kind: type, what: str) -> Any:
    value = given.get(name)
    if not isinstance(value, kind):
        raise TagError(f"{what} needs {name}")
    return value


def _list(given: _Tag, name: str, what: str) -> list[Any]:
    found: list[Any] = _need(given, name, list, what)
    if not found:
        raise TagError(f"{what} needs at least one of its {name}")
    return found


def _texts(given: _Tag, name: str, what: str, least: int = 1) -> list[str]:
    found = given.get(name) or []
    is_right = isinstance(found, list) and all(isinstance(text, str) and text for text in found)
    if not is_right or len(found) < least:
        raise TagError(f"{what} needs {name}: texts that are not empty")
    return found
