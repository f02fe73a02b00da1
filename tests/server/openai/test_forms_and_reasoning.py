"""Forms of a model that may reason, over HTTP: an answer without a reasoning has its form too."""

import importlib.util
import json
import re

import jsonschema
import pytest

from tests.server.scripted_app import with_app
from tests.server.serve_process import serving

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "assistant: {{ opening or '' }}"
)
"""It mentions the end of a reasoning; the prompt opens or closes one as `opening` says."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FORMS = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": FORMAT},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"guided_regex": "[a-c]{3}"},
    "grammar": {"guided_grammar": 'root ::= "up" | "down"'},
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [TOOL], "tool_choice": NAMED},
    "auto": {"tools": [TOOL], "response_format": FORMAT},
}
HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
SERVERS = {
    "guidance": (),
    "xgrammar and drafts": (
        *("--structured-outputs-config", '{"backend": "xgrammar"}'),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'),
    ),
}


@pytest.fixture(scope="module", params=SERVERS)
def thinking(request, tmp_path_factory):
    if "xgrammar" in request.param and not HAS_XGRAMMAR:
        pytest.skip("xgrammar is not installed")
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    with serving("--chat-template", str(template), *SERVERS[request.param]) as running:
        assert "reasoning parser: qwen3" in running.log
        yield running


def answers(server, form, opening=None, **options):
    body = {
        "messages": [{"role": "user", "content": "x = 1"}],
        "max_tokens": 150,
        "thinking_token_budget": 6,
        "n": 6,
        "seed": 2,
        "temperature": 1.0,
        **FORMS[form],
        **options,
    }
    if opening is not None:
        body["chat_template_kwargs"] = {"opening": opening}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def check(form, choice):
    """Whether an answer has its form; any object and free calls may be cut, after they began."""
    message = choice["message"]
    content, calls = message["content"], message.get("tool_calls") or []
    if choice["finish_reason"] == "length":
        beginning = "[{<`]" if form == "auto" else "{"  # of an answer, or of a call
        assert form in ("json_object", "auto")
        assert calls or re.match(beginning, content or "{")
        return
    match form:
        case "choice":
            assert content in ("yes", "no")
        case "regex":
            assert re.fullmatch("[a-c]{3}", content)
        case "grammar":
            assert content in ("up", "down")
        case "json_object":
            assert isinstance(json.loads(content), dict)
        case "required" | "named":
            assert not content and calls
        case _:
            assert calls or content
    texts = [call["function"]["arguments"] for call in calls]
    texts += [content] if form in ("json_schema", "auto") and not calls else []
    if form != "auto" or not calls:  # calls by choice are free
        for text in texts:
            jsonschema.validate(json.loads(text), {**SCHEMA, "additionalProperties": False})


@pytest.mark.parametrize("form", FORMS)
def test_every_answer_has_its_form(thinking, form):
    """The prompt says nothing: some answers reason first, and some do not."""
    leaning = 0
    for bias in ({}, {"32": 6}):  # a `<`, which begins a reasoning
        for choice in answers(thinking, form, logit_bias=bias):
            check(form, choice)
            leaning += bool(choice["message"].get("reasoning"))
            assert "<think>" not in (choice["message"]["content"] or "")
    assert leaning, "some reasoned"


@pytest.mark.parametrize("form", ["json_schema", "choice", "required"])
@pytest.mark.parametrize("opening", ["<think>\n", "<think>\n\n</think>\n\n"])
def test_a_prompt_that_opens_or_closes_a_reasoning(thinking, form, opening):
    for choice in answers(thinking, form, opening):
        check(form, choice)
        is_closed = opening.endswith("</think>\n\n")
        assert bool(choice["message"].get("reasoning")) != is_closed


@pytest.mark.parametrize("form", ["choice", "named"])
def test_a_stream_has_its_form(thinking, form):
    with thinking.openai() as client:
        stream = client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "x = 1"}],
            max_tokens=150,
            seed=5,
            stream=True,
            extra_body={**FORMS[form], "thinking_token_budget": 4},
        )
        choice = {"message": {"content": "", "tool_calls": []}, "finish_reason": None}
        for chunk in stream:
            delta = chunk.choices[0].delta
            choice["message"]["content"] += delta.content or ""
            for call in delta.tool_calls or []:
                if call.function.name:
                    choice["message"]["tool_calls"].append({"function": {"arguments": ""}})
                last = choice["message"]["tool_calls"][-1]["function"]
                last["arguments"] += call.function.arguments or ""
            choice["finish_reason"] = chunk.choices[0].finish_reason
    check(form, choice)


ROUTES = {
    "/v1/responses": {
        "input": "x = 1",
        "max_output_tokens": 150,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "x = 1"}],
        "max_tokens": 150,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.mark.parametrize("path", ROUTES)
def test_other_routes_have_their_forms(thinking, path):
    """The prompt has closed a reasoning; without a word of the prompt both would be followed."""
    closed = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    for temperature in (0.5, 1.0, 1.5):
        reply = thinking.post(path, {**ROUTES[path], **closed, "temperature": temperature})
        assert reply.status_code == 200, reply.text
        [text] = _texts(reply.json())
        jsonschema.validate(json.loads(text), {**SCHEMA, "additionalProperties": False})


@pytest.mark.parametrize("path", ["/v1/chat/completions", *ROUTES])
@pytest.mark.parametrize("answer", ['<think>hm</think>{"a": 1}', '{"a": 1}'])
def test_an_optional_reasoning_is_read_on_every_route(path, answer):
    body = ROUTES.get(
        path, {"messages": [{"role": "user", "content": "x"}], **FORMS["json_schema"]}
    )

    async def use(http):
        return (await http.post(path, json={**body, "model": "scripted"})).json()

    text = json.dumps(with_app(use, answer, reasoning_parser="qwen3"))
    assert json.dumps('{"a": 1}') in text
    assert ("hm" in text) is ("hm" in answer)


def _texts(reply):
    """The texts of the answer."""
    parts = [part for item in reply.get("output", ()) for part in item.get("content") or ()]
    parts += reply.get("content") or []
    return [part["text"] for part in parts if part["type"] in ("output_text", "text")]
