"""What people reported of servers with these interfaces, tried here; docs/compatibility.md has a
table of the reports, by the names of these tests.
"""

import json

import anthropic
import pytest

from quire.server.output_parsing import plan_parsers
from tests.server.scripted_server import scripted

ASK = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "required": ["city"],
            "properties": {"city": {"type": "string", "minLength": 40, "maxLength": 60}},
        },
    },
}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as made:
        yield made


@pytest.fixture(scope="module", params=[1, 5], ids=["one by one", "five a step"])
def hermes(request):
    with scripted(plan_parsers("hermes", "qwen3"), tokens_per_step=request.param) as running:
        yield running


def chat(client, **fields):
    given = {"model": "", "messages": ASK, "temperature": 0, "max_tokens": 8, **fields}
    return client.chat.completions.create(**given)


def ask(server, says, **fields):
    """The reply of a scripted server, whole and joined from a stream: content, reasoning, the
    arguments of its calls, and the reason of its end.
    """
    server.says = says
    given = {"model": "scripted", "messages": ASK, **fields}
    [choice] = server.openai.chat.completions.create(**given).choices
    calls = [call.function.arguments for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning", None) or ""
    whole = (choice.message.content or "", reasoning, calls, choice.finish_reason)
    return whole, joined(server.openai.chat.completions.create(**given, stream=True))


def joined(stream):
    content = reasoning = ""
    arguments, reason = {}, None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                before = arguments.get(call.index, "")
                arguments[call.index] = before + (call.function.arguments or "")
            reason = choice.finish_reason or reason
    return content, reasoning, [arguments[index] for index in sorted(arguments)], reason


# calls


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_vllm_53269_a_call_that_is_cut_ends_with_length(client, choice):
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 12}
    [whole] = chat(client, **fields).choices
    assert whole.finish_reason == "length"
    assert joined(chat(client, **fields, stream=True))[3] == "length"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_vllm_25054_a_call_ends_as_openai_says(client, choice):
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    [whole] = chat(client, **fields).choices
    json.loads(whole.message.tool_calls[0].function.arguments)
    expected = "tool_calls" if choice == "required" else "stop"
    assert whole.finish_reason == expected
    assert joined(chat(client, **fields, stream=True))[3] == expected


def test_vllm_28806_a_call_without_arguments_has_an_object(hermes):
    says = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "now"}}
    whole, streamed = ask(hermes, says, tools=[tool])
    assert whole == streamed == ("", "", ["{}"], "tool_calls")


@pytest.mark.parametrize("text", ["mkdir -p test/{test1,test2", "a}} b", '{"c": [', "x</tool"])
def test_vllm_21544_and_32152_braces_of_a_call_are_not_counted(hermes, text):
    arguments = json.dumps({"command": text, "deep": {"a": {"b": 1}}})
    says = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    whole, streamed = ask(hermes, says, tools=[TOOL])
    assert whole == streamed == ("", "", [arguments], "tool_calls")


@pytest.mark.parametrize(
    ("parser", "says"),
    [
        (
            "xlam",
            '[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"c": "u"}}]',
        ),
        (
            "hunyuan_a13b",
            '<tool_calls>[{"name": "now", "arguments": {}}, '
            '{"name": "weather", "arguments": {"c": "u"}}]</tool_calls>',
        ),
    ],
)
def test_vllm_47901_a_call_after_one_without_arguments_keeps_its_own(parser, says):
    tools = [{"type": "function", "function": {"name": "now"}}, TOOL]
    with scripted(plan_parsers(parser, None)) as running:
        whole, streamed = ask(running, says, tools=tools)
    assert whole == streamed == ("", "", ["{}", '{"c": "u"}'], "tool_calls")


def test_dynamo_8636_calls_come_where_the_prompt_has_closed_a_reasoning(hermes):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    more = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    whole, streamed = ask(hermes, f"{call}\n{call}", tools=[TOOL], extra_body=more)
    assert whole == streamed == ("", "", ['{"city": "Ulm"}'] * 2, "tool_calls")


def test_vllm_50502_one_call_at_most_is_one_that_ends(client):
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    [choice] = chat(client, **fields, max_tokens=200).choices
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"


def test_vllm_25001_the_result_of_a_call_may_be_a_list_of_parts(server):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    counts = [
        server.post("/tokenize", {"messages": [*turns, {
            "role": "tool", "tool_call_id": "a", "content": content}]}).json()["count"]
        for content in ("18 degrees", [{"type": "text", "text": "18 degrees"}])
    ]  # fmt: skip
    assert counts[0] == counts[1]


