"""Chat templates: the prompts that transformers renders, and nothing that a template may not do."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest

from quire.errors import InvalidParameter, InvalidType, LoadError, RequestError, UnknownParameter
from quire.text.chat import normalize_messages
from quire.text.chat_template import MAX_CHARACTERS, ChatTemplate
from quire.text.templates.template_builtins import to_json
from quire.text.templates.template_forms import ContentFormats
from quire.text.tokenizer import Tokenizer
from tests.text.tokenizer_folders import load_both, write_folder, write_json

CHATML = """\
{%- if tools %}
<|im_start|>system
You may call these:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls %}
<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</call>
        {%- endfor %}
{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
<|im_start|>user
<response>{{ message.content }}</response><|im_end|>
    {% else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0, last=-1) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
    {%- if message["role"] not in ["user", "assistant", "tool"] %}
        {{- raise_exception("Only user, assistant and tool roles!") }}
    {%- endif %}
    {%- if message.role in ("user", "assistant") and not message.tool_calls %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.index0 == ns.last %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set fn = call.function %}
            {{- {"name": fn.name, "arguments": fn.arguments, "id": call.id} | tojson }}
            {{- "]" + eos_token if loop.last else ", " }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

PARTS = """\
{%- macro render(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content %}{% if part.type == 'text' %}[{{ part['text'] }}]
    {%- endif %}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- for m in messages %}{% generation %}{{ m.role }}: {{ render(m.content) }}{% endgeneration %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.thinking %}<t>{{ m.thinking }}</t>{% endif %}
{%- if not loop.last %}{{ '\\n' }}{% else %}{% continue %}{% endif %}
{%- endfor %}
{{- dict(a=1, b=[1.5, true, none, 'é<>&']) | tojson }}{{ '<>&"' }}
{{- documents | length if documents else 'none' }}
{{- undefined_name }}{{ bos_token }}{{ unk_token }}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "parts": PARTS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Größe & <more>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln"}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <there> & 'you'"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": " x "}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b ", "reasoning": "because"},
        {"role": "user", "content": "c 😀"},
    ],
    "tool call": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "12", "tool_call_id": "abc123def"},
        {"role": "assistant", "content": "12 degrees"},
        {"role": "user", "content": "thanks"},
    ],
    "wrong order": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
    "wrong role": [{"role": "wizard", "content": "a"}],
    "two calls": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
}


@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["no tools", "empty tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(
    tmp_path: Path, name: str, tools: list[dict[str, Any]] | None
) -> None:
    """Where transformers raises, so do we, with the template's own words in the message."""
    ours, oracle = load_both(write_folder(tmp_path, config={"chat_template": TEMPLATES[name]}))
    num_rendered = 0
    for chat in CHATS.values():
        for options in ({}, {"add_generation_prompt": True}, {"enable_thinking": False}):
            try:
                expected = oracle.apply_chat_template(chat, tools=tools, tokenize=False, **options)
            except Exception as error:
                with pytest.raises(RequestError, match=re.escape(str(error))):
                    ours.apply_chat_template(chat, tools=tools, tokenize=False, **options)
                continue
            num_rendered += 1
            assert (
                ours.apply_chat_template(chat, tools=tools, tokenize=False, **options) == expected
            )
            ids = ours.apply_chat_template(chat, tools=tools, **options)
            expected_ids = oracle.apply_chat_template(chat, tools=tools, **options)["input_ids"]
            assert ids == expected_ids
    assert num_rendered >= 9


@pytest.mark.parametrize("name", ["chatml", "llama3", "parts"])
@pytest.mark.parametrize(
    "final", ["go on", " blanks around \n", "", [{"type": "text", "text": "p"}]]
)
def test_the_last_message_can_be_left_open(tmp_path: Path, name: str, final: Any) -> None:
    ours, oracle = load_both(write_folder(tmp_path, config={"chat_template": TEMPLATES[name]}))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": final}]
    options: dict[str, Any] = {"continue_final_message": True, "tokenize": False}
    try:
        expected = oracle.apply_chat_template(chat, **options)
    except Exception:
        with pytest.raises(RequestError):
            ours.apply_chat_template(chat, **options)
        return
    assert ours.apply_chat_template(chat, **options) == expected
    assert chat[1]["content"] == final


def test_what_cannot_be_left_open_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(RequestError, match="leaves its text out"):
        template.render_open([{"role": "user", "content": "a"}], {})
    with pytest.raises(RequestError, match="with text to continue"):
        template.render_open([{"role": "user", "content": None}], {})
    with pytest.raises(InvalidParameter, match="add_generation_prompt"):
        template.render_open([{"role": "user", "content": "a"}], {"add_generation_prompt": True})


def test_templates_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    ours, oracle = load_both(write_folder(tmp_path, config={"chat_template": named}))
    chat = [{"role": "user", "content": "a"}]
    for options in ({}, {"tools": TOOLS}, {"chat_template": "tool_use"}, {"chat_template": "own"}):
        expected = oracle.apply_chat_template(chat, tokenize=False, **options)
        assert ours.apply_chat_template(chat, tokenize=False, **options) == expected
    ours.chat_template = {"other": "O"}
    with pytest.raises(RequestError, match=r"name one of \['other'\]"):
        ours.apply_chat_template(chat)
    ours.chat_template = None
    with pytest.raises(RequestError, match="has no chat template"):
        ours.apply_chat_template(chat)


FILES = {
    "jinja over config": ({"chat_template.jinja": "J"}, "C", "J"),
    "additional": (
        {"chat_template.jinja": "J", "additional_chat_templates/rag.jinja": "R"},
        "C",
        {"default": "J", "rag": "R"},
    ),
    "config": ({}, "C", "C"),
    "processor's json": ({"chat_template.json": '{"chat_template": "P"}'}, None, "P"),
    "json last": ({"chat_template.json": '{"chat_template": "P"}'}, "C", "C"),
    "none": ({}, None, None),
    "of texts and pictures": (
        {"config.json": '{"model_type": "siglip"}'},
        None,
        "{% for message in messages %}{{ message.content }}{% endfor %}",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_where_templates_come_from(tmp_path: Path, case: str) -> None:
    files, in_config, expected = FILES[case]
    folder = write_folder(tmp_path, config={"chat_template": in_config})
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    ours, oracle = load_both(folder)
    assert ours.chat_template == expected
    # transformers reads the first with the processor, and vLLM gives the second ones this template
    if case not in ("processor's json", "of texts and pictures"):
        assert ours.chat_template == oracle.chat_template


def test_broken_template_files_are_load_errors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(LoadError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_folder(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read as JSON"):
        Tokenizer.from_folder(folder)
    write_json(folder / "tokenizer_config.json", {"chat_template": 5})
    with pytest.raises(LoadError, match="must be text, but it is a int"):
        Tokenizer.from_folder(folder)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "a"}], variables)


ESCAPES = {
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('true') }}",
    "init of cycler": "{{ cycler.__init__.__globals__ }}",
    "class of text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by index": "{{ ''['__class__'] }}",
    "own helper": "{{ raise_exception.__globals__ }}",
    "strftime": "{{ strftime_now.__code__ }}",
    "dict": "{{ dict.__class__.__base__.__subclasses__() }}",
    "mro": "{{ dict.mro() }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.__class__.__init__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "underscore into a namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "underscore when made": "{{ namespace(**{'_x': 1}) }}",
    "format": "{{ '{0.__class__.__base__}'.format(messages) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "change messages": "{{ messages.append(1) }}",
    "change a message": "{{ messages[0].update({'role': 'x'}) }}",
    "clear a message": "{{ messages[0].clear() }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "attribute in a filter": "{{ messages | map(attribute='__class__') | map('string') | join }}{{ "
    "''.__class__ }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_there_is_no_way_out_of_the_sandbox(name: str) -> None:
    with pytest.raises(RequestError):
        render(ESCAPES[name])


BOMBS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor "
    "%}",
    "long output": "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "repeated list": "{{ [1] * 10**10 }}",
    "repeated from the left": "{{ 10**10 * 'x' }}",
    "power": "{{ 10**(10**10) }}",
    "padding": "{{ 'x'.ljust(10**10) }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "loop recursion": "{% for i in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
    "macro in loops": "{% macro m() %}{% endmacro %}"
    "{% for i in range(9999) %}{% for j in range(9999) %}{{ m() }}{% endfor %}{% endfor %}",
    "many calls in one loop": "{% for i in range(90000) %}"
    + "{{ namespace() and '' }}" * 5
    + "{% endfor %}",
    "lipsum": "{{ lipsum(n=99) }}",
    "division": "{{ 1 / 0 }}",
    "filter": "{{ 1 | round('x') }}",
    "nested lists": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(24) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string | length }}",
    "nested lists as JSON": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(22) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson | length }}",
    "nested lists printed": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(23) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{% set y %}{{ n.x }}{% endset %}{{ y | length }}",
}
HALF = "{% set x = 'ab' * 4000000 %}"
UNSEEN_BOMBS = {
    "width": "{{ ('%099999999d' % 1) | length }}",
    "width from outside": "{{ ('%0*d' % (99999999, 1)) | length }}",
    "precision": "{{ ('%.99999999f' % 1) | length }}",
    "format filter": "{{ ('%099999999d' | format(1)) | length }}",
    "format": "{{ '{:99999999}'.format(1) | length }}",
    "format from outside": "{{ '{:{}}'.format(1, 99999999) | length }}",
    "format map": "{{ '{a:99999999}'.format_map({'a': 1}) | length }}",
    "join": HALF + "{{ ['', '', '', '', ''] | join(x) | length }}",
    "joined texts": HALF + "{{ [x, x, x, x] | join | length }}",
    "join of a text": HALF + "{{ x.join(['', '', '', '', '']) | length }}",
    "replace": "{% set x = 'a' * 9999 %}{{ x | replace('a', x) | length }}",
    "replace of a text": "{% set x = 'a' * 9999 %}{{ x.replace('a', x) | length }}",
    "plus": HALF + "{{ (x + x + x + x) | length }}",
    "tilde": HALF + "{{ (x ~ x ~ x ~ x) | length }}",
    "doubled": "{% set n = namespace(x='aa') %}"
    "{% for i in range(25) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}",
    "doubled lists": "{% set n = namespace(x=[1]) %}"
    "{% for i in range(25) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "center": "{{ 'a' | center(99999999) | length }}",
    "indent": "{{ 'a' | indent(99999999, true) | length }}",
    "indent of lines": "{% set x = '\n' * 9999 %}{{ x | indent(9999, true, true) | length }}",
    "indent of JSON": "{{ [1] | tojson(indent=99999999) | length }}",
    "tabs": "{{ '\t'.expandtabs(99999999) | length }}",
    "tabs by name": "{{ '\t'.expandtabs(tabsize=99999999) | length }}",
    "translate": "{% set x = 'a' * 9999 %}{{ x.translate({97: x}) | length }}",
    "bytes": "{{ ''.encode().ljust(99999999) | length }}",
    "bytes of numbers": "{{ (1).to_bytes(99999999, 'big') | length }}",
    "batch": "{{ [1] | batch(99999999, 0) | list | length }}",
    "slice": "{{ [1] | slice(99999999) | list | length }}",
    "macro": HALF + "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ m(m(x)) | length }}",
    "block": "{% set x %}{% for i in range(99999) %}" + "a" * 999 + "{% endfor %}{% endset %}"
    "{{ x | length }}",
    "many names": HALF
    + "".join(f"{{% set x{i} = x | upper %}}" for i in range(20))
    + "{{ x | length }}",
    "copies": HALF + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(20)) + "{{ x | length }}",
    "squares": "{% set n = namespace(x=3) %}"
    "{% for i in range(20) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
}
"""These do not write what they make."""


