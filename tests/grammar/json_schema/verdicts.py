"""How well a schema is enforced: what its masks make of values that follow it and of others, and
what random texts of them are.
"""

import itertools
import json
import random
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
all of it; annotated: so are the keywords that are named, and the rest is exact or narrower;
refused: at admission; late: a text comes to where nothing may follow; wrong: a text or value does
not follow the schema.
"""
MOST_SPELLINGS = 300
MOST_TOKENS = 120
SOURCE = VocabularySource(str(embedded.path()), "hf", 3072)


@dataclass(frozen=True)
class Verdict:
    """`kind`: one of KINDS; `why`: an example, or the error. `written`: the text of a value that
    does not follow the schema, if one can be written.
    """

    kind: str
    why: str = ""
    written: str | None = None


@dataclass(frozen=True)
class Judge:
    """Judges schemas with the libraries of a backend."""

    vocabulary: Vocabulary
    libraries: GrammarLibraries
    validator: type = jsonschema.Draft202012Validator

    @classmethod
    def of(cls, backend):
        """One with a vocabulary of its own."""
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
        is_noted = bool(form.unenforced)
        texts = (self.spelling(form, value) for value in invalid)
        written = next((text for text in texts if text is not None), None)
        if written is not None and not is_noted:
            return Verdict("wrong", f"{written} can be written", written)
        for seed in range(num_walks):
            found = self._walked(form, schema, seed, is_noted)
            if found is not None:
                return found
        missing = [value for value in valid if self.spelling(form, value) is None]
        if is_noted:
            return Verdict("annotated", ", ".join(form.unenforced), written)
        if missing:
            return Verdict("narrower", f"{json.dumps(missing[0])} cannot be written")
        return Verdict("exact")

    def spelling(self, form, value):
        """A text of the value that the form allows, or None."""
        for text in itertools.islice(spellings(value), MOST_SPELLINGS):
            if self.allows(form, text):
                return text
        return None

    def allows(self, form, text):
        """Whether a text follows the form, in tokens of one byte."""
        matcher = form.matcher()
        single = {t: i for i, t in enumerate(self.vocabulary.tokens) if len(t) == 1}
        for byte in text.encode():
            if not matcher.try_token(single[bytes([byte])]):
                return False
        allowed = self.allowed(matcher)
        return matcher.has_ended or not set(self.vocabulary.eos_ids).isdisjoint(allowed)

    def allowed(self, matcher):
        """The tokens that may come next; none after a failure."""
        if matcher.has_ended:
            return []
        mask = np.zeros((1, mask_words(len(self.vocabulary.tokens))), dtype=np.int32)
        matcher.library.fill([(matcher, 0)], mask)
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        return [] if matcher.failure else bits.nonzero()[0].tolist()

    def _walked(self, form, schema, seed, is_noted):
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
        return self._wrong(text, schema, is_noted)

    def _drawn(self, rng, allowed):
        """Of the tokens, those that end something are drawn often."""
        tokens = self.vocabulary.tokens
        closing = [i for i in allowed if tokens[i] in (b'"', b"}", b"]", b",")]
        ends = [i for i in allowed if i in self.vocabulary.eos_ids]
        return rng.choice(ends or closing or allowed if rng.random() < 0.5 else allowed)

    def _text(self, ids):
        return b"".join(self.vocabulary.tokens[i] for i in ids).decode(errors="replace")

    def _wrong(self, text, schema, is_noted):
        try:
            value = json.loads(text, object_pairs_hook=_without_repeats)
        except _Repeated:  # of names that are not declared, which masks cannot prevent
            return None
        except ValueError:
            return Verdict("wrong", f"{text!r} is not JSON")
        try:
            is_right = is_noted or self.validator(schema).is_valid(value)
        except Exception:  # it refers to what is not there, for the validator
            return None
        return None if is_right else Verdict("wrong", f"{text} is not valid")


class _Repeated(Exception):
    pass


def _without_repeats(pairs):
    if len(dict(pairs)) < len(pairs):
        raise _Repeated
    return dict(pairs)


def spellings(value):
    """Texts of a value: its properties in every order, integers without a point."""
    match value:
        case dict():
            for names in itertools.permutations(value):
                for parts in itertools.product(*([*spellings(value[name])] for name in names)):
                    pairs = zip(names, parts, strict=True)
                    inner = ",".join(f"{json.dumps(n, ensure_ascii=False)}:{p}" for n, p in pairs)
                    yield f"{{{inner}}}"
        case list():
            for parts in itertools.product(*([*spellings(item)] for item in value)):
                yield f"[{','.join(parts)}]"
        case float() if value.is_integer():
            yield str(int(value))
        case float():
            yield from dict.fromkeys((json.dumps(value), f"{value:f}"))
        case _:
            yield json.dumps(value, ensure_ascii=False)