def test_vllm_13978_no_calls_of_an_earlier_turn_are_none(server):
    said = {"role": "assistant", "content": "hi"}
    bodies = [
        {"messages": [*ASK, {**said, **more}, *ASK], "max_tokens": 1}
        for more in ({}, {"tool_calls": []}, {"tool_calls": None})
    ]
    sent = [server.post("/tokenize", {"messages": body["messages"]}).json() for body in bodies]
    assert sent[0] == sent[1] == sent[2] and sent[0]["count"]
    replies = [server.post("/v1/chat/completions", body) for body in bodies]
    assert [reply.status_code for reply in replies] == [200] * 3


# log-probabilities


def test_vllm_4795_log_probabilities_without_a_number_of_others(client):
    [choice] = chat(client, logprobs=True).choices
    entries = choice.logprobs.content
    assert len(entries) == 8 and all(entry.top_logprobs == [] for entry in entries)
    text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert text == choice.message.content


def test_vllm_3707_no_others_is_not_none(client):
    reply = client.completions.create(model="", prompt="def f(", max_tokens=3, logprobs=0)
    assert len(reply.choices[0].logprobs.token_logprobs) == 3


def test_vllm_9453_log_probabilities_are_those_of_the_model(client):
    def first(**fields):
        [choice] = chat(client, logprobs=True, top_logprobs=5, max_tokens=1, **fields).choices
        return [(top.token, top.logprob) for top in choice.logprobs.content[0].top_logprobs]

    assert first() == first(temperature=1.5, top_p=0.5, seed=1) == first(presence_penalty=1)


def test_vllm_16540_tokens_that_are_part_of_a_character_have_their_bytes(client):
    [choice] = chat(client, logprobs=True, top_logprobs=20, max_tokens=20).choices
    tops = [top for entry in choice.logprobs.content for top in entry.top_logprobs]
    assert len(tops) == 20 * len(choice.logprobs.content)
    assert all(0 <= byte < 256 for top in tops for byte in top.bytes or [])
    assert all(top.logprob == top.logprob for top in tops)


def test_vllm_17637_log_probabilities_under_a_form_are_json(client):
    form = {"structured_outputs": {"regex": "ab"}}
    [choice] = chat(client, logprobs=True, top_logprobs=5, extra_body=form).choices
    assert choice.message.content == "ab"
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith("ab")
    assert all(-9999 <= top.logprob <= 0 for entry in entries for top in entry.top_logprobs)


