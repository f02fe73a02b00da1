"""The forms in which templates take contents and calls, and the prompts that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.text.chat import render_chat
from quire.text.chat_template import ChatTemplate
from quire.text.templates.template_forms import CallForms, ContentFormats
from quire.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import write_folder

PARTS = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"


def by_role(**bodies: str) -> str:
    """A template that writes each role in a way of its own."""
    cases = "".join(
        f"{{% if m.role == '{role}' %}}[{role}]{body}{{% endif %}}" for role, body in bodies.items()
    )
    return "{% for m in messages %}" + cases + "{% endfor %}"


ONE_FOR_EACH = by_role(
    system="{{ m.content | trim }}", user=EITHER, assistant=PARTS, tool="{{ m.content }}"
)


def prompt(folder: Path, template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = Tokenizer.from_folder(write_folder(folder, config={"chat_template": template}))
    return render_chat(tokenizer, chat, add_generation_prompt=False, **options)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_each_role_has_the_form_that_the_template_writes() -> None:
    formats = ChatTemplate(ONE_FOR_EACH).content_formats
    assert dict(formats.by_role) == {
        "system": "string",
        "user": "either",
        "assistant": "openai",
        "tool": "string",
    }
    assert formats.default == "string"
    assert ChatTemplate("{{ messages[0].content }}").content_formats == ContentFormats("string")


def test_a_plain_string_stays_one_unless_the_template_takes_parts_alone(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]
    assert prompt(tmp_path, ONE_FOR_EACH, chat) == "[system]Be brief.[user]Hi[assistant]<Ho>"
    as_parts = [{**message, "content": [text("a"), text("b")]} for message in chat]
    expected = "[system]a\nb[user]<a><b>[assistant]<a><b>"
    assert prompt(tmp_path, ONE_FOR_EACH, as_parts) == expected


def test_parts_written_as_data_are_not_taken_for_text(tmp_path: Path) -> None:
    template = by_role(system="{{ m.content | tojson }}", user=PARTS)
    chat = [
        {"role": "system", "content": [text("a"), text("b")]},
        {"role": "user", "content": "Hi"},
    ]
    assert prompt(tmp_path, template, chat) == '[system]"a\\nb"[user]<Hi>'


def test_a_role_that_the_template_refuses_gets_text() -> None:
    template = by_role(user=PARTS) + "{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}"
    assert ChatTemplate(template).content_formats.by_role["system"] == "string"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "ß"}'}}
CALLS = "{% for c in m.tool_calls %}[{{ c.function.name }} {} ]{% endfor %}"
AS_JSON = CALLS.replace("{}", "{{ c.function.arguments | tojson }}")
AS_TEXT = CALLS.replace("{}", "{{ '' + c.function.arguments }}")
AS_ITEMS = CALLS.replace(
    "{}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
ONLY_NULL = "{% if m.content is none %}" + AS_JSON + "{% else %}({{ m.content }}){% endif %}"
WRITES_NULL = "({{ m.content }})" + AS_JSON


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
@pytest.mark.parametrize(
    ("body", "written"),
    [
        (WRITES_NULL, '()[f {"a": "ß"} ]'),
        (ONLY_NULL, '[f {"a": "ß"} ]'),
        (PARTS + AS_JSON, '[f {"a": "ß"} ]'),
        (AS_TEXT, '[f {"a": "ß"} ]'),
        (AS_ITEMS, "[f a=ß ]"),
    ],
)
def test_null_and_nothing_mean_the_same_where_calls_follow(
    tmp_path: Path, body: str, written: str, content: Any
) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
    ]
    template = "{{ tools }}" + by_role(assistant=body)
    assert prompt(tmp_path, template, chat) == f"None[assistant]{written}"


def test_a_content_that_is_null_without_calls_is_empty(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": None}]
    assert prompt(tmp_path, "<{{ messages[0].content }}>", chat) == "<>"


@pytest.mark.parametrize(
    ("body", "forms"),
    [
        (WRITES_NULL, CallForms(takes_text=True)),
        (ONLY_NULL, CallForms(no_content=None, takes_text=True)),
        (AS_TEXT, CallForms(as_text=True, takes_text=True)),
        (AS_ITEMS, CallForms()),
        ("nothing", CallForms()),
    ],
)
def test_the_forms_of_calls_are_found(body: str, forms: CallForms) -> None:
    assert ChatTemplate(by_role(assistant=body)).call_forms == forms


@pytest.mark.parametrize("needs", ["{% for t in tools %}{% endfor %}", "{{ '' + bos_token }}"])
def test_what_else_a_template_needs_does_not_hide_its_forms(needs: str) -> None:
    forms = ChatTemplate(needs + by_role(assistant=ONLY_NULL)).call_forms
    assert forms.no_content is None


@pytest.mark.parametrize(
    ("arguments", "in_text", "in_items"),
    [
        ('{"a": ', '{"a": ', 'arguments={"a": '),
        ("[1]", "[1]", "arguments=[1]"),
        ([1], "[1]", "arguments=[1]"),
        ("Bonn", "Bonn", "arguments=Bonn"),
        (5, "5", "arguments=5"),
        ('"{\\"a\\": 1}"', '{"a": 1}', "a=1"),
        ("", "{}", ""),
        (None, "{}", ""),
    ],
)
def test_arguments_that_are_not_an_object_stay_visible(
    tmp_path: Path, arguments: Any, in_text: str, in_items: str
) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    for body, written in ((AS_TEXT, in_text), (AS_ITEMS, in_items)):
        template = "{{ tools }}" + by_role(assistant=body)
        assert prompt(tmp_path, template, chat) == f"None[assistant][f {written} ]"


@pytest.mark.parametrize("template", [ONE_FOR_EACH, by_role(user=EITHER, assistant=EITHER)])
def test_the_prompt_is_that_of_transformers_for_contents_in_these_forms(
    tmp_path: Path, template: str
) -> None:
    user = {"role": "user", "content": " a <b> "}
    answer = {"role": "assistant", "content": [text("c"), text("d")]}
    for chat in ([user, answer, user], [user, user], [{**user, "content": [text("x")]}]):
        [expected], _ = render_jinja_template([chat], chat_template=template)
        assert prompt(tmp_path, template, chat) == expected
