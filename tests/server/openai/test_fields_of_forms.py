"""The fields that ask for a form: what they mean, what is refused and by which name, and what the
reply says is not enforced.
"""

import json

import pytest

from quire.server.openai.requests import ChatRequest
from quire.server.openai.structured import StructuredFields
from quire.server.output_parsing.call_schemas import required_schema
from tests.grammar.json_schema.unfolded import unfolded

ASK = [{"role": "user", "content": "A city."}]
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "when": {"enum": ["now"]}},
    "required": ["name"],
}
OPEN = {**CITY, "additionalProperties": True}
BAD = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "null"}}}}
NOTED = {
    "type": "object",
    "properties": {
        "when, really": {"type": "string", "format": "moment", "maxLength": 3},
        "all": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2},
    },
    "required": ["all"],
}
NOTES = ["#/properties/when%2C%20really/format", "#/properties/all/uniqueItems"]


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def post(server, path="/v1/chat/completions", **fields):
    body = {"messages": ASK, "max_tokens": 60, "seed": 1, **fields}
    if path.endswith("responses"):
        body = {"input": "A city.", "max_output_tokens": 60, **fields}
    if path.endswith("/messages"):
        body.pop("seed", None)
    if path.endswith("/completions") and "chat" not in path:
        body = {"prompt": "A city: ", "max_tokens": 60, "seed": 1, **fields}
    return server.post(path, body)


def content_of(reply):
    assert reply.status_code == 200, reply.text
    return json.loads(reply.json()["choices"][0]["message"]["content"])


def refusal_of(reply):
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return error.get("param"), error["message"]


@pytest.mark.parametrize("name", ["schema", "value"])
def test_json_object_with_a_schema_is_served(server, name):
    """`value` is its name in text-generation-inference, and what huggingface_hub makes of a
    `json_schema`.
    """
    given = {"type": "json_object", name: CITY}
    found = content_of(post(server, response_format=given))
    assert "name" in found and found.keys() <= {"name", "when"}


def test_a_schema_needs_no_name(server):
    given = {"type": "json_schema", "json_schema": {"schema": CITY}}
    found = content_of(post(server, response_format=given))
    assert "name" in found and found.keys() <= {"name", "when"}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "text", "schema": CITY}, "response_format.schema"),
        ({"type": "text", "json_schema": {"name": "n", "schema": CITY}},
         "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}, "schema": CITY},
         "response_format.schema"),
        ({"type": "json_object", "json_schema": {"name": "n", "schema": CITY}},
         "response_format.json_schema"),
        ({"type": "json_object", "schema": [1]}, "response_format.schema"),
        ({"type": "json_object", "value": [1]}, "response_format.value"),
        ({"type": "json_object", "schema": CITY, "value": OPEN}, "response_format.value"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": CITY}, "value": CITY},
         "response_format.value"),
        ({"type": "json_object", "strict": True}, "response_format.strict"),
        ({"type": "json_schema", "schema": CITY}, "response_format.schema"),
        ({"schema": CITY}, "response_format"),
    ],
)  # fmt: skip
def test_a_format_with_fields_of_another_type_is_refused(server, given, field):
    for path in ("/v1/chat/completions", "/v1/completions"):
        param, message = refusal_of(post(server, path, response_format=given))
        assert param == field and field in message


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("text", {"type": "text", "schema": CITY}, ".schema"),
        ("text", {"type": "json_object", "json_schema": {}}, ".json_schema"),
        ("text", {"type": "json_object", "schema": 1}, ".schema"),
        ("text", {"type": "json_schema", "schema": OPEN, "strict": True},
         ".schema#/additionalProperties"),
        ("text", {"type": "json_schema", "schema": CITY, "json_schema": {}}, ""),
        ("output_config", {"type": "json_object"}, ""),
        ("output_config", {"type": "json_schema", "schema": OPEN, "strict": True},
         ".schema#/additionalProperties"),
        ("output_config", {"type": "json_schema", "schema": CITY, "colour": "red"}, ""),
    ],
)  # fmt: skip
def test_formats_of_other_dialects(server, name, given, field):
    path = "/v1/responses" if name == "text" else "/v1/messages"
    _, message = refusal_of(post(server, path, **{name: {"format": given}}))
    assert message.startswith(f"{name}.format{field}="), message


def test_fields_without_a_value_are_left_out(server):
    given = {"type": "json_object", "schema": CITY, "json_schema": None}
    assert "name" in content_of(post(server, response_format=given))
    assert post(server, response_format={"type": "text", "json_schema": None}).status_code == 200


GRAMMAR = 'start: "a" | "b"'
TWICE = [
    {"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR}},
    {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
    {
        "guided_json": json.dumps({"enum": ["a", "b"]}),
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}
        },
    },
]  # fmt: skip


