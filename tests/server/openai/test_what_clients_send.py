"""Fields that clients of other servers send: served, or left out and named."""

import anthropic
import pytest

from quire.server.openai.prompts import output_budget

HELLO = [{"role": "user", "content": "def add(a, b):"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(server, **fields):
    reply = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, **fields})
    assert reply.status_code == 200, reply.text
    return reply


def text_of(reply):
    return reply.json()["choices"][0]["message"]["content"]


def refusal(server, path, body):
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_more_tokens_than_the_context_has_are_cut_and_named(server):
    most = server.get("/v1/models").json()["data"][0]["max_model_len"]
    reply = chat(server, max_tokens=10 * most, stop=["\n"])
    room = most - reply.json()["usage"]["prompt_tokens"]
    assert reply.headers["x-adjusted-fields"] == f"max_tokens={room}"
    reply = chat(server, max_tokens=None, max_completion_tokens=most, stop=["\n"])
    assert reply.headers["x-adjusted-fields"] == f"max_completion_tokens={room}"
    body = {"input": "a", "max_output_tokens": 10 * most, "stop": ["e"]}
    cut = server.post("/v1/responses", body).headers["x-adjusted-fields"]
    assert cut.startswith("max_output_tokens=")
    assert "x-adjusted-fields" not in chat(server, max_tokens=3).headers


@pytest.mark.parametrize(
    ("asked", "default", "allowed"),
    [(None, None, 10), (4, None, 4), (99, None, 10), (None, 3, 3), (5, 3, 3), (2, 3, 2)],
)
def test_the_generation_config_bounds_what_is_asked_for(asked, default, allowed):
    defaults = {} if default is None else {"max_tokens": default}
    assert output_budget(asked, "max_tokens", defaults, 6, 16) == allowed


def test_a_function_is_chosen_by_its_name_alone(server):
    """huggingface_hub describes a choice without a type, and vLLM's type has a default."""
    reply = chat(
        server, tools=[FUNCTION], tool_choice={"function": {"name": "f"}}, max_tokens=40
    ).json()["choices"][0]
    assert reply["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_client_of_messages_may_ask_for_more_than_the_context(server):
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        message = client.messages.create(
            model="", max_tokens=20_000, messages=HELLO, stop_sequences=["\n"]
        )
    assert message.stop_reason == "stop_sequence"


def test_a_prompt_that_is_too_long_is_still_refused(server):
    body = {"messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 1}
    assert refusal(server, "/v1/chat/completions", body)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "tool", [{"type": "web_search"}, {"type": "web_search_preview_2025_03_11"}, {"type": "mcp"}]
)
def test_hosted_tools_are_left_out_and_named(server, tool):
    own = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    reply = server.post("/v1/responses", {
        "input": "a", "max_output_tokens": 1, "tools": [own, tool], "tool_choice": "auto"
    })  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-ignored-fields"] == "tools[1]"
    plain = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "tools": [own]})
    assert reply.json()["usage"]["input_tokens"] == plain.json()["usage"]["input_tokens"]
    reply = chat(server, tools=[tool], tool_choice="auto")
    assert reply.headers["x-ignored-fields"] == "tools[0]"


def test_hosted_tools_of_messages_are_left_out(server):
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        raw = client.messages.with_raw_response.create(
            model="",
            max_tokens=1,
            messages=HELLO,
            tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}],
        )
    assert "tools[0]" in raw.headers["x-ignored-fields"]


def test_what_only_hosted_tools_have_is_refused_of_others(server):
    body = {"messages": HELLO, "max_tokens": 1, "tools": [{"name": "f", "max_uses": 1}]}
    assert "max_uses" in refusal(server, "/v1/messages", body)["message"]


def test_a_hosted_tool_that_must_be_called_is_refused(server):
    body = {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}
    assert "web_search" in refusal(server, "/v1/responses", body)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/models/", "/health/", "/v1/models"])
def test_a_slash_at_the_end_changes_nothing(server, path):
    if path.startswith("/v1/chat"):
        assert server.post(path, {"messages": HELLO, "max_tokens": 1}).status_code == 200
    else:
        assert server.get(path).status_code == 200


def test_several_greedy_completions_are_equal(server):
    one = text_of(chat(server, temperature=0, max_tokens=12))
    many = chat(server, temperature=0, max_tokens=12, n=2, top_p=0.3, min_p=0.5).json()["choices"]
    assert [choice["message"]["content"] for choice in many] == [one, one]


@pytest.mark.parametrize("temperature", [0, 0.7, None])
def test_a_top_p_of_0_takes_the_likeliest_token(server, temperature):
    greedy = text_of(chat(server, temperature=0, max_tokens=12))
    assert text_of(chat(server, top_p=0, temperature=temperature, max_tokens=12)) == greedy


def test_the_forms_of_sglang_are_served(server):
    assert text_of(chat(server, regex="[0-9]{3}", max_tokens=20)).isdecimal()
    said = text_of(chat(server, ebnf='root ::= "yes" | "no"', max_tokens=20))
    assert said in ("yes", "no")


@pytest.mark.parametrize(("name", "value"), [("regex", "["), ("ebnf", "root ::= (")])
def test_a_form_that_is_wrong_is_refused_by_its_name(server, name, value):
    body = {"messages": HELLO, "max_tokens": 4, name: value}
    assert refusal(server, "/v1/chat/completions", body)["param"] == name


def test_two_forms_are_refused(server):
    body = {"messages": HELLO, "regex": "a", "ebnf": 'root ::= "a"'}
    assert "regex and ebnf" in refusal(server, "/v1/chat/completions", body)["message"]


def test_marks_of_other_caches_are_left_out_and_named(server):
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a", **mark}
    reply = chat(server, messages=[{"role": "user", "content": [part]}], prompt_cache_key="k",
                 tools=[{**FUNCTION, **mark}])  # fmt: skip
    names = set(reply.headers["x-ignored-fields"].split(", "))
    assert {"prompt_cache_key", "messages[0].content[0].cache_control"} <= names
    assert "tools[0].cache_control" in names
    reply = server.post("/v1/messages", {
        "messages": HELLO, "max_tokens": 1, "tools": [{"name": "f", **mark}],
        "system": [{"type": "text", "text": "a", **mark}],
    })  # fmt: skip
    names = set(reply.headers["x-ignored-fields"].split(", "))
    assert names == {"tools[0].cache_control", "system[0].cache_control"}


def test_documents_are_refused_with_what_to_send(server):
    source = {"type": "text", "media_type": "text/plain", "data": "a"}
    document = {"type": "document", "source": source}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [document]}]}
    message = refusal(server, "/v1/messages", body)["message"]
    assert "document" in message and 'a block of the type "text"' in message
