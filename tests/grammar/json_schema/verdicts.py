"""How well a schema is enforced, by values that follow it, by others, and by random texts."""

import copy
import json
import random
from collections import Counter
from dataclasses import dataclass

import jsonschema
import numpy as np

from quire import embedded
from quire.grammar.bits import mask_words
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.library import GrammarError
from quire.grammar.source import source_of
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.params import StructuredOutputsParams

KINDS = ("exact", "narrower", "annotated", "refused", "late", "wrong")
"""exact: what follows the schema can be written, and nothing else; narrower: nothing else, but not
all of it; annotated: so are the keywords that are named, and without them it is exact;
refused: at admission; late: a text comes to where nothing may follow; wrong: a text or value does
not follow the schema.
"""
MOST_TOKENS = 120
SOURCE = VocabularySource(str(embedded.path()), "hf", 3072)


@dataclass(frozen=True)
class Verdict:
    """`kind`: one of KINDS; `why`: an example, or the error."""

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Judge:
    """Judges schemas with the libraries of a backend."""

    vocabulary: Vocabulary
    libraries: GrammarLibraries
    validator: type = jsonschema.Draft202012Validator

    @classmethod
    def of(cls, backend):
        vocabulary = Vocabulary.read(SOURCE)
        return cls(vocabulary, GrammarLibraries(vocabulary, backend))

    def verdict(self, schema, valid=(), invalid=(), *, is_open=False, num_walks=4):
        """`is_open`: objects are open, as in the standard. Without it a value whose object has
        properties that are not declared does not follow the schema.
        """
        asked = StructuredOutputsParams(json=schema, allow_additional_properties=is_open)
        try:
            form = self.libraries.compile(source_of(asked))
        except GrammarError as error:
            return Verdict("refused", str(error))
        rest = without_notes(schema, form.unenforced)
        validator = self.validator_of(rest)
        texts = ((value, self.spelling(form, value)) for value in invalid)
        written = [(value, text) for value, text in texts if text is not None]
        for value, text in written:
            if not form.unenforced or not validator.is_valid(value):
                return Verdict("wrong", f"{text} can be written")
        for seed in range(num_walks):
            found = self._walked(form, rest, validator, seed)
            if found is not None:
                return found
        missing = [value for value in valid if self.spelling(form, value) is None]
        if form.unenforced:
            missing = [value for value in missing if validator.is_valid(value)]
            if not missing:
                return Verdict("annotated", ", ".join(form.unenforced))
        if missing:
            return Verdict("narrower", f"{json.dumps(missing[0])} cannot be written")
        return Verdict("exact")

    def validator_of(self, schema):
        """Judges values; of a bound that is a flag, as before draft 6, by that draft."""
        is_old = any(
            f'"exclusive{end}": true' in json.dumps(schema) for end in ("Minimum", "Maximum")
        )
        return (jsonschema.Draft4Validator if is_old else self.validator)(schema)

    def spelling(self, form, value):
        """A text of the value that the form allows, or None."""
        trial = _Trial(self, form)
        return next((text for text in trial.texts("", value) if trial.may_end(text)), None)

    def allows(self, form, text):
        """Whether a text follows the form, in tokens of one byte."""
        trial = _Trial(self, form)
        return trial.may_begin(text) and trial.may_end(text)

    def allowed(self, matcher):
        """The tokens that may come next; none after a failure."""
        if matcher.has_ended:
            return []
        mask = np.zeros((1, mask_words(len(self.vocabulary.tokens))), dtype=np.int32)
        matcher.library.fill([(matcher, 0)], mask)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        return [] if matcher.failure else bits.nonzero()[0].tolist()

    def _walked(self, form, schema, validator, seed):
        """What is wrong with a random text, or None."""
        rng, matcher, ids = random.Random(seed), form.matcher(), []
        while not matcher.has_ended:
            allowed = self.allowed(matcher)
            if not allowed:
                text = self._text(ids)
                return Verdict("late", f"nothing may follow {text!r} ({matcher.failure})")
            index = self._drawn(rng, allowed)
            if index in self.vocabulary.eos_ids:
                break
            if len(ids) == MOST_TOKENS:
                return None
            matcher.consume([index])
            ids.append(index)
        text = self._text(ids)
        return self._wrong(text, schema, validator)

    def _drawn(self, rng, allowed):
        """Of the tokens, those that end something are drawn often."""
        tokens = self.vocabulary.tokens
        closing = [i for i in allowed if tokens[i] in (b'"', b"}", b"]", b",")]
        ends = [i for i in allowed if i in self.vocabulary.eos_ids]
        return rng.choice(ends or closing or allowed if rng.random() < 0.5 else allowed)

    def _text(self, ids):
        return b"".join(self.vocabulary.tokens[i] for i in ids).decode(errors="replace")

    def _wrong(self, text, schema, validator):
        try:
            value = json.loads(text, object_pairs_hook=_without_repeats)
        except _Repeated as repeated:
            if repeated.names.isdisjoint(declared(schema)):
                return None  # masks cannot prevent that others come again
            return Verdict("wrong", f"{text} has a declared property twice")
        except ValueError:
            return Verdict("wrong", f"{text!r} is not JSON")
        try:
            is_right = validator.is_valid(value)
        except Exception:  # it refers to what is not there, for the validator
            return None
        return None if is_right else Verdict("wrong", f"{text} is not valid")


