"""Tools and reasoning over HTTP, with the `openai` client and a model that follows a script."""

import json

import httpx
import openai
import pytest

from quire.server.output_parsing import ParserPlan, ReasoningFormat, plan_parsers
from tests.server.scripted_app import tokenizer
from tests.server.scripted_server import scripted

ASK = [{"role": "user", "content": "How is it in Bonn?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bönn \\"1\\""}}\n</tool_call>'
ARGUMENTS = '{"city": "Bönn \\"1\\""}'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server():
    with scripted(plan_parsers("hermes", "qwen3")) as running:
        yield running


@pytest.fixture(scope="module")
def jumping():
    """Five tokens a step, as speculation gives them."""
    with scripted(plan_parsers("hermes", "qwen3"), tokens_per_step=5) as running:
        yield running


def ask(server, says, **options):
    server.says = says
    options = {"messages": ASK, "model": "scripted", **options}
    return server.openai.chat.completions.create(**options)


def gathered(stream):
    """What the deltas of a stream add up to, by the client's rules."""
    found = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            found["content"] += delta.content or ""
            found["reasoning"] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(found["calls"]):
                    assert call.type == "function"
                    found["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.id is None and call.function.name is None
                found["calls"][call.index][2] += call.function.arguments or ""
            found["finish"] = choice.finish_reason or found["finish"]
    return found


def said(reply):
    """The same of a reply that is not streamed."""
    [choice] = reply.choices
    message = choice.message
    calls = [[c.id, c.function.name, c.function.arguments] for c in message.tool_calls or []]
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": calls,
        "finish": choice.finish_reason,
    }


def without_ids(found):
    return {**found, "calls": [call[1:] for call in found["calls"]]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", ["server", "jumping"])
def test_a_call_between_words(request, number, stream):
    server = request.getfixturevalue(number)
    says = f"<think>\nhm, 3 < 4\n</think>\n\nI look.\n{CALL}\n{SECOND}"
    reply = ask(server, says, tools=[WEATHER, NOW], stream=stream)
    found = gathered(reply) if stream else said(reply)
    ids = [call[0] for call in found["calls"]]
    assert len(set(ids)) == 2 and all(id.startswith("chatcmpl-tool-") for id in ids)
    assert without_ids(found) == {
        "content": "\n\nI look.\n",
        "reasoning": "\nhm, 3 < 4\n",
        "calls": [["weather", ARGUMENTS], ["now", "{}"]],
        "finish": "tool_calls",
    }
    assert server.prompt().startswith("[tool weather][tool now]<user>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "says",
    [
        "Just words.",
        "",
        "<think>hm",
        "a <tool_call> b",
        "<tool_call>{}</tool_call>",
        f"{CALL} Done.",
    ],
)
def test_both_modes_say_the_same(server, says, stream):
    whole = said(ask(server, says, tools=[WEATHER]))
    streamed = gathered(ask(server, says, tools=[WEATHER], stream=True))
    assert without_ids(streamed) == without_ids(whole)


def test_a_call_that_is_cut_says_length(server):
    for stream in (False, True):
        reply = ask(server, CALL, tools=[WEATHER], max_tokens=25, stream=stream)
        found = gathered(reply) if stream else said(reply)
        assert found["finish"] == "length"
        [[_, name, arguments]] = found["calls"]
        assert name == "weather" and ARGUMENTS.startswith(arguments) and arguments != ARGUMENTS


def test_a_whole_reply_of_calls_has_null_content_and_both_names_of_reasoning(server):
    message = ask(server, f"<think>hm</think>{CALL}", tools=[WEATHER]).choices[0].message
    assert message.content is None
    assert (message.reasoning, message.reasoning_content) == ("hm", "hm")


def test_without_tools_markup_is_text(server):
    found = said(ask(server, CALL))
    assert (found["content"], found["calls"], found["finish"]) == (CALL, [], "stop")


def test_none_shows_the_tools_and_reads_no_calls(server):
    found = said(ask(server, CALL, tools=[WEATHER], tool_choice="none"))
    assert (found["content"], found["calls"], found["finish"]) == (CALL, [], "stop")
    assert server.prompt().startswith("[tool weather]")


def test_one_call_at_most(server):
    for stream in (False, True):
        options = {"tools": [WEATHER, NOW], "parallel_tool_calls": False, "stream": stream}
        reply = ask(server, CALL + SECOND, **options)
        found = gathered(reply) if stream else said(reply)
        assert [call[1] for call in found["calls"]] == ["weather"]


def test_the_result_of_a_call_goes_back(server):
    call = ask(server, CALL, tools=[WEATHER]).choices[0].message
    messages = [
        *ASK,
        call.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Rain."},
    ]
    reply = ask(server, "It rains.", messages=messages, tools=[WEATHER])
    assert said(reply)["content"] == "It rains."
    assert '[weather {"city": "B\\u00f6nn \\"1\\""}]<tool>Rain.' in server.prompt().replace(
        "ö", "\\u00f6"
    )


def test_reasoning_that_the_prompt_opens_or_closes(server):
    opened = {"chat_template_kwargs": {"opening": "<think>\n"}}
    found = said(ask(server, "hm\n</think>Yes.", extra_body=opened))
    assert (found["reasoning"], found["content"]) == ("hm\n", "Yes.")
    closed = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    found = said(ask(server, "Yes, <think>.", extra_body=closed))
    assert (found["reasoning"], found["content"]) == ("", "Yes, <think>.")


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat/completions", {"messages": ASK}),
        ("responses", {"input": "How is it?"}),
        ("messages", {"messages": ASK, "max_tokens": 40}),
    ],
)
def test_thinking_is_switched_off_in_the_template(server, route, fields):
    """Where the model can think, `enable_thinking` changes the answer on every route."""
    server.says = "Yes."
    for enabled, shown in ((None, False), (True, False), (False, True)):
        body = {"model": "scripted", "enable_thinking": enabled, **fields}
        reply = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)
        assert reply.status_code == 200 and "X-Ignored-Fields" not in reply.headers, reply.text
        assert server.prompt().endswith("[terse]") == shown


