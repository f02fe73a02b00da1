"""Random schemas of keywords that combine, and values, of few names, so that they meet."""

import random

import jsonschema

NAMES = ("a", "b", "xa", "xb")
PATTERNS = ("^x", "^a$", "b$", "^[ab]$")
SCALARS = (None, True, False, 0, 1, 2, 1.5, "", "a", "b", "xa")
MOST_DEFINITIONS = 3


def schema_of(seed):
    """A schema, the same for the same seed."""
    rng = random.Random(seed)
    schema = _schema(rng, 3)
    while not isinstance(schema, dict):
        schema = _schema(rng, 3)
    definitions = {f"d{i}": _schema(rng, 2) for i in range(MOST_DEFINITIONS)}
    return {**schema, "$defs": definitions}


def judged_schema(seed, num_values=24):
    """A schema, values that follow it, and values that do not, as jsonschema says."""
    while True:
        schema, rng = schema_of(seed), random.Random(seed)
        values = [values_of(rng) for _ in range(num_values)]
        try:
            validator = jsonschema.Draft202012Validator(schema)
            judged = [(value, validator.is_valid(value)) for value in values]
        except RecursionError:  # its references lead to themselves
            seed += 2**32
            continue
        return schema, [v for v, is_valid in judged if is_valid], [v for v, ok in judged if not ok]


def values_of(rng):
    """A value of up to three levels."""
    return _value(rng, 3)


def _value(rng, depth):
    how = rng.random()
    if depth == 0 or how < 0.3:
        return rng.choice(SCALARS)
    if how < 0.75:
        names = rng.sample(NAMES, rng.randrange(4))
        return {name: _value(rng, depth - 1) for name in names}
    return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]


def _schema(rng, depth):
    if rng.random() < 0.08:
        return rng.random() < 0.7
    found = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        keyword, value = rng.choice(_KEYWORDS)(rng, depth)
        found[keyword] = value
    return found


def _type(rng, depth):
    kinds = ["null", "boolean", "integer", "number", "string", "array", "object", "object"]
    if rng.random() < 0.7:
        return "type", rng.choice(kinds)
    return "type", sorted({*rng.sample(kinds, 3)})


def _properties(rng, depth):
    names = rng.sample(NAMES, rng.randrange(1, 4))
    return "properties", {name: _inner(rng, depth) for name in names}


def _patterns(rng, depth):
    return "patternProperties", {rng.choice(PATTERNS): _inner(rng, depth)}


def _additional(rng, depth):
    keyword = rng.choice(("additionalProperties", "additionalProperties", "unevaluatedProperties"))
    return keyword, _inner(rng, depth) if rng.random() < 0.5 else False


def _required(rng, depth):
    return "required", rng.sample(NAMES, rng.randrange(1, 3))


def _dependent(rng, depth):
    if rng.random() < 0.5:
        return "dependentRequired", {rng.choice(NAMES): rng.sample(NAMES, 1)}
    return "dependentSchemas", {rng.choice(NAMES): _inner(rng, depth)}


def _names(rng, depth):
    rule = {"enum": rng.sample(NAMES, 3)} if rng.random() < 0.6 else {"pattern": "^x"}
    return "propertyNames", rule


def _counts(rng, depth):
    keyword = rng.choice(("minItems", "maxItems", "minLength", "maxLength", "maxProperties"))
    return keyword, rng.randrange(3)


def _bounds(rng, depth):
    keyword = rng.choice(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    return keyword, rng.choice((0, 1, 1.5, 2))


def _multiple(rng, depth):
    return "multipleOf", rng.choice((1, 2, 0.5, 1.5))


def _items(rng, depth):
    how = rng.random()
    if how < 0.4:
        return "items", _inner(rng, depth)
    if how < 0.8:
        return "prefixItems", [_inner(rng, depth) for _ in range(rng.randrange(1, 3))]
    return "unevaluatedItems", _inner(rng, depth) if rng.random() < 0.5 else False


def _listed(rng, depth):
    if rng.random() < 0.5:
        return "const", _value(rng, 2)
    return "enum", [_value(rng, 2) for _ in range(rng.randrange(1, 5))]


def _pattern(rng, depth):
    return "pattern", rng.choice(PATTERNS)


def _combined(rng, depth):
    keyword = rng.choice(("allOf", "allOf", "anyOf", "anyOf", "oneOf"))
    return keyword, [_inner(rng, depth) for _ in range(rng.randrange(1, 4))]


def _negated(rng, depth):
    rules = (
        {"type": rng.choice(("string", "object", "null", "number"))},
        {"enum": rng.sample(("a", "b", None, True), 2)},
        {"required": [rng.choice(NAMES)]},
        {"anyOf": [{"required": ["a"]}, {"type": "array"}]},
    )
    return "not", rng.choice(rules)


def _reference(rng, depth):
    return "$ref", rng.choice(["#", *(f"#/$defs/d{i}" for i in range(MOST_DEFINITIONS))])


def _inner(rng, depth):
    if depth == 0:
        return rng.choice((True, {"type": "integer"}, {"type": "string"}, {"const": "a"}, False))
    return _schema(rng, depth - 1)


_KEYWORDS = (
    *(_type, _type, _properties, _properties, _patterns, _additional, _required, _dependent),
    *(_names, _counts, _bounds, _multiple, _items, _items, _listed, _pattern, _combined),
    *(_combined, _combined, _negated, _reference),
)