class _Trial:
    """Tries texts of one form, most of which begin as the last one did."""

    def __init__(self, judge, form):
        self._judge = judge
        self._form = form
        self._single = {t: i for i, t in enumerate(judge.vocabulary.tokens) if len(t) == 1}
        self._matcher, self._taken = form.matcher(), b""

    def may_begin(self, text):
        """Whether a text that follows the form begins so."""
        data = text.encode()
        if not data.startswith(self._taken):
            self._matcher, self._taken = self._form.matcher(), b""
        for byte in data[len(self._taken) :]:
            if not self._matcher.try_token(self._single[bytes([byte])]):
                self._matcher, self._taken = self._form.matcher(), b""
                return False
            self._taken += bytes([byte])
        return True

    def may_end(self, text):
        """Whether the text follows the form, after `may_begin`."""
        assert self.may_begin(text)
        allowed = self._judge.allowed(self._matcher)
        is_end = not set(self._judge.vocabulary.eos_ids).isdisjoint(allowed)
        return self._matcher.has_ended or is_end

    def texts(self, before, value):
        """The texts of a value after another one that may come: its properties in every order,
        integers without a point.
        """
        match value:
            case dict():
                yield from self._objects(f"{before}{{", value, "")
            case list():
                yield from self._lists(f"{before}[", value, "")
            case _:
                for text in spellings(value):
                    if self.may_begin(before + text):
                        yield before + text

    def _objects(self, before, left, comma):
        if not left and self.may_begin(f"{before}}}"):
            yield f"{before}}}"
        for name in left:
            head = f"{before}{comma}{json.dumps(name, ensure_ascii=False)}:"
            if self.may_begin(head):
                rest = {other: value for other, value in left.items() if other != name}
                for text in self.texts(head, left[name]):
                    yield from self._objects(text, rest, ",")

    def _lists(self, before, left, comma):
        if not left and self.may_begin(f"{before}]"):
            yield f"{before}]"
        for text in self.texts(before + comma, left[0]) if left else ():
            yield from self._lists(text, left[1:], ",")


class _Repeated(Exception):
    """An object has properties of these names more than once."""

    def __init__(self, names):
        super().__init__(names)
        self.names = names


def _without_repeats(pairs):
    names = Counter(name for name, _ in pairs)
    if repeated := {name for name, count in names.items() if count > 1}:
        raise _Repeated(repeated)
    return dict(pairs)


def without_notes(schema, pointers):
    """A schema without the keywords, or alternatives, that these pointers lead to."""
    rest = copy.deepcopy(schema)
    for pointer in sorted(pointers, key=_order, reverse=True):
        inner = rest
        *steps, last = _steps(pointer)
        for step in steps:
            inner = inner[int(step) if isinstance(inner, list) else step]
        del inner[int(last) if isinstance(inner, list) else last]
    return rest


def _steps(pointer):
    steps = pointer.split("/")[1:]
    return [step.replace("~1", "/").replace("~0", "~") for step in steps]


def _order(pointer):
    return [(int(s), "") if s.isdecimal() else (0, s) for s in _steps(pointer)]


def declared(schema):
    """The names of all properties that are declared anywhere in a schema."""
    if isinstance(schema, list):
        return {name for each in schema for name in declared(each)}
    if not isinstance(schema, dict):
        return set()
    own = schema.get("properties")
    names = {*own} if isinstance(own, dict) else set()
    return names.union(*map(declared, schema.values()))


def spellings(value):
    """The texts of a value without parts."""
    if isinstance(value, float) and value.is_integer():
        return [str(int(value))]
    if isinstance(value, float):
        return [*dict.fromkeys((json.dumps(value), f"{value:f}"))]
    return [json.dumps(value, ensure_ascii=False)]
