"""Tools as text: what a template that knows no tools is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import embedded
from quire.errors import RequestError
from quire.text.chat import render_chat
from quire.text.chat_tools import describe_tools, with_calls_as_text
from quire.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import write_folder

ASK = {"role": "user", "content": "How is it in Bönn?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": None}}


def call(name: str, arguments: str, id: str = "1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, id: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


AFTER_CALLS = [
    ASK,
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [call("weather", '{"city": "Bönn"}'), call("now", "{}", "2")],
    },
    result("Rain."),
    result([{"type": "text", "text": "12:"}, {"type": "text", "text": "00"}], "2"),
    {"role": "user", "content": "And?"},
]
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bönn"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
RESULTS = (
    "<tool_response>\nRain.\n</tool_response>\n<tool_response>\n12:\n00\n</tool_response>\nAnd?"
)
SHOW = "{% for m in messages %}[{{ m.role }}|{{ m.content | trim }}]{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}|{{ m.content }}]"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}|{% for p in m.content %}{{ p.text }}{% endfor %}]"
    "{% endfor %}"
)


def tokenizer(folder: Path, template: str) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(folder, config={"chat_template": template}))


def test_the_description_has_names_descriptions_and_schemas() -> None:
    text = describe_tools([WEATHER, NOW])
    assert (
        '{"name": "weather", "description": "Tells the weather.", "parameters": {"type": "object",'
        ' "properties": {"city": {"type": "string"}}}}\n{"name": "now"}\n'
    ) in text
    assert "<tool_call>\n{" in text


@pytest.mark.parametrize("template", [SHOW, PARTS], ids=["string", "parts"])
def test_the_system_message_describes_the_tools(tmp_path: Path, template: str) -> None:
    source, description = tokenizer(tmp_path, template), describe_tools([WEATHER])
    assert render_chat(source, [ASK], tools=[WEATHER]) == (
        f"[system|{description}][user|{ASK['content']}]"
    )
    system = {"role": "system", "content": "Be short."}
    assert render_chat(source, [system, ASK], tools=[WEATHER]) == (
        f"[system|Be short.\n\n{description}][user|{ASK['content']}]"
    )
    assert render_chat(source, [ASK], tools=[]) == f"[user|{ASK['content']}]"


@pytest.mark.parametrize("template", [ALTERNATING, NO_SYSTEM], ids=["refused", "left out"])
def test_without_a_system_role_the_user_s_message_describes_them(
    tmp_path: Path, template: str
) -> None:
    source, description = tokenizer(tmp_path, template), describe_tools([WEATHER])
    shown = f"[user|{description}\n\n{ASK['content']}]"
    assert render_chat(source, [ASK], tools=[WEATHER]) == shown
    chat = [*AFTER_CALLS, {"role": "assistant", "content": "Wet."}]
    assert render_chat(source, chat, tools=[WEATHER]) == (
        f"{shown}[assistant|{CALLS}][user|{RESULTS}][assistant|Wet.]"
    )


@pytest.mark.parametrize("template", [SHOW, PARTS], ids=["string", "parts"])
def test_calls_and_results_are_text_with_and_without_tools(tmp_path: Path, template: str) -> None:
    source = tokenizer(tmp_path, template)
    shown = f"[user|{ASK['content']}][assistant|{CALLS}][user|{RESULTS}]"
    assert render_chat(source, AFTER_CALLS) == shown
    assert render_chat(source, AFTER_CALLS, tools=[NOW]).endswith(shown)


def test_other_messages_stay_as_they_are() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert with_calls_as_text(chat) == chat
    silent = {"role": "assistant", "content": "", "tool_calls": [call("now", "{}")]}
    silent["reasoning"] = "hm"
    [made] = with_calls_as_text([silent])
    assert made["content"].startswith("<tool_call>") and made["reasoning"] == "hm"
    assert "tool_calls" not in made


def test_a_template_that_knows_tools_gets_them_unless_asked_otherwise(tmp_path: Path) -> None:
    source = tokenizer(tmp_path, SHOW + "{{ tools | length if tools else 'none' }}")
    assert render_chat(source, [ASK], tools=[NOW]) == f"[user|{ASK['content']}]1"
    assert "[tool|Rain.]" in render_chat(source, AFTER_CALLS, tools=[NOW])
    as_text = render_chat(source, AFTER_CALLS, tools=[NOW], tools_as_text=True)
    assert as_text.startswith("[system|") and as_text.endswith(f"[user|{RESULTS}]none")
    plain = tokenizer(tmp_path, SHOW)
    assert "[tool|Rain.]" in render_chat(plain, AFTER_CALLS, tools=[NOW], tools_as_text=False)


def test_the_embedded_model_s_template_takes_them() -> None:
    source = Tokenizer.from_folder(embedded.path())
    text = render_chat(source, AFTER_CALLS, tools=[WEATHER, NOW])
    assert text.startswith(f"<|begin|><|system|>{describe_tools([WEATHER, NOW])}<|user|>How")
    assert text.endswith(f"<|assistant|>{CALLS}<|end|><|user|>{RESULTS}<|assistant|>")
    with pytest.raises(RequestError, match="knows the roles"):
        render_chat(source, [{"role": "judge", "content": "a"}], tools=[NOW])
