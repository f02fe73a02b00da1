"""The table of schemas: what it reads of the suite, and that it finds what is planted."""

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from quire.grammar.guidance import Guidance
from quire.grammar.lowering import json_options
from quire.grammar.source import WHITESPACE, LoweredSource
from quire.grammar.vocabulary import Vocabulary
from tests.grammar.json_schema.verdicts import SOURCE, Judge

ROOT = Path(__file__).parents[3]
GROUPS = [
    {
        "description": "a type",
        "schema": {"type": "integer"},
        "tests": [
            {"description": "one", "data": 1, "valid": True},
            {"description": "a text", "data": "a", "valid": False},
        ],
    },
    {"description": "nothing", "schema": False, "tests": []},
]
FILES = {
    "draft2020-12/type.json": GROUPS,
    "draft2020-12/format.json": GROUPS,
    "draft2020-12/optional/format/date.json": GROUPS,
    "draft2020-12/optional/format/color.json": GROUPS,
    "draft2020-12/optional/ecmascript-regex.json": GROUPS,
    "draft7/optional/format/date.json": GROUPS,
    "draft6/type.json": GROUPS,
}
COUNTED = [
    ("suite, draft2020-12", "draft2020-12/type"),
    ("suite, draft2020-12, formats", "draft2020-12/optional/date"),
    ("suite, draft7, formats", "draft7/optional/date"),
]


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("schema_table", ROOT / "tools/schema_table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.read(SOURCE)


@pytest.fixture(scope="module")
def library(vocabulary):
    return Guidance(vocabulary)


def test_the_suite_is_read_as_a_folder_and_as_a_distribution(table, tmp_path):
    archive = tmp_path / "suite.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        files = {f"tests/{name}": groups for name, groups in FILES.items()}
        for name, groups in {**files, "remotes/draft7/a.json": {"type": "null"}}.items():
            data = json.dumps(groups).encode()
            member = tarfile.TarInfo(f"jsonschema-1/json/{name}")
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    for name, groups in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(groups))
    for path in (tmp_path, archive):
        cases = [*table.suite(path)]
        found = {(case.table, case.name.partition(":")[0]) for case in cases}
        assert sorted(found) == COUNTED
        first = next(case for case in cases if case.name == "draft2020-12/type: a type")
        uri = "https://json-schema.org/draft/2020-12/schema"
        assert first.schema == {"$schema": uri, "type": "integer"}
        assert (first.valid, first.invalid, first.is_open) == ([1], ["a"], True)


class Compiling:
    """Compiles the same source whatever is asked."""

    def __init__(self, library, schema):
        self._library = library
        self._source = LoweredSource(
            "schema", json.dumps(schema), json_options=json_options(WHITESPACE)
        )

    def compile(self, source):
        return self._library.compile(self._source)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("compiled", "kind", "why"),
    [
        (CLOSED, "exact", ""),
        ({"type": "object"}, "wrong", '{"a":"x"} can be written'),
        ({**CLOSED, "required": ["a"]}, "narrower", "{} cannot be written"),
        ({**CLOSED, "minProperties": 1, "maxProperties": 1}, "narrower", "{} cannot be written"),
        ({**CLOSED, "patternProperties": {"^a$": {"type": "integer"}}}, "late", "nothing may"),
    ],
)
def test_what_is_planted_is_found(vocabulary, library, compiled, kind, why):
    planted = Judge(vocabulary, Compiling(library, compiled))
    found = planted.verdict(OBJECT, [{}, {"a": 1}], [{"a": "x"}, []], num_walks=60)
    assert found.kind == kind, found
    assert why in found.why
