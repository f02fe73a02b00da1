"""Random JSON schemas of bounded size: every text that follows one is short."""

import random
import re

WORDS = ("id", "name", "kind", "größe", "a b", "x-y", 'quote"d', "tags", "n", "ok", "日本", "")
PATTERNS = (r"^[a-z]{1,4}$", r"^\d{4}-\d{2}-\d{2}$", r"^(ab|c)+d?$", r"^#[0-9A-F]{3,6}$")
FORMATS = ("date", "time", "uuid", "ipv4", "date-time")


def bounded_schema(seed):
    """A schema of at most three levels; the same for the same seed."""
    rng = random.Random(seed)
    schema = _object(rng, 2) if rng.random() < 0.6 else _schema(rng, 3)
    if rng.random() < 0.3:
        shared = _schema(rng, 1)
        where = {"type": "array", "items": {"$ref": "#/$defs/shared"}, "maxItems": 2}
        schema = {"anyOf": [schema, where], "$defs": {"shared": shared}}
    return schema


def _schema(rng, depth):
    kinds = [_text, _text, _integer, _fixed, _chosen, _plain]
    if depth > 0:
        kinds += [_object, _object, _array, _tuple, _either]
    return rng.choice(kinds)(rng, depth)


def _text(rng, depth):
    how = rng.random()
    if how < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)} | (
            {"maxLength": 12} if rng.random() < 0.5 else {}
        )
    if how < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    shortest = rng.randrange(3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randrange(12)}


def _integer(rng, depth):
    low = rng.randrange(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.choice((0, 1, 7, 500, 10**6))}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.choice((2, 9, 4000))}
    return {"type": "integer", **bounds}


def _fixed(rng, depth):
    return {"const": rng.choice((None, True, 0, -1.5, "a\nb", "\u2028", [1, "x"], {"k": [None]}))}


def _chosen(rng, depth):
    values = ["red", 'gr"een', "\\", "ü", 1, 2.25, None, False, [], {"a": 1}]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _plain(rng, depth):
    return {"type": rng.choice(("boolean", "null"))}


def _array(rng, depth):
    fewest = rng.randrange(3)
    bounds = {"minItems": fewest, "maxItems": fewest + rng.randrange(3)}
    return {"type": "array", "items": _schema(rng, depth - 1), **bounds}


def _tuple(rng, depth):
    items = [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _object(rng, depth):
    names = rng.sample(WORDS, rng.randrange(5))
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _either(rng, depth):
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


def without_strings(text):
    """JSON with every string empty, so that only what stands between tokens is left."""
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
