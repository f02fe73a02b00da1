"""What is outside of a body's strings is found exactly, wherever the body is cut."""

import json
import random

import pytest

from quire.server.http import json_weight
from quire.server.http.failures import Refusal
from quire.server.http.json_weight import MOST_CONTAINERS, MOST_VALUES, check_weight


def containers(value):
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


def any_text(rng):
    return "".join(rng.choice('ab"\\[{,}]\n1e5') for _ in range(rng.randrange(80)))


def any_value(rng, depth=0):
    kind = rng.random()
    if depth < 4 and kind < 0.3:
        return {any_text(rng): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    if depth < 4 and kind < 0.6:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return rng.choice([any_text(rng), 1, 1.5, None, True])


@pytest.mark.parametrize("chunk", [2, 7, 65536])
def test_strings_count_for_nothing(monkeypatch, chunk):
    monkeypatch.setattr(json_weight, "_CHUNK", chunk)
    rng = random.Random(chunk)
    for _ in range(300):
        value = any_value(rng)
        outside = b"".join(json_weight._outside_of_strings(json.dumps(value).encode()))
        assert outside.count(b"[") + outside.count(b"{") == containers(value), value


@pytest.mark.parametrize(
    "data",
    [
        b'"' + b"[{,1e300" * 10**6 + b'"',
        b"[" + b"1.5,true,false,null," * (MOST_VALUES // 5) + b"1]",
        b"[" + b"[],{}," * (MOST_CONTAINERS // 2 - 1) + b"1]",
        b"[" + b'"\\\\\\"e",' * 10**5 + b"1]",
        b"{" + b'":a":"::",' * (2 * MOST_CONTAINERS - 1) + b'"b":2}',
        json.dumps([1e-5] * 1000).encode(),
    ],
    ids=["text", "values", "containers", "escapes", "fields", "exponents"],
)
def test_what_a_request_may_have_is_let_through(data):
    check_weight(data)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[" + b"1," * (MOST_VALUES + 1) + b"1]", "values"),
        (b"[" + b"[]," * (MOST_CONTAINERS + 1) + b"1]", "objects and arrays"),
        (b"{" + b'"a":1,' * (2 * MOST_CONTAINERS + 1) + b'"b":2}', "fields"),
        (b"[" + b"1E300," * 2001 + b"1]", "with an exponent"),
        (b"[" + (b"9" * 4000 + b",") * 300 + b"1]", "very many digits"),
        (b"9" * 10**6, "very many digits"),
    ],
)
def test_what_takes_the_decoder_long_is_refused(data, what):
    with pytest.raises(Refusal, match=what):
        check_weight(data)
