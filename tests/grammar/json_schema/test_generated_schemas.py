"""Schemas as pydantic, zod and OpenAPI write them, with both libraries."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.grammar.json_schema.verdicts import Judge, Verdict

SCHEMAS = json.loads((Path(__file__).parent / "generated_schemas.json").read_text())
"""From pydantic 2.14, zod 4.6 and zod-to-json-schema 3.25, and in the manner of OpenAPI."""
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
    assert found.written is None
    if name not in ANNOTATED:
        assert found.kind == "exact", found
        return
    assert found == Verdict("annotated", ", ".join("#" + pointer for pointer in ANNOTATED[name]))
