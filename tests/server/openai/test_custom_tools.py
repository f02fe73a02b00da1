"""Custom tools, whose input is a text, over chat and responses, by the `openai` client."""

import json
import re

import openai
import pytest

from quire.server.output_parsing import plan_parsers
from tests.server.openai.test_tools import ask
from tests.server.scripted_server import scripted

TEXT = 'Line "1"\n\t\\ é 😀'
WORD = {"syntax": "regex", "definition": "[a-c]{2,4}"}
SUM = {"syntax": "lark", "definition": 'start: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,2}/'}
NAMED = {"type": "custom", "custom": {"name": "patch"}}
ASK = [{"role": "user", "content": "Patch it."}]
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_form = pytest.mark.parametrize("form", ["hermes", "generic", "qwen3_coder"])


def custom(grammar=None):
    form = {"format": {"type": "grammar", "grammar": grammar}} if grammar else {}
    described = {"name": "patch", "description": "Patches a file.", **form}
    return {"type": "custom", "custom": described}


def flat(tool):
    described = dict(tool["custom"])
    if form := described.pop("format", None):
        described["format"] = {"type": "grammar", **form["grammar"]}
    return {"type": "custom", **described}


def called(text):
    return "<tool_call>" + json.dumps({"name": "patch", "arguments": {"input": text}})


def found(reply, stream):
    """(name, input, content, finish reason) of a reply with one call."""
    if not stream:
        [choice] = reply.choices
        [call] = choice.message.tool_calls
        assert (call.type, call.id[:9]) == ("custom", "chatcmpl-")
        content = choice.message.content or ""
        return call.custom.name, call.custom.input, content, choice.finish_reason
    name, written, content, finish = None, "", "", None
    for chunk in reply:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == 0 and call.function is None
            if name is None:
                assert call.type == "custom" and call.id
            name = name or call.custom["name"]
            written += call.custom.get("input", "")
        finish = choice.finish_reason or finish
    return name, written, content, finish


@pytest.fixture(scope="module")
def script():
    with scripted(plan_parsers("generic", "qwen3")) as running:
        yield running


@each_way
@each_form
def test_a_call_by_choice_has_its_input_as_text(form, stream):
    says = called(TEXT)
    if form == "qwen3_coder":
        says = f"<tool_call><function=patch><parameter=input>\n{TEXT}\n</parameter></function>"
    with scripted(plan_parsers(form)) as server:
        reply = ask(server, f"So.\n{says}</tool_call>", tools=[custom()], stream=stream)
        name, written, content, finish = found(reply, stream)
    assert (name, written, content.strip(), finish) == ("patch", TEXT, "So.", "tool_calls")


def test_the_prompt_says_what_the_input_is(script):
    for grammar, notation in ((WORD, "regular expression"), (SUM, "Lark's notation")):
        ask(script, "No.", tools=[custom(grammar)])
        prompt = script.prompt()
        assert "Patches a file." in prompt and notation in prompt
        assert json.dumps(grammar["definition"])[1:-1] in prompt


@each_way
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_input_is_any_text_or_follows_its_expression(script, stream, choice):
    says = {"name": "patch", "parameters": {"input": TEXT}}
    says = [says] if choice == "required" else says["parameters"]
    tools = [custom(WORD), {"type": "function", "function": {"name": "now"}}]
    says = f"<think></think>{json.dumps(says)}"
    reply = ask(script, says, tools=tools, tool_choice=choice, stream=stream)
    finish = "tool_calls" if choice == "required" else "stop"
    assert found(reply, stream) == ("patch", TEXT, "", finish)
    schema = json.dumps(script.seen[-1].sampling_params.structured_outputs.json)
    assert '"^(?:[a-c]{2,4})$"' in schema


@each_way
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_input_with_a_grammar_is_the_whole_answer(script, stream, choice):
    says = '<think>hm</think>1+2\n{"input": "x"}'
    reply = ask(script, says, tools=[custom(SUM)], tool_choice=choice, stream=stream)
    finish = "tool_calls" if choice == "required" else "stop"
    assert found(reply, stream) == ("patch", '1+2\n{"input": "x"}', "", finish)
    form = script.seen[-1].sampling_params.structured_outputs
    assert (form.grammar, form.starts_after) == (SUM["definition"], ["</think>"])


