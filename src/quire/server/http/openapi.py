"""The OpenAPI document of a table of routes, in the forms that generators of clients accept.

An operation is named as OpenAI and Anthropic name it where they have it, else by its method and
path. Aliases are left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.release import __version__
from quire.server.context import RouteEntry
from quire.server.health import uninstructed, unserved
from quire.server.http.failures import JSON, ErrorBody

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_NAMES = {
    "GET /": "getPage",
    "GET /openapi.json": "getOpenapi",
    "GET /v1/models": "listModels",
    "GET /v1/models/{name}": "retrieveModel",
    "POST /v1/completions": "createCompletion",
    "POST /v1/completions/render": "renderCompletion",
    "POST /v1/chat/completions": "createChatCompletion",
    "POST /v1/chat/completions/render": "renderChatCompletion",
    "POST /v1/responses": "createResponse",
    "GET /v1/responses/{id}": "getResponse",
    "DELETE /v1/responses/{id}": "deleteResponse",
    "GET /v1/responses/{id}/input_items": "listInputItems",
    "POST /v1/responses/{id}/cancel": "cancelResponse",
    "POST /v1/responses/input_tokens": "countResponseInputTokens",
    "POST /v1/responses/compact": "compactResponse",
    "POST /v1/conversations": "createConversation",
    "GET /v1/conversations/{id}": "getConversation",
    "POST /v1/conversations/{id}": "updateConversation",
    "DELETE /v1/conversations/{id}": "deleteConversation",
    "GET /v1/conversations/{id}/items": "listConversationItems",
    "POST /v1/conversations/{id}/items": "createConversationItems",
    "GET /v1/conversations/{id}/items/{item_id}": "getConversationItem",
    "DELETE /v1/conversations/{id}/items/{item_id}": "deleteConversationItem",
    "POST /v1/embeddings": "createEmbedding",
    "POST /v2/embed": "embed",
    "POST /v1/messages": "createMessage",
    "POST /v1/messages/count_tokens": "countMessageTokens",
}
"""Names of operations whose method and path make no good one."""
_ENUM_TYPES = {str: "string", int: "integer"}


def document(entries: Sequence[RouteEntry]) -> Schema:
    """OpenAPI 3.1 for the routes; requests need a key where the server has keys."""
    shown = _shown(entries)
    types = [
        kind
        for entry in shown
        for kind in (entry.takes, entry.gives, entry.query)
        if kind is not None
    ]
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    # ErrorBody's schema has no partner here: replies refer to it by its name
    found = {repr(kind): _plain(schema) for kind, schema in zip(types, schemas, strict=False)}
    components = {name: _plain(schema) for name, schema in components.items()}
    queries = {repr(entry.query) for entry in shown}
    paths: Schema = {}
    for entry in shown:
        operations = paths.setdefault(_path(entry), {})
        for method in entry.methods.split():
            operations[method.lower()] = _operation(method, entry, found, components)
    # a query is listed as parameters, and no schema refers to its type
    for name in queries & found.keys():
        components.pop(_named(found[name]), None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "tags": [{"name": tag} for tag in dict.fromkeys(map(_tag, shown))],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _shown(entries: Sequence[RouteEntry]) -> list[RouteEntry]:
    """The routes that serve, each by its own path."""
    own = [entry.loaded() for entry in entries if not entry.is_alias]
    return [entry for entry in own if entry.handler not in (unserved, uninstructed)]


def _path(entry: RouteEntry) -> str:
    return entry.path.replace(":path", "")


def _operation(
    method: str, entry: RouteEntry, schemas: dict[str, Schema], components: dict[str, Schema]
) -> Schema:
    path = _path(entry)
    operation: Schema = {
        "operationId": operation_id(method, path),
        "tags": [_tag(entry)],
        "summary": inspect.getdoc(entry.handler) or "",
    }
    parameters = [
        _parameter("path", name, {"type": "string"}) for name in re.findall(r"\{(\w+)\}", path)
    ]
    if entry.query is not None:
        asked = components[_named(schemas[repr(entry.query)])]
        parameters += [_parameter("query", *field) for field in asked["properties"].items()]
    if parameters:
        operation["parameters"] = parameters
    if entry.takes is not None:
        content = {JSON: {"schema": schemas[repr(entry.takes)]}}
        operation["requestBody"] = {"required": True, "content": content}
    refused = {"$ref": _REF.format(name=ErrorBody.__name__)}
    operation["responses"] = {
        "200": _reply(entry, schemas),
        "default": {"description": "an error", "content": {JSON: {"schema": refused}}},
    }
    return operation


def _reply(entry: RouteEntry, schemas: dict[str, Schema]) -> Schema:
    reply: Schema = {"description": "the answer"}
    if entry.gives is not None:
        reply["content"] = {JSON: {"schema": schemas[repr(entry.gives)]}}
        if entry.path in _STREAMS:
            reply["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return reply


def _parameter(place: str, name: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def operation_id(method: str, path: str) -> str:
    """The operation's name: `createChatCompletion`, `getServerInfo`, `tokenize`."""
    if name := _NAMES.get(f"{method} {path}"):
        return name
    words = [word for word in re.split(r"[^A-Za-z0-9]+", path.removeprefix("/v1")) if word]
    words = words if method == "POST" else [method.lower(), *words]
    return words[0] + "".join(word[:1].upper() + word[1:] for word in words[1:])


def _tag(entry: RouteEntry) -> str:
    """`Chat` for /v1/chat/..., for paths of our own the module that serves them."""
    _, version, *rest = entry.path.split("/")
    word = rest[0] if version == "v1" and rest else entry.handler.__module__.rpartition(".")[2]
    return word.capitalize()


def _named(schema: Schema) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _plain(schema: Schema) -> Schema:
    """A schema of msgspec as generators need it: a list says what of, an object without fields
    that it is open, an enumeration its type; a default of null, which says nothing, is left out.
    """
    made = {key: value for key, value in schema.items() if (key, value) != ("default", None)}
    if "properties" in made:
        made["properties"] = {name: _plain(part) for name, part in made["properties"].items()}
    if "anyOf" in made:
        made["anyOf"] = [_plain(part) for part in made["anyOf"]]
    if isinstance(values := made.get("additionalProperties"), dict):
        made["additionalProperties"] = _plain(values)
    if made.get("type") == "array":
        made["items"] = _plain(made.get("items", {}))
    elif made.get("type") == "object" and "properties" not in made:
        made.setdefault("additionalProperties", True)
    if "enum" in made:
        made["type"] = _ENUM_TYPES[type(made["enum"][0])]
    if "description" in made:
        made["description"] = inspect.cleandoc(made["description"])
    return made
