"""The document at /openapi.json: what generators of clients rely on."""

import re

import pytest

from quire.server.admin import ADMIN_ROUTES
from quire.server.context import RouteEntry
from quire.server.health import health
from quire.server.http.documents import page
from quire.server.http.openapi import document
from quire.server.routes import ROUTES, TOKENIZER_INFO

DOCUMENT = document([*ROUTES, TOKENIZER_INFO, *ADMIN_ROUTES])
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}


def parts(node, where="#"):
    """(where it is, the dict) for every dict of the document."""
    if isinstance(node, dict):
        yield where, node
        for name, value in node.items():
            yield from parts(value, f"{where}/{name}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from parts(value, f"{where}/{index}")


def test_every_operation_has_a_name_of_its_own_and_a_tag():
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names) > 30
    assert all(re.fullmatch(r"[a-z]+([A-Z0-9][a-z0-9]*)*", name) for name in names)
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    assert {tag for operation in OPERATIONS.values() for tag in operation["tags"]} == tags
    assert {"Chat", "Completions", "Responses", "Messages", "Models", "Admin"} <= tags


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("POST /v1/chat/completions", "createChatCompletion"),
        ("GET /v1/models/{name}", "retrieveModel"),
        ("GET /v1/conversations/{id}/items/{item_id}", "getConversationItem"),
        ("GET /ping", "getPing"),
        ("POST /ping", "ping"),
        ("GET /server_info", "getServerInfo"),
        ("POST /scale_elastic_ep", "scaleElasticEp"),
    ],
)
def test_operations_have_speaking_names(operation, name):
    assert OPERATIONS[operation]["operationId"] == name


def test_every_array_has_items_and_every_reference_a_target():
    components = DOCUMENT["components"]["schemas"]
    seen = set()
    for where, part in parts(DOCUMENT):
        assert part.get("type") != "array" or "items" in part, where
        assert not (part.get("type") == "object" and where.endswith("/items")) or (
            "additionalProperties" in part
        ), where
        if "$ref" in part:
            name = part["$ref"].removeprefix("#/components/schemas/")
            assert name in components, where
            seen.add(name)
        for target in part.get("discriminator", {}).get("mapping", {}).values():
            assert target.removeprefix("#/components/schemas/") in components, where
    assert seen == set(components)


def test_unions_and_enumerations_have_one_form():
    for where, part in parts(DOCUMENT["components"]):
        assert not isinstance(part.get("type"), list) and "oneOf" not in part, where
        if isinstance(part.get("enum"), list):
            assert part["type"] in ("string", "integer") and None not in part["enum"], where
        if isinstance(kinds := part.get("anyOf"), list):
            assert len({repr(kind) for kind in kinds}) == len(kinds) > 1, where
        assert "default" not in part or part["default"] is not None, where


def test_parameters_are_those_of_the_path_and_the_query():
    for operation, facts in OPERATIONS.items():
        given = [p["name"] for p in facts.get("parameters", ()) if p["in"] == "path"]
        assert given == re.findall(r"\{(\w+)\}", operation), operation
        assert all(p["required"] == (p["in"] == "path") for p in facts.get("parameters", ()))
    sleep = {p["name"]: p["schema"] for p in OPERATIONS["POST /sleep"]["parameters"]}
    assert sleep["level"] == {"type": "integer", "minimum": 0, "maximum": 2, "default": 1}
    assert sleep["mode"]["enum"] == ["abort", "keep", "wait"]


def test_an_alias_is_not_another_operation():
    assert {"/chat/completions", "/v1/chat/completions"} <= {entry.path for entry in ROUTES}
    assert "/chat/completions" not in DOCUMENT["paths"]


def test_every_operation_tells_what_its_errors_look_like():
    for operation, facts in OPERATIONS.items():
        schema = facts["responses"]["default"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorBody"}, operation


def test_the_page_shows_fields_and_kinds():
    text = page(document([RouteEntry("GET", "/health", health), *ROUTES]))
    assert "<code>max_completion_tokens</code><td>integer" in text
    assert "<code>logit_bias</code>" in text
