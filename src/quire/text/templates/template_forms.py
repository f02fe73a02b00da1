"""The forms of contents and calls that a template can write, found by rendering short chats.

What a template's source says is not enough: one that walks through parts somewhere may print those
of another role as Python's `[{'type': ...}]`, and one that writes arguments by concatenation needs
them as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import RequestError

ContentFormat = Literal["string", "openai", "either"]
"""Contents are texts, lists of parts, or what the client sent."""
Message = dict[str, Any]
Render = Callable[[Sequence[Any]], str]
"""Messages -> prompt; raises RequestError for those that the template cannot write."""

_PROBE = "quire7probe"
"""A text that no template changes or contains."""
_AS_DATA = re.compile(rf"""['"]text['"]\s*:\s*['"]{_PROBE}""")
"""A part that was printed as Python or JSON instead of its text."""
_MISWRITTEN_KEY = re.compile(rf"""'{_PROBE}'|\\"{_PROBE}""")
"""The key of an argument in Python's quotes, or within a string of JSON."""
_ROLES = ("system", "user", "assistant", "tool")
_OTHER_CONTENTS: tuple[Any, ...] = ("hi", [{"type": "text", "text": "hi"}])
"""Contents of the messages around a probe, of which a template takes one or both."""


@dataclass(frozen=True, slots=True)
class ContentFormats:
    """The form of a content by the role of its message: `by_role`, or `default` for others."""

    default: ContentFormat
    by_role: Mapping[str, ContentFormat] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallForms:
    """The form in which a template takes the calls of a message.

    `no_content`: the content of a message that has calls and no text. `as_text`: arguments are
    given as JSON text instead of an object. `takes_text`: arguments that are not an object can be
    given as the text that they are.
    """

    no_content: str | None = ""
    as_text: bool = False
    takes_text: bool = False


def detect_content_formats(render: Render) -> ContentFormats:
    """The forms of each role, where a template walks through parts; a role it refuses has text."""
    by_role: dict[str, ContentFormat] = {}
    for role in _ROLES:
        takes_text = _writes(render, role, _PROBE)
        takes_parts = _writes(render, role, [{"type": "text", "text": _PROBE}])
        form: ContentFormat = "either" if takes_text else "openai"
        by_role[role] = form if takes_parts else "string"
    return ContentFormats("string", by_role)


def detect_call_forms(render: Render) -> CallForms:
    """The form in which the template writes calls; the usual one if it writes none."""
    takes_text = any(_PROBE in _with_call(render, text, _PROBE) for text in ("", None))
    for arguments in ({_PROBE: 1}, json.dumps({_PROBE: 1})):
        written = [(_with_call(render, text, arguments), text) for text in ("", None)]
        fitting = [
            (len(prompt), text)
            for prompt, text in written
            if _PROBE in prompt and not _MISWRITTEN_KEY.search(prompt)
        ]
        if fitting:
            # What is longer has an empty turn or the word "None" in it.
            _, no_content = min(fitting, key=lambda each: each[0])
            return CallForms(no_content, isinstance(arguments, str), takes_text)
    return CallForms(takes_text=takes_text)


def with_call_forms(messages: Sequence[Message], forms: CallForms) -> list[Message]:
    """Normalized messages with their calls as the template takes them."""
    return [_fitted(message, forms) if message.get("tool_calls") else message
            for message in messages]  # fmt: skip


def _fitted(message: Message, forms: CallForms) -> Message:
    calls = []
    for call in message["tool_calls"]:
        arguments = _fitted_arguments(call["function"]["arguments"], forms)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    content = message["content"] or (forms.no_content if message["content"] == "" else [])
    return {**message, "content": content, "tool_calls": calls}


def _fitted_arguments(arguments: Any, forms: CallForms) -> Any:
    """Arguments as the template takes them; those that are not an object stay visible, as the text
    that they are or as the value of a key.
    """
    if not isinstance(arguments, dict):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return text if forms.takes_text else {"arguments": arguments}
    return json.dumps(arguments, ensure_ascii=False) if forms.as_text else arguments


def _writes(render: Render, role: str, content: Any) -> bool:
    """Whether this content of a message is written as text, whichever form is around it."""
    for other in _OTHER_CONTENTS:
        text = _rendered(render, _conversation(role, content, other))
        if _PROBE in text and not _AS_DATA.search(text):
            return True
    return False


def _with_call(render: Render, content: str | None, arguments: Any) -> str:
    """The prompt with this call; "" if the template cannot write it."""
    asked = {"role": "assistant", "content": content, "tool_calls": [_call(arguments)]}
    for other in _OTHER_CONTENTS:
        if prompt := _rendered(render, [{"role": "user", "content": other}, asked]):
            return prompt
    return ""


def _rendered(render: Render, messages: Sequence[Any]) -> str:
    try:
        return render(messages)
    except RequestError:
        return ""


def _conversation(role: str, content: Any, other: Any) -> list[Message]:
    user = {"role": "user", "content": other}
    probe = {"role": role, "content": content}
    match role:
        case "system":
            return [probe, user]
        case "assistant":
            return [user, probe, user]
        case "tool":
            asked = {"role": "assistant", "content": "", "tool_calls": [_call({"a": 1})]}
            return [user, asked, {**probe, "name": "f", "tool_call_id": "call00001"}]
        case _:
            return [probe]


def _call(arguments: Any) -> Message:
    # An id of nine letters and digits: some templates take no other.
    function = {"name": "f", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}