def test_vllm_42019_scores_of_prompts_do_not_depend_on_their_order(server):
    prompts = [[5 + n, *range(10, 10 + 20 * n), 7] for n in (2, 1, 3)]
    bodies = [prompts, prompts[::-1], prompts]

    def scores(listed):
        body = {"prompt": listed, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        choices = server.post("/v1/completions", body).json()["choices"]
        return [(choice["prompt_logprobs"], choice["text"]) for choice in choices]

    first, turned, again = map(scores, bodies)
    assert first == turned[::-1] == again


def test_vllm_47815_offsets_of_a_stream_with_its_prompt_are_those_of_the_whole(client):
    fields = {
        "model": "", "prompt": "def add(", "max_tokens": 6, "temperature": 0, "echo": True,
        "logprobs": 1,
    }  # fmt: skip
    [whole] = client.completions.create(**fields).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    offsets = [at for one in chunks if one.logprobs for at in one.logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset
    assert "".join(one.text for one in chunks) == whole.text


def test_vllm_45592_a_pattern_and_a_length_hold_together(client):
    item = {"type": "string", "pattern": "^[a-z ]+$", "maxLength": 8}
    schema = {"type": "array", "items": item, "minItems": 2, "maxItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    [choice] = chat(client, response_format=form, max_tokens=100).choices
    words = json.loads(choice.message.content)
    assert len(words) == 2 and all(1 <= len(word) <= 8 for word in words)


# texts and stop strings


def test_vllm_3672_a_stop_string_over_several_tokens_is_not_sent(client):
    def text(**fields):
        stream = client.completions.create(
            model="", prompt="def add(a, b):", max_tokens=30, temperature=0, stream=True, **fields
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    whole = text()
    stop = whole[9:17]
    assert text(stop=[stop]) == whole[: whole.index(stop)]
    kept = text(stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept == whole[: whole.index(stop) + len(stop)]


def test_vllm_14170_and_45636_waiting_for_a_stop_string_breaks_no_mark(hermes):
    says = "<think>9.11 and 9.12</think>The first."
    for stop in ("9.8 is greater", "</think>The last", "<t"):
        whole, streamed = ask(hermes, says, stop=stop)
        assert whole == streamed, stop
        if stop != "<t":
            assert whole == ("The first.", "9.11 and 9.12", [], "stop")


@pytest.mark.parametrize("opening", ["<think>\n\n</think>\n\n", "</think>"])
def test_vllm_19222_a_reasoning_that_the_prompt_has_closed_is_over(opening):
    with scripted(plan_parsers(None, "deepseek_r1")) as running:
        more = {"chat_template_kwargs": {"opening": opening}}
        whole, streamed = ask(running, '{"a": 1}', extra_body=more)
    assert whole == streamed == ('{"a": 1}', "", [], "stop")


def test_vllm_48863_an_answer_without_a_reasoning_is_not_null(hermes):
    whole, streamed = ask(hermes, '{"a": 42}', extra_body={"include_reasoning": False})
    assert whole == streamed == ('{"a": 42}', "", [], "stop")


# usage


def test_vllm_7262_and_36379_usage_comes_once_and_when_it_is_asked_for(client):
    def usages(options):
        stream = chat(client, stream=True, stream_options=options)
        return [(bool(chunk.choices), chunk.usage) for chunk in stream]

    *before, (has_choices, usage) = usages({"include_usage": True})
    assert not has_choices and usage.completion_tokens == 8
    assert all(each is None for _, each in before)
    assert all(each is None for _, each in usages({}))


def test_vllm_2012_a_chat_counts_as_its_template_says(server, client):
    tokens = server.post("/tokenize", {"messages": ASK}).json()["tokens"]
    assert chat(client).usage.prompt_tokens == len(tokens)
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    again = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert again["tokens"] == tokens


# responses


def events_of(client, **fields):
    given = {"model": "", "input": "hello", "temperature": 0, "stream": True, **fields}
    return list(client.responses.create(**given))


def test_vllm_30223_and_ogx_5309_the_last_events_have_the_whole_text(client):
    events = events_of(client, max_output_tokens=8, extra_body={"ignore_eos": True})
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    kinds = [event.type for event in events]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert done.text == text and text
    assert kinds.index(done.type) < kinds.index("response.content_part.done")
    assert events[-1].response.output[-1].content[0].text == text


def test_litellm_20943_and_28899_events_have_every_field(client):
    events = events_of(client, max_output_tokens=8)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        if event.type.startswith(("response.output_text", "response.content_part")):
            assert (event.output_index, event.content_index) == (0, 0) and event.item_id
    first, last = events[0].response, events[-1].response
    assert first.created_at and first.output == [] and last.text.format.type == "text"
    assert last.usage.input_tokens_details.cached_tokens >= 0
    assert last.usage.output_tokens_details.reasoning_tokens == 0


def test_langchain_33840_an_answer_that_is_cut_is_incomplete(client):
    last = events_of(client, max_output_tokens=4, extra_body={"ignore_eos": True})[-1]
    assert last.type == "response.incomplete" and last.response.status == "incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_sglang_17853_an_input_is_a_list_of_turns_with_parts(client):
    turns = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "user", "content": "d"},
    ]
    reply = client.responses.create(model="", input=turns, max_output_tokens=2)
    assert reply.usage.output_tokens <= 2


def test_vllm_49239_an_error_does_not_repeat_the_request(server):
    item = {"role": "user", "content": [{"type": "input_text", "text": 5}] * 40}
    reply = server.post("/v1/responses", {"model": "", "input": [item] * 300})
    assert reply.status_code == 400 and len(reply.content) < 2000


def test_vllm_11171_a_body_needs_no_type_and_never_breaks_the_server(server):
    body = json.dumps({"messages": ASK, "max_tokens": 1}).encode()
    with server.client() as plain:
        for kind in ({}, {"content-type": "text/plain"}, {"content-type": "application/json"}):
            sent = plain.post("/v1/chat/completions", content=body, headers=kind)
            assert sent.status_code in (200, 400), sent.text
        assert plain.post("/v1/chat/completions", content=b"{").status_code == 400


# messages


@pytest.fixture(scope="module")
def messages(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made.messages


def test_mlx_vlm_1785_a_turn_of_a_call_alone_is_taken(messages):
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    turns = [
        *ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    reply = messages.create(model="", max_tokens=4, messages=turns, tools=[tool])
    assert reply.usage.input_tokens


def test_sglang_20678_a_stream_begins_with_the_tokens_of_the_prompt(messages):
    count = messages.count_tokens(model="", messages=ASK).input_tokens
    started, *_, last, _ = messages.create(model="", max_tokens=4, messages=ASK, stream=True)
    usage = started.message.usage
    read = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert usage.input_tokens + read == count
    assert last.type == "message_delta" and last.usage.input_tokens == usage.input_tokens


def test_litellm_34692_a_streamed_call_is_the_first_block_and_the_reason_to_stop(messages):
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    events = list(
        messages.create(
            model="", max_tokens=300, messages=ASK, tools=[tool], stream=True,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    )  # fmt: skip
    blocks = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert blocks == ["tool_use"]
    [end] = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == "tool_use"