@pytest.mark.parametrize("fields", TWICE, ids=lambda fields: " ".join(fields))
def test_two_fields_for_the_same_form_are_one(server, fields):
    reply = post(server, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"].strip('"') in ("a", "b")
    [name] = [name for name in fields if name.startswith("guided")]
    other = {**fields, name: 'start: "c"' if name == "guided_grammar" else ["c"]}
    other[name] = json.dumps({"const": 1}) if name == "guided_json" else other[name]
    param, message = refusal_of(post(server, **other))
    assert param == "structured_outputs" and "for the same" in message


STRICT = [
    ("/v1/chat/completions", {"response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": OPEN, "strict": True}}},
     "response_format.json_schema.schema#/additionalProperties"),
    ("/v1/chat/completions", {"tools": [tool("f", CITY), tool("g", OPEN, strict=True)]},
     "tools[1].function.parameters#/additionalProperties"),
    ("/v1/chat/completions", {"functions": [{"name": "g", "parameters": OPEN, "strict": True}]},
     "functions[0].parameters#/additionalProperties"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "g", "strict": True,
                                  "parameters": {"type": "object", "properties": {"a": OPEN}}}]},
     "tools[0].parameters#/properties/a/additionalProperties"),
    ("/v1/messages", {"tools": [{"name": "g", "input_schema": OPEN, "strict": True}]},
     "tools[0].input_schema#/additionalProperties"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "field"), STRICT)
def test_strict_next_to_open_objects_is_refused(server, path, fields, field):
    reply = post(server, path, **fields)
    assert reply.status_code == 400
    assert field in reply.text and "strict" in reply.text


def test_a_property_with_that_name_is_not_a_contradiction(server):
    schema = {"type": "object", "properties": {"additionalProperties": {"const": True}}}
    given = {"name": "n", "schema": schema, "strict": True}
    found = content_of(post(server, response_format={"type": "json_schema", "json_schema": given}))
    assert found in ({}, {"additionalProperties": True})


NAMED = {"type": "function", "function": {"name": "b"}}
FAULTS = [
    ("/v1/chat/completions",
     {"tools": [tool("a", CITY), tool("b", BAD)], "tool_choice": "required"},
     "tools[1].function.parameters"),
    ("/v1/chat/completions", {"tools": [tool("a", CITY), tool("b", BAD)], "tool_choice": NAMED},
     "tools[1].function.parameters"),
    ("/v1/chat/completions",
     {"functions": [{"name": "b", "parameters": BAD}], "function_call": {"name": "b"}},
     "functions[0].parameters"),
    ("/v1/chat/completions",
     {"tools": [{"type": "custom", "custom": {"name": "b", "format": {
         "type": "grammar", "grammar": {"syntax": "regex", "definition": "("}}}}],
      "tool_choice": "required"}, "tools[0].custom.format"),
    ("/v1/chat/completions",
     {"tools": [tool("a", CITY), {"type": "custom", "custom": {"name": "b", "format": {
         "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: x"}}}}],
      "tool_choice": {"type": "custom", "custom": {"name": "b"}}}, "tools[1].custom.format"),
    ("/v1/responses",
     {"tools": [{"type": "function", "name": "a", "parameters": CITY},
                {"type": "function", "name": "b", "parameters": BAD}], "tool_choice": "required"},
     "tools[1].parameters"),
    ("/v1/responses",
     {"tools": [{"type": "namespace", "name": "s", "tools": [
         {"type": "function", "name": "a", "parameters": CITY},
         {"type": "function", "name": "b", "parameters": BAD}]}], "tool_choice": "required"},
     "tools[0].tools[1].parameters"),
    ("/v1/messages", {"tools": [{"name": "a", "input_schema": CITY},
                                {"name": "b", "input_schema": BAD}],
                      "tool_choice": {"type": "any"}}, "tools[1].input_schema"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "field"), FAULTS)
def test_an_error_about_a_tool_names_it(server, path, fields, field, stream):
    reply = post(server, path, stream=stream, **fields)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert message.startswith(f"{field}="), message
    assert "structured_outputs" not in reply.text


HOSTED = {"type": "web_search"}


@pytest.mark.parametrize(
    ("path", "tools", "field"),
    [
        ("/v1/chat/completions",
         [HOSTED, tool("a", CITY), HOSTED, HOSTED, tool("b", OPEN, strict=True)],
         "tools[4].function.parameters#/additionalProperties"),
        ("/v1/responses", [{"type": "function", "name": "a", "parameters": CITY}, HOSTED,
                           {"type": "function", "name": "b", "parameters": OPEN, "strict": True}],
         "tools[2].parameters#/additionalProperties"),
        ("/v1/messages", [{"type": "web_search_20250305", "name": "web_search"},
                          {"name": "b", "input_schema": OPEN, "strict": True}],
         "tools[1].input_schema#/additionalProperties"),
    ],
)  # fmt: skip
def test_tools_that_are_left_out_count_in_the_index(server, path, tools, field):
    reply = post(server, path, tools=tools)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{field}="), reply.text