@pytest.mark.parametrize("name", UNSEEN_BOMBS)
def test_t36_what_would_take_memory_is_refused_before_it_is_built(name: str) -> None:
    template = ChatTemplate(UNSEEN_BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="The chat template"):
            template.render([{"role": "user", "content": "a"}], {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**27


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_not_end_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="The chat template"):
        render(BOMBS[name])


def test_the_bounds_leave_room_for_long_chats() -> None:
    chat = [{"role": "user", "content": "word " * 200}] * 3000
    text = ChatTemplate(CHATML).render(chat, {"tools": None})
    assert text.count("<|im_start|>") == 3000
    assert len(text) < MAX_CHARACTERS
    assert (
        render("{{ 'ab' * 3 }}{{ 3 * 'c' }}{{ 2 ** 10 }}{{ 'x'.center(3) }}") == "abababccc1024 x "
    )


def test_t36_counted_operations_give_what_jinja_gives() -> None:
    """Filters, operators and methods on a conversation, next to a plain environment."""
    source = "|".join(
        f"{{{{ {expression} }}}}"
        for expression in (
            "messages | map(attribute='content') | join(', ')", "messages | join('-', 'role')",
            "[1, 2, none] | join", "'%s of %05.2f' % ('a', 1.5)", "'%s' | format(messages[0].role)",
            "'{:>5} {}'.format(1, 'a')", "'a' ~ 1 ~ none ~ [1, 'b']", "'a' + 'b'", "[1] + [2]",
            "'a,b,c'.split(',')", "'a b'.split()", "'aXbX'.replace('X', 'yy')", "'a\nb' | indent",
            "'a\nb' | indent(2, true)", "'ab' | center(6)", "[3, 1, 2] | sort", "'abc'[1:]",
            "range(4) | list", "'abc' | list", "[1, 2, 3] | batch(2, 0) | list",
            "[1, 2, 3] | slice(2) | list", "{'b': 1, 'a': 2} | dictsort", "'<a>' | e",
            "messages | tojson", "{'a': [1, {'b': 2}]} | tojson(indent=2)", "'a\tb'.expandtabs(4)",
            "'é' | urlencode", "' a ' | trim | upper | title", "messages | groupby('role') | list",
            "'abc'.translate({97: 'x'})", "[[1], [2]] | sum(start=[])", "messages[0] | string",
            "'a-b'.rsplit('-', 1)", "'x' | pprint", "messages | length", "undefined_name ~ 'a'",
        )
    )  # fmt: skip
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = to_json
    chat = [{"role": "user", "content": "a'b"}, {"role": "assistant", "content": "<é>"}]
    expected = plain.from_string(source).render(messages=chat)
    assert ChatTemplate(source).render(chat, {}) == expected


def test_a_rendering_leaves_no_trace_in_the_next() -> None:
    template = ChatTemplate(
        "{% for i in range(9000) %}{% for j in range(70) %}{% endfor %}{% endfor %}ok"
    )
    chat = [{"role": "user", "content": "a"}]
    assert [template.render(chat, {}) for _ in range(3)] == ["ok"] * 3


def test_errors_carry_the_templates_own_text() -> None:
    with pytest.raises(RequestError, match="The chat template refused: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="syntax error in line 2: .*endfor"):
        ChatTemplate("a\n{% endfor %}")
    with pytest.raises(RequestError, match="has no attribute 'b'|is undefined"):
        render("{{ a.b.c }}")
    with pytest.raises(RequestError, match="must be text, but it is a int"):
        ChatTemplate(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        ChatTemplate("{{ " + "(" * 9999 + ")" * 9999 + " }}")


def test_messages_of_other_kinds(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    class Model:
        def model_dump(self) -> dict[str, str]:
            return {"role": "user", "content": "m"}

    source = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    template = ChatTemplate(source)
    assert template.render((Message("user", "d"), Model()), {}) == "user=d;user=m;"
    for wrong in ([], "text", {"role": "user"}, ["text"], [{"role": object()}], None):
        with pytest.raises(RequestError):
            template.render(wrong, {})  # type: ignore[arg-type]


def test_a_lone_surrogate_is_written_as_its_escape() -> None:
    assert render("{{ 'a\\ud800b' }}{{ 'é' }}") == "a\\ud800bé"
    source = "{{ messages[0].tool_calls[0].function.arguments.a }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "x\\ud83d"}'}}
    formats = ContentFormats("string")
    chat = normalize_messages([{"role": "assistant", "tool_calls": [call]}], formats, source)
    assert ChatTemplate(source).render(chat, {}) == "x\\ud83d"


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def in_itself() -> Any:
    found: dict[str, Any] = {}
    found["a"] = found
    return found


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a\ud800", "it must be valid Unicode"),
        ({"\udc80": 1}, "it must be valid Unicode"),
        (nested(201), "is nested more than 200 levels deep"),
        (nested(5000), "is nested more than 200 levels deep"),
        (in_itself(), "is nested more than 200 levels deep, or holds itself"),
    ],
    ids=["a lone surrogate", "key", "levels", "many levels", "in itself"],
)
def test_what_no_template_can_be_given_is_refused_by_name(value: Any, why: str) -> None:
    template = ChatTemplate("{{ messages | length }}{{ x }}")
    with pytest.raises(RequestError, match=r"messages\[0\].*" + why):
        template.render([{"role": "user", "content": value}], {})
    with pytest.raises(RequestError, match="x.*" + why):
        template.render([{"role": "user", "content": "a"}], {"x": value})
    assert template.render([{"role": "user", "content": nested(100)}], {"x": 1}) == "11"


def test_parameters_of_the_hugging_face_method_that_do_not_exist_here(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write_folder(tmp_path, config={"chat_template": CHATML}))
    chat = [{"role": "user", "content": "a"}]
    for name in ("return_assistant_tokens_mask", "sanitize_control_tokens"):
        with pytest.raises(UnknownParameter, match=name):
            ours.apply_chat_template(chat, **{name: True})
    with pytest.raises(InvalidType, match="continue_final_message='content'"):
        ours.apply_chat_template(chat, continue_final_message="content")  # type: ignore[arg-type]
    whole = ours.apply_chat_template(chat, return_dict=True)
    assert whole.input_ids == ours.apply_chat_template(chat)
