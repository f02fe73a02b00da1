"""Chat normalisation: the rules of the API reference, one by one, and format detection."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jinja2
import pytest

from quire.errors import InvalidParameter, InvalidType, RequestError
from quire.text.chat import MEDIA_PARTS, normalize_messages, render_chat
from quire.text.chat_template import ChatTemplate
from quire.text.templates.content_format import detect_content_format
from quire.text.templates.template_forms import ContentFormat, ContentFormats
from quire.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import write_folder


def normal(message: dict[str, Any], content_format: ContentFormat = "string") -> dict[str, Any]:
    before = copy.deepcopy(message)
    (result,) = normalize_messages([message], ContentFormats(content_format), "")
    assert message == before, "the caller's message was changed"
    return result


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


CONTENTS = {
    "text": ("a", "a", [text("a")]),
    "empty": ("", "", [text("")]),
    "null": (None, "", []),
    "no parts": ([], "", []),
    "bare strings": (["a", "b"], "a\nb", [text("a"), text("b")]),
    "all kinds": (
        [
            text("a"),
            {"type": "input_text", "text": "b"},
            {"type": "output_text", "text": "c"},
            {"type": "refusal", "refusal": "d"},
            {"type": "thinking", "thinking": "e"},
        ],
        "a\nb\nc\nd\ne",
        [text(letter) for letter in "abcde"],
    ),
    "null texts": ([{"type": "text", "text": None}, {"type": "refusal", "refusal": None}], "", []),
    "extra keys": (
        [text("a", cache_control={"type": "x"})],
        "a",
        [text("a", cache_control={"type": "x"})],
    ),
    "guessed refusal": ([{"refusal": "no"}], "no", [text("no")]),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_in_both_formats(case: str) -> None:
    content, as_string, as_parts = CONTENTS[case]
    message = {"role": "user", "content": content}
    assert normal(message) == {"role": "user", "content": as_string}
    assert normal(message, "openai") == {"role": "user", "content": as_parts}


def test_tool_references_are_parts_only() -> None:
    part = {"type": "tool_reference", "name": "weather"}
    message = {"role": "tool", "content": [text("a"), part]}
    assert normal(message, "openai")["content"] == [text("a"), part]
    with pytest.raises(RequestError, match="tool_reference part"):
        normal(message)


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_a_tools_text_is_a_string_in_both_formats(content_format: ContentFormat) -> None:
    message = {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "x"}
    expected = {"role": "tool", "content": "a\nb", "tool_call_id": "x"}
    assert normal(message, content_format) == expected


@pytest.mark.parametrize("kind", MEDIA_PARTS)
def test_media_are_refused_by_name(kind: str) -> None:
    for part in ({"type": kind, kind: {}}, {kind: "x"}):
        with pytest.raises(InvalidParameter, match=f"content\\[1\\].type='{kind}'"):
            normal({"role": "user", "content": [text("a"), part]})


WRONG = {
    "unknown type": ({"role": "user", "content": [{"type": "smell"}]}, "smell.*'input_text'"),
    "no type": ({"role": "user", "content": [{"text": "a"}]}, "type=None"),
    "text a number": ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"text=5"),
    "content a number": ({"role": "user", "content": 5}, r"messages\[0\].content=5"),
    "part a number": ({"role": "user", "content": [5]}, r"content\[0\]=5"),
    "no role": ({"content": "a"}, r"messages\[0\].role=None"),
    "tool call type": (
        {"role": "assistant", "tool_calls": [{"type": "code", "function": {}}]},
        "only 'function' exists",
    ),
    "tool call no object": ({"role": "assistant", "tool_calls": ["x"]}, r"tool_calls\[0\]='x'"),
    "tool calls no list": ({"role": "assistant", "tool_calls": "x"}, "tool_calls='x'"),
    "custom call without input": (
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]},
        r"tool_calls\[0\].custom=",
    ),
    "no function": (
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        "function=None",
    ),
    "no object": ("hello", r"messages\[0\]='hello'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_served_is_named(case: str) -> None:
    message, says = WRONG[case]
    with pytest.raises(InvalidParameter, match=says):
        normalize_messages([message], ContentFormats("string"), "")


@pytest.mark.parametrize("messages", [[], "text", {"role": "user", "content": "a"}, None])
def test_messages_must_be_a_list(messages: Any) -> None:
    with pytest.raises(RequestError, match="list with at least one message"):
        normalize_messages(messages, ContentFormats("string"), "")


def test_which_keys_are_copied() -> None:
    everything = {
        "content": "a",
        "name": "n",
        "task": "t",
        "tool_call_id": "i",
        "reasoning": "r",
        "tools": [{"a": 1}],
        "tool_calls": [],
        "other": 1,
    }
    base = {"content": "a", "name": "n", "task": "t"}
    expected = {
        "user": {},
        "system": {},
        "assistant": {"reasoning": "r", "reasoning_content": "r"},
        "tool": {"tool_call_id": "i"},
        "developer": {"tools": [{"a": 1}]},
    }
    for role, extra in expected.items():
        message = {"role": role, **everything}
        (got,) = normalize_messages([message], ContentFormats("string"), "'developer'")
        assert got == {"role": role, **base, **extra}
    assert "name" not in normal({"role": "user", "content": "a", "name": 5})
    old_name = normal({"role": "assistant", "content": "a", "reasoning_content": "r"})
    assert (old_name["reasoning"], old_name["reasoning_content"]) == ("r", "r")


DEEP = "[" * 10**5 + "]" * 10**5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(DEEP, DEEP, id="deep"),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ("{", "{"),
        ("[1]", "[1]"),
        ([1], [1]),
        (0, 0),
        ('"a"', "a"),
    ],
)
def test_arguments_of_tool_calls_become_objects_where_they_are_some(
    arguments: Any, expected: Any
) -> None:
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = normal({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["content"] == ""
    [made] = message["tool_calls"]
    is_same = made["function"].pop("arguments") == expected  # pytest would compare long texts
    assert is_same
    assert made == {"id": "i", "type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_the_developer_role(content_format: ContentFormat) -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "developer", "content": [text("d1"), text("d2")], "name": "n"},
        {"role": "system", "content": "s"},
    ]
    kept = normalize_messages(
        messages, ContentFormats(content_format), "{% if role == 'developer' %}"
    )
    assert [message["role"] for message in kept] == ["user", "developer", "system"]
    merged = normalize_messages(
        messages, ContentFormats(content_format), "a developer without quotes"
    )
    assert merged[0] == {"role": "system", "content": "d1\nd2\n\ns"}
    assert [message["role"] for message in merged] == ["system", "user"]
    without = normalize_messages([messages[0], messages[2]], ContentFormats(content_format), "")
    assert [message["role"] for message in without] == ["user", "system"]


LOOP = "{% for part in X %}{{ part }}{% endfor %}"
OPENAI = {
    "attribute": "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "item": "{% for m in messages %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
    "filter": "{% for m in messages %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
    "slice": "{% for m in messages[1:] %}{% for p in m.content[:2] %}{% endfor %}{% endfor %}",
    "selected": "{% for m in messages | selectattr('role') %}{% for p in m.content %}{% endfor %}"
    "{% endfor %}",
    "copied content": "{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}"
    "{% endfor %}",
    "copied messages": "{% set ms = messages[1:] %}{% set other = ms %}{% for m in other %}"
    "{% for p in m.content %}{% endfor %}{% endfor %}",
    "macro of content": "{% macro r(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(m.content) }}{% endfor %}",
    "macro by keyword": "{% macro r(a, c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(1, c=m['content']) }}{% endfor %}",
    "macro of message": "{% macro r(x) %}{% for p in x.content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(m) }}{% endfor %}",
    "macro in macro": "{% macro b(y) %}{% for p in y %}{% endfor %}{% endmacro %}"
    "{% macro a(x) %}{{ b(x.content) }}{% endmacro %}{% for m in messages %}{{ a(m) }}{% endfor %}",
    "a variable called content": "{% for p in content %}{% endfor %}",
    "called content, filtered": "{% for p in content | list %}{% endfor %}",
}
STRING = {
    "no loop": "{{ messages[0].content }}",
    "written out": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "another key": "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    "content of another": "{% for t in tools %}{% for p in t.content %}{% endfor %}{% endfor %}",
    "macro never called": "{% macro r(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "macro called with a role": "{% macro r(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(m.role) }}{% endfor %}",
    "no text": "",
}


@pytest.mark.parametrize("case", [*OPENAI, *STRING])
def test_the_format_is_read_from_the_template(case: str) -> None:
    expected = "openai" if case in OPENAI else "string"
    source = OPENAI.get(case, STRING.get(case, ""))
    assert detect_content_format(jinja2.Environment().parse(source)) == expected
    assert ChatTemplate(source).content_format == expected


SHOW = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}T{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}G{% endif %}{{ extra }}{{ continue_final_message }}"
)


def tokenizer(folder: Path, template: Any = SHOW) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(folder, config={"chat_template": template}))


def test_rendering_a_chat(tmp_path: Path) -> None:
    source = tokenizer(tmp_path)
    chat = [{"role": "user", "content": [text("a"), "b"]}]
    assert render_chat(source, chat) == "<s>user:a\nb</s>G"
    assert render_chat(source, chat, add_generation_prompt=False) == "<s>user:a\nb</s>"
    assert render_chat(source, chat, tools=[{}, {}]) == "<s>user:a\nb</s>T2G"
    assert render_chat(source, chat, chat_template="own {{ messages | length }}") == "own 1"
    openai = render_chat(source, chat, content_format="openai", add_generation_prompt=False)
    assert openai == "<s>user:[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]</s>"
    with pytest.raises(InvalidParameter, match="chat_template_content_format='json'"):
        render_chat(source, chat, content_format="json")
    open_chat = [{"role": "assistant", "content": "so "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat(source, open_chat, **options) == "<s>assistant:so "
    with pytest.raises(InvalidParameter, match="add_generation_prompt"):
        render_chat(source, open_chat, continue_final_message=True)


def test_template_variables(tmp_path: Path) -> None:
    source = tokenizer(tmp_path)
    chat = [{"role": "user", "content": "a"}]

    def rendered(**variables: Any) -> str:
        return render_chat(source, chat, chat_template_kwargs=variables)

    assert rendered(extra=5) == "<s>user:a</s>G5"
    assert rendered(bos_token="B") == "Buser:a</s>G"
    overridden = {"add_generation_prompt": False, "tools": [1], "continue_final_message": True}
    assert rendered(**overridden, messages=[]) == "<s>user:a</s>G"
    assert rendered(not_read=object(), padding=True) == "<s>user:a</s>G"
    for name in ("tokenize", "chat_template"):
        with pytest.raises(InvalidParameter, match=name):
            rendered(**{name: True})
    with pytest.raises(RequestError, match="holds a object"):
        rendered(extra=object())


def test_an_explicit_format_against_the_template_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tokenizer(tmp_path)
    render_chat(source, [{"role": "user", "content": "a"}], content_format="string")
    assert not caplog.text
    render_chat(source, [{"role": "user", "content": "a"}], content_format="openai")
    assert "chat_template_content_format='openai'" in caplog.text


def test_tools_choose_the_tool_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    source = tokenizer(tmp_path, named)
    chat = [{"role": "user", "content": "a"}]
    assert render_chat(source, chat) == "D"
    assert render_chat(source, chat, tools=[{}]) == "T"
    assert render_chat(source, chat, tools=[{}], chat_template="default") == "D"


def test_a_part_loop_gets_parts(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": ["b", "c"]}]
    assert render_chat(tokenizer(tmp_path, template), chat) == "<a><b><c>"


def test_an_enum_or_subclass_is_plain_to_the_template(tmp_path: Path) -> None:
    class Role(str):
        def secret(self) -> str:
            return "leak"

    source = tokenizer(tmp_path, "{{ messages[0].role }}{{ messages[0].role.secret is defined }}")
    assert render_chat(source, [{"role": Role("user"), "content": ""}]) == "userFalse"


def test_invalid_type_is_a_type_error_too() -> None:
    with pytest.raises(TypeError):
        normalize_messages([{"role": "user", "content": 5}], ContentFormats("string"), "")
    assert issubclass(InvalidType, ValueError)