NOTED_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOTED}}
HEADERS = [
    ("/v1/chat/completions", {"response_format": NOTED_FORMAT}, "response_format"),
    ("/v1/completions", {"structured_outputs": {"json": NOTED}}, "structured_outputs.json"),
    ("/v1/completions", {"guided_json": NOTED}, "guided_json"),
    ("/v1/chat/completions",
     {"tools": [tool("a", CITY), tool("b", NOTED)], "tool_choice": "required"},
     "tools[1].function.parameters"),
    ("/v1/chat/completions",
     {"tools": [tool("a", CITY), tool("b", NOTED)], "tool_choice": NAMED},
     "tools[1].function.parameters"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": NOTED}}},
     "text.format"),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": NOTED}}},
     "output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "field"), HEADERS)
def test_what_is_not_enforced_is_named_in_a_header(server, path, fields, field):
    for stream in (False, True):
        reply = post(server, path, stream=stream, **fields)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"].split(", ") == [field + note for note in NOTES]
    plain = post(server, path, **(fields if "response_format" not in fields else {}))
    assert ("x-ignored-fields" in plain.headers) == ("response_format" not in fields)


def test_numbers_keep_their_digits(server):
    schema = {"enum": [1234567890123456789, 18446744073709551615, -(2**63) - 1]}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for seed in range(4):
        reply = post(server, response_format=given, seed=seed, temperature=2)
        assert content_of(reply) in schema["enum"]


def test_invented_properties_do_not_come(server):
    """Forced calls and answers, of schemas that do not say that they are closed."""
    item = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": item, "maxItems": 3}},
        "required": ["items"],
    }
    for seed in range(6):
        fields = {"seed": seed, "temperature": 1.5, "max_tokens": 200}
        given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = post(server, response_format=given, **fields)
        call = post(server, tools=[tool("f", schema)], tool_choice="required", **fields)
        found = [content_of(answer)]
        for made in call.json()["choices"][0]["message"]["tool_calls"]:
            found.append(json.loads(made["function"]["arguments"]))
        for value in found:
            assert value.keys() == {"items"}
            assert all(one.keys() <= {"n"} for one in value["items"])


def test_an_option_opens_objects(server):
    form = {"json": {"type": "object", "properties": {"a": {"const": 1}}}}
    texts = []
    for seed in range(8):
        fields = {"seed": seed, "temperature": 2, "max_tokens": 20}
        opened = {**form, "allow_additional_properties": True}
        reply = post(server, "/v1/completions", structured_outputs=opened, **fields)
        texts.append(reply.json()["choices"][0]["text"])
        closed = post(server, "/v1/completions", structured_outputs=form, **fields)
        assert json.loads(closed.json()["choices"][0]["text"]) in ({}, {"a": 1})
    assert any(text.count('"') > 2 and '{"a"' not in text[:6] for text in texts), texts


@pytest.mark.parametrize("name", ["enum", "const", "default", "$ref", "properties", "$defs"])
def test_a_tool_s_own_references_hold_among_others(name):
    """Below properties with the names of keywords, too."""
    schema = {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/unit"}, "more": {"$ref": "#/properties/plain"},
                       "plain": {"type": "boolean"}},
        "required": [name],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    }  # fmt: skip
    tools = [tool("f", {"type": "object", "properties": {}}), tool("g", schema)]
    found = unfolded(required_schema(tools, None))
    call = found["items"]["anyOf"][1]["properties"]["parameters"]
    assert call == {
        "type": "object",
        "properties": {name: {"enum": ["C", "F"]}, "more": {"type": "boolean"},
                       "plain": {"type": "boolean"}},
        "required": [name],
        "additionalProperties": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "parameter", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "structured_outputs.structural_tag",
         "response_format"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.structural_tag",
         "structured_outputs.json"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.whitespace_pattern",
         "structured_outputs.whitespace_pattern"),
        ({"guided_json": {}, "guided_whitespace_pattern": " "},
         "structured_outputs.whitespace_pattern", "guided_whitespace_pattern"),
        ({"guided_json": {}}, "structured_outputs.structural_tag", "guided_json"),
        ({"guided_json": {}}, "structured_outputs", "guided_json"),
        ({}, "temperature", "temperature"),
    ],
)  # fmt: skip
def test_a_parameter_of_the_engine_is_the_field_that_was_sent(fields, parameter, field):
    body = ChatRequest(messages=ASK)
    for name, value in fields.items():
        made = StructuredFields(**value) if name == "structured_outputs" else value
        setattr(body, name, made)
    assert body.field_of(parameter) == field
