"""The script that renders the templates of a public package: what it says of templates of ours. Its
run over theirs needs the network and is not a part of this suite.
"""

import pytest

from tests.compat import chat_templates
from tests.compat.chat_templates import CONVERSATIONS, NOT_READ, REASONS, examine

PARTS = "parts are text where a template takes text"
DEVELOPER = "a developer's message is the system's where a template knows no developers"
CALLS = "null, an empty text and no parts are the same where calls follow"
WRITTEN = (
    "{% for call in m.tool_calls %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n"
    "</tool_call>{% endfor %}"
)
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    f"{WRITTEN}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_each_difference_has_the_fewest_reasons():
    found = examine(HERMES)
    assert found.unexplained == [] and found.refused == 0
    assert found.same == len(CONVERSATIONS) - sum(found.by_reason.values())
    assert found.by_reason == {PARTS: 4, DEVELOPER: 1}
    assert found.formats == "tool parser: hermes, reasoning parser: none"
    assert found.calls == ""


@pytest.mark.parametrize("reason", [PARTS, DEVELOPER])
def test_a_difference_without_a_reason_is_told(monkeypatch, reason):
    monkeypatch.delitem(REASONS, reason)
    found = examine(HERMES)
    expected = {"developer"} if reason == DEVELOPER else {
        name for name in CONVERSATIONS if "parts" in name and "call" not in name
    }  # fmt: skip
    assert set(found.unexplained) == expected


def test_what_the_contents_before_calls_become_is_seen():
    found = examine(HERMES.replace("m.content or ''", "m.content"))
    assert found.by_reason[CALLS] == 5 and not found.unexplained


def test_calls_that_do_not_come_back_are_told(monkeypatch):
    found = examine(HERMES.replace("'name': call.function.name", "'nom': call.function.name"))
    assert found.calls.startswith(NOT_READ)
    without = examine(HERMES.replace(WRITTEN, "{{ '<tool_call>' if 0 }}"))
    assert without.calls == "the template writes no calls"
    refuses = "{% if m.tool_calls %}{{ raise_exception('<tool_call>') }}{% endif %}"
    assert examine(HERMES.replace(WRITTEN, refuses)).calls == "the template refuses calls"


def test_a_prompt_that_opens_what_the_turn_closes_is_cut_before_the_tag():
    opened = "<|im_start|>assistant\n<think>{% endif %}"
    source = HERMES.replace("<|im_start|>assistant\n{% endif %}", opened).replace(
        "{{ m.content or '' }}", "{{ '</think>' if m.role == 'assistant' }}{{ m.content or '' }}"
    )
    template = chat_templates.Template(source)
    prompt, turn = chat_templates.written_turn(template, [chat_templates.WEATHER], False)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert turn.startswith("</think>I look.")
    assert examine(source).calls == ""
