"""Schemas as generators write them, and random ones, with both libraries."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.grammar.json_schema.random_schemas import judged_schema
from tests.grammar.json_schema.verdicts import Judge, Verdict

SCHEMAS = json.loads((Path(__file__).parent / "generated_schemas.json").read_text())
"""From pydantic 2.14, zod 4.6 and zod-to-json-schema 3.25, TypeBox 0.34, valibot 1.5, arktype 2.2,
FastAPI 0.165, Litestar 2.25, apispec 6.10 with marshmallow 4.4, msgspec 0.22, and in the manner of
OpenAPI. Those of TypeBox and after it are of one model, an order, and of lists and trees.
"""
NUM_RANDOM = 120
BACKENDS = [
    "guidance",
    pytest.param(
        "xgrammar",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed"
        ),
    ),
]


@pytest.fixture(scope="module", params=BACKENDS)
def judge(request):
    return Judge.of(request.param)


ANNOTATED = {
    "pydantic: lists": ["/properties/s/uniqueItems"],
    "zod 4: string rules": ["/properties/b/format", "/properties/c/format"],
    "zod 4: openapi 3.0": ["/properties/a/nullable"],
    "zod 3: openapi target": ["/properties/a/nullable"],
    "apispec: an order, 3.0.3": [
        "/components/schemas/Order/properties/total/nullable",
        "/components/schemas/MItem/properties/note/nullable",
    ],
    "openapi: inheritance by allOf": [
        "/components/schemas/Dog/allOf/1/properties/packSize/format",
    ],
    "openapi: int64, double, nullable, readOnly": [
        *("/properties/id/format", "/properties/price/format"),
        *("/properties/note/nullable", "/properties/blob/format"),
    ],
    "openapi: an array of references with limits": ["/components/schemas/Tag/properties/id/format"],
    "openapi: an error model": ["/properties/code/format"],
    "openapi: float limits": ["/properties/f/format"],
}
"""The schemas with annotations among their keywords, and which these are; all others are exact."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_generated_schema(judge, name):
    case = SCHEMAS[name]
    found = judge.verdict(case["schema"], case["valid"], case["invalid"])
    if name not in ANNOTATED:
        assert found.kind == "exact", found
        return
    assert found == Verdict("annotated", ", ".join("#" + pointer for pointer in ANNOTATED[name]))


def test_random_schemas(judge):
    """Judged by jsonschema: what is admitted takes just those values, and has no dead ends."""
    kinds = Counter()
    for seed in range(NUM_RANDOM):
        schema, valid, invalid = judged_schema(seed)
        found = judge.verdict(schema, valid, invalid, is_open=True, num_walks=2)
        assert found.kind in ("exact", "annotated", "refused"), (seed, found)
        kinds[found.kind] += 1
    assert kinds["exact"] > 0.75 * NUM_RANDOM