@each_way
@pytest.mark.parametrize("grammar", [None, WORD, SUM], ids=["text", "regex", "lark"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_the_embedded_model_writes_the_input(server, stream, choice, grammar):
    options = {"tool_choice": choice, "max_tokens": 80, "seed": 2, "stream": stream}
    options["parallel_tool_calls"] = False
    with server.openai() as client:
        reply = client.chat.completions.create(
            model="", messages=ASK, tools=[custom(grammar)], **options
        )
        name, written, content, _ = found(reply, stream)
    assert (name, content) == ("patch", "")
    if grammar is WORD:
        assert re.fullmatch(WORD["definition"], written)
    elif grammar is SUM:
        assert re.fullmatch(r"\d{1,2}(\+\d{1,2})+\+?", written)


@each_way
def test_responses_have_items_of_their_own(script, stream):
    script.says = f"I look.\n{called(TEXT)}</tool_call>"
    options = {"model": "scripted", "input": "Patch it.", "tools": [flat(custom(SUM))]}
    reply = script.openai.responses.create(**options, stream=stream)
    if stream:
        events = list(reply)
        reply = events[-1].response
        deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(event.delta for event in deltas) == TEXT
        [done] = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert (done.input, done.item_id) == (TEXT, deltas[0].item_id)
        assert [event.sequence_number for event in events] == list(range(len(events)))
    message, call = reply.output
    assert message.content[0].text == "I look.\n"
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", TEXT)
    # What it says goes back as items, and as the response before.
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    asked = [{"role": "user", "content": "Patch it."}, call.model_dump(exclude_none=True), result]
    script.says = "Good."
    again = {**options, "input": asked}
    assert script.openai.responses.create(**again).output_text == "Good."
    prompt = script.prompt()
    assert json.dumps(TEXT, ensure_ascii=False) in prompt
    assert "<tool_response>\nDone.\n</tool_response>" in prompt
    more = {**options, "input": [result], "previous_response_id": reply.id}
    assert script.openai.responses.create(**more).output_text == "Good."
    written = json.dumps({"name": "patch", "arguments": {"input": TEXT}}, ensure_ascii=False)
    assert f"I look.\n<tool_call>\n{written}\n</tool_call><user><tool_response>" in script.prompt()


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
def test_forced_responses_with_the_embedded_model(server, choice):
    with server.openai() as client:
        reply = client.responses.create(
            model="", input="Patch it.", tools=[flat(custom(SUM))], tool_choice=choice,
            max_output_tokens=80,
        )  # fmt: skip
    [call] = reply.output
    assert re.fullmatch(r"\d{1,2}(\+\d{1,2})+\+?", call.input)


def test_calls_and_results_of_chat_go_back(script):
    call = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": TEXT}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Done."},
    ]
    ask(script, "Good.", tools=[custom()], messages=messages)
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in script.prompt()


@pytest.mark.parametrize(
    ("tools", "choice", "complaint"),
    [
        ([{"type": "custom"}], "auto", r"tools\[0\].custom"),
        ([{"type": "custom", "custom": {}}], "auto", r"tools\[0\].custom.name"),
        ([custom({"syntax": "ebnf", "definition": "x"})], "auto", "lark or regex"),
        ([custom({"syntax": "lark"})], "auto", "a definition"),
        ([{"type": "custom", "custom": {"name": "f", "format": {"type": "x"}}}], "auto",
         "text or grammar"),
        ([custom(), custom()], "auto", "a name of its own"),
        ([custom()], {"type": "custom", "custom": {"name": "f"}}, "the tools are patch"),
        ([custom(SUM), {"type": "function", "function": {"name": "now"}}], "required",
         "Choose patch by its name"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(script, tools, choice, complaint):
    with pytest.raises(openai.BadRequestError, match=complaint):
        ask(script, "x", tools=tools, tool_choice=choice)