def test_reasoning_can_be_left_out_with_all_that_tells_of_it(server):
    for stream in (False, True):
        reply = ask(
            server,
            "<think>hm</think>Yes.",
            logprobs=True,
            stream=stream,
            extra_body={"include_reasoning": False, "return_token_ids": True},
        )
        chunks = list(reply) if stream else [reply]
        text = "".join(chunk.model_dump_json() for chunk in chunks)
        assert "hm" not in text
        assert all(
            c.logprobs is None and not getattr(c, "token_ids", None)
            for k in chunks
            for c in k.choices
        )
        found = gathered(chunks) if stream else said(reply)
        assert (found["reasoning"], found["content"]) == ("", "Yes.")


def test_reasoning_is_counted(server):
    usage = ask(server, "<think>hm hm</think>Yes.").usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tool_choice": "required"}, "it goes with tools only"),
        ({"tools": [], "tool_choice": NAMED}, "it goes with tools only"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function=null"),
        ({"tools": [{"type": "browser"}]}, 'tools[0].type="browser"'),
        ({"tools": [WEATHER, WEATHER]}, "a name of its own"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "the tools are now",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(server, options, complaint):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "x", **options)
    assert complaint in caught.value.body["message"]


def test_a_server_without_a_format_refuses_auto():
    with scripted(ParserPlan()) as server:
        assert said(ask(server, "Yes.", tools=[WEATHER], tool_choice="none"))["content"] == "Yes."
        for choice in ({}, {"tool_choice": "auto"}):
            with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
                ask(server, "x", tools=[WEATHER], **choice)


def test_marks_that_are_special_tokens_are_seen():
    first = tokenizer().all_special_tokens[0]
    with scripted(ParserPlan(None, ReasoningFormat("x", (first,), ("</x>",)))) as server:
        found = said(ask(server, f"{first}hm</x>Yes."))
        assert (found["reasoning"], found["content"]) == ("hm", "Yes.")


def test_arguments_can_be_read(server):
    found = gathered(ask(server, CALL, tools=[WEATHER], stream=True))
    assert json.loads(found["calls"][0][2]) == {"city": 'Bönn "1"'}


def test_required_calls_are_a_form_that_begins_behind_the_reasoning(server):
    says = '<think>hm</think>[{"name": "weather", "parameters": {"city": "Bonn"}}]'
    for stream in (False, True):
        reply = ask(server, says, tools=[WEATHER], tool_choice="required", stream=stream)
        found = gathered(reply) if stream else said(reply)
        assert without_ids(found) == {
            "content": "",
            "reasoning": "hm",
            "calls": [["weather", '{"city": "Bonn"}']],
            "finish": "tool_calls",
        }
    form = server.seen[-1].sampling_params.structured_outputs
    assert form.json["type"] == "array"
    assert (form.opens_with, form.starts_after) == (["<think>"], ["</think>"])


def test_a_named_call_is_a_form_and_ends_with_stop(server):
    closed = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    says = '{"city": "Bonn"}'
    for stream in (False, True):
        options = {"tools": [WEATHER, NOW], "tool_choice": NAMED, "extra_body": closed}
        reply = ask(server, says, stream=stream, **options)
        found = gathered(reply) if stream else said(reply)
        assert without_ids(found) == {
            "content": "",
            "reasoning": "",
            "calls": [["weather", says]],
            "finish": "stop",
        }
    form = server.seen[-1].sampling_params.structured_outputs
    assert (form.json, form.starts_after) == (WEATHER["function"]["parameters"], None)


def test_a_response_format_begins_behind_the_reasoning_too(server):
    ask(server, "<think>hm</think>{}", response_format={"type": "json_object"})
    form = server.seen[-1].sampling_params.structured_outputs
    assert form.json_object
    assert (form.opens_with, form.starts_after) == (["<think>"], ["</think>"])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_rules_over_a_response_format(server, choice):
    says = '{"city": "Bonn"}' if choice is NAMED else f"[{json.dumps(BONN)}]"
    options = {"tools": [WEATHER], "tool_choice": choice}
    found = said(ask(server, f"<think>hm</think>{says}", response_format=ANY_JSON, **options))
    assert [call[1:] for call in found["calls"]] == [["weather", '{"city": "Bonn"}']]
    form = server.seen[-1].sampling_params.structured_outputs
    assert form.json["type"] == ("object" if choice is NAMED else "array")
    assert (form.opens_with, form.starts_after) == (["<think>"], ["</think>"])


BONN = {"name": "weather", "parameters": {"city": "Bonn"}}
ANY_JSON = {"type": "json_object"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_holds_for_content_and_leaves_calls_free(server, stream):
    for says, content, calls in (("{}", "{}", []), (CALL, "", [["weather", ARGUMENTS]])):
        says = f"<think>hm</think>{says}"
        reply = ask(server, says, tools=[WEATHER], response_format=ANY_JSON, stream=stream)
        found = without_ids(gathered(reply) if stream else said(reply))
        assert (found["content"], found["calls"]) == (content, calls)
        form = server.seen[-1].sampling_params.structured_outputs
        answer, call = json.loads(form.structural_tag)["format"]["elements"]
        assert answer == {"type": "json_schema", "json_schema": {"type": "object"}}
        assert call["elements"][0]["value"] == "<tool_call>"
        assert (form.opens_with, form.starts_after) == (["<think>"], ["</think>"])


def test_another_form_of_output_holds_for_calls_too(server):
    ask(server, "<think>hm</think>yes", tools=[WEATHER], extra_body={"guided_choice": ["yes"]})
    form = server.seen[-1].sampling_params.structured_outputs
    assert (form.choice, form.structural_tag) == (["yes"], None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_the_channels_of_gpt_oss(choice, stream):
    says = (  # less the <|end|>, which ends a text of the tokenizer in use
        "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>commentary"
        ' to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}'
    )
    with scripted(plan_parsers("openai", "openai_gptoss")) as server:
        reply = ask(server, says, tools=[WEATHER], tool_choice=choice, stream=stream)
        assert without_ids(gathered(reply) if stream else said(reply)) == {
            "content": "",
            "reasoning": "hm",
            "calls": [["weather", '{"city": "Bonn"}']],
            "finish": "stop" if choice == NAMED else "tool_calls",
        }
        form = server.seen[-1].sampling_params.structured_outputs
        assert (form is None) is (choice == "auto")
        assert form is None or (
            "functions.weather" in form.structural_tag and not form.starts_after
        )


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("opening", ["", "<|message_model|><|content_thinking|>"])
def test_forced_calls_of_inkling_after_an_open_reasoning_too(choice, opening):
    call = '<|content_invoke_tool_json|>{"name":"weather","args":{"city": "Bonn"}}'
    says = ("hm<|end_message|>" if opening else "") + "<|message_model|>" + call
    template = {"chat_template_kwargs": {"opening": opening}}
    with scripted(plan_parsers("inkling", "inkling")) as server:
        reply = ask(server, says, tools=[WEATHER], tool_choice=choice, extra_body=template)
        assert without_ids(said(reply)) == {
            "content": "",
            "reasoning": "hm" if opening else "",
            "calls": [["weather", '{"city": "Bonn"}']],
            "finish": "stop" if choice == NAMED else "tool_calls",
        }
        form = server.seen[-1].sampling_params.structured_outputs
        begins = json.loads(form.structural_tag)["format"]["elements"][0]["type"]
        assert begins == ("any_text" if opening else "or")


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize(
    "options", [{}, {"logprobs": True, "top_logprobs": 1}], ids=["", "logprobs"]
)
def test_no_empty_content_comes_with_a_call(server, choice, options):
    says = {"auto": CALL, "required": f"[{json.dumps(BONN)}]"}.get(str(choice), '{"city": "Bonn"}')
    closed = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    given = {"tools": [WEATHER], "tool_choice": choice, "stream": True, "extra_body": closed}
    first, *chunks = ask(server, says, **given, **options)
    assert first.choices[0].delta.content == ""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    has_begun = choice != "auto"
    for delta in deltas:
        has_begun = has_begun or bool(delta.tool_calls)
        assert not (has_begun and delta.content is not None), delta
    assert deltas[-1].model_dump(exclude_unset=True) == {}


def test_without_a_format_forced_calls_have_no_empty_content_either():
    with scripted(ParserPlan()) as server:
        options = {"tools": [WEATHER], "tool_choice": NAMED, "stream": True}
        _, *chunks = ask(server, '{"city": "Bonn"}', **options)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert all(delta.content is None for delta in deltas)
        assert deltas[-1].tool_calls is None


@pytest.mark.parametrize("options", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_list_of_tools_and_a_choice_without_tools_mean_nothing(server, options, stream):
    for tools in ({}, {"tools": []}):
        reply = ask(server, CALL, **tools, **options, stream=stream)
        found = gathered(reply) if stream else said(reply)
        assert (found["content"], found["calls"], found["finish"]) == (CALL, [], "stop")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server, mode):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    says = {"auto": CALL, "required": f"<think></think>[{json.dumps(BONN)}]"}[mode]
    found = said(ask(server, says, tools=[NOW, WEATHER], tool_choice=choice))
    assert [call[1] for call in found["calls"]] == ["weather"] and found["finish"] == "tool_calls"
    assert server.prompt().startswith("[tool weather]<user>")
