"""The deltas of a stream add up to the whole message, whatever a model writes."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from quire.server.openai.parsed_answer import ParsedAnswer
from quire.server.output_parsing import decide_tool_use, plan_parsers
from tests.server.output_parsing.golden_transcripts import TOOLS

PATCH = {"type": "custom", "custom": {"name": "patch"}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
WORD = {"type": "custom", "custom": {"name": "word", "format": LARK}}
CHOICES = [
    "auto",
    "required",
    {"type": "function", "function": {"name": "weather"}},
    {"type": "custom", "custom": {"name": "patch"}},
    {"type": "custom", "custom": {"name": "word"}},
]
PAIRS = [("generic", None), ("generic", "qwen3"), ("hermes", "qwen3"), ("qwen3_coder", None)]
PLANS = [plan_parsers(*pair) for pair in PAIRS]
SCRAPS = [
    *('"', "{", "}", "[", "]", ",", ":", "\\", "\n", " ", "```", "```json\n", "é😀", "</think>"),
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", ">", "</parameter>", "<think>"),
    *('{"name": "weather", "arguments": {"city": "', '{"name": "patch", "arguments": {"input": "'),
    *('{"name": "now", "parameters": {}}', '{"input": "', "patch", "\\ud83d", "\\ude00", "word"),
]


def make_answer(plan, choice, *, is_legacy):
    custom = [PATCH, WORD] if isinstance(choice, dict) else [PATCH]
    tools = TOOLS if is_legacy else [*TOOLS, *custom]
    use = decide_tool_use(tools, choice, plan, max_calls=1 if is_legacy else None)
    parser = plan.open(
        tools=use.tools, forced=use.forced, writes_input=use.writes_input,
        max_calls=use.max_calls, call_id=lambda name, index: f"id-{index}",
    )  # fmt: skip
    return ParsedAnswer("assistant", parser, use, shows_reasoning=True, is_legacy=is_legacy)


def added_up(deltas):
    """The message that deltas make, by the rules of the API's clients."""
    made = {"content": "", "reasoning": "", "calls": [], "function_call": None}
    for delta in map(to_builtins, deltas):
        made["content"] += delta.get("content") or ""
        made["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(made["calls"]):
                made["calls"].append({"id": call["id"], "type": call["type"]})
            whole = made["calls"][call["index"]]
            _add(whole.setdefault(whole["type"], {}), call.get(whole["type"], {}))
        if "function_call" in delta:
            made["function_call"] = _add(made["function_call"] or {}, delta["function_call"])
    return made


def _add(whole, piece):
    for key, text in piece.items():
        whole[key] = whole.get(key, "") + text
    return whole


@settings(max_examples=300)
@given(
    plan=st.sampled_from(PLANS),
    choice=st.sampled_from(CHOICES),
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=16),
    is_legacy=st.booleans(),
    data=st.data(),
)
def test_deltas_add_up_to_the_message(plan, choice, scraps, is_legacy, data):
    is_legacy = is_legacy and choice not in CHOICES[3:]  # functions are not custom tools
    text = "".join(scraps)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    streamed = make_answer(plan, choice, is_legacy=is_legacy)
    last = len(pieces) - 1
    deltas = [streamed.delta(p, is_last=i == last) for i, p in enumerate(pieces)]
    answer = make_answer(plan, choice, is_legacy=is_legacy)
    message = to_builtins(answer.message(text))
    assert added_up(deltas) == {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": message.get("tool_calls", []),
        "function_call": message["function_call"],
    }
    assert streamed.finish_reason("stop") == answer.finish_reason("stop")
    assert json.dumps(message, ensure_ascii=False).encode()  # no half characters
