"""The chat templates that a public package carries, rendered beside transformers, and read back.

    python -m tests.compat.chat_templates FOLDER [PART OF A NAME ...]

fetches the source distribution of llama-cpp-python from the registry into FOLDER and unpacks its
templates. Each renders every conversation of CONVERSATIONS, once as `render_chat` does and once as
transformers does with the messages as a client sends them. Where the two differ, the fewest of
REASONS are looked for whose changes to the messages make them equal. Then a turn with calls is
written by the template and read in the formats that `auto` finds for it.

Prints a line for each template and the sums, and with names also both prompts of each difference.
Exits with 1 for a difference without a reason, or calls that do not come back.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import RequestError
from quire.server.output_parsing import choose_parsers
from quire.text.chat import render_chat
from quire.text.chat_template import ChatTemplate
from tests.compat.source_distribution import fetch

ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
DIGEST = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
WITHIN = "vendor/llama.cpp/models/templates/"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

Message = dict[str, Any]


def function(name: str, properties: Message, required: Sequence[str] = ()) -> Message:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    described = {"name": name, "description": f"The {name}", "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS = [
    function(
        "weather",
        {
            "city": {"type": "string", "description": "Its name"},
            "days": {"type": "integer", "description": "How many"},
        },
        ["city"],
    ),
    function("clock", {}),
]


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def system(content: Any, role: str = "system") -> Message:
    return {"role": role, "content": content}


def assistant(content: Any, *calls: Message, **others: Any) -> Message:
    made = {"role": "assistant", "content": content, **others}
    return {**made, "tool_calls": list(calls)} if calls else made


def call(name: str, arguments: Any, number: int) -> Message:
    described = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": described}


def result(content: Any, number: int = 1, name: str = "weather") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05d}", "name": name}


WEATHER = call("weather", {"city": 'Bad "Ems", 3 < 4', "days": 2}, 1)
CLOCK = call("clock", {}, 2)
HI, MORE = user("Hi"), user("Again")
CONVERSATIONS: dict[str, tuple[list[Message], list[Message] | None]] = {
    "user": ([HI], None),
    "system": ([system("Be brief."), HI], None),
    "turns": ([HI, assistant("Ho"), MORE], None),
    "blanks": (
        [system(" Be brief.\n"), user("  Hi <b>&amp; {{x}} \n"), assistant(" Ho \n"), MORE], None
    ),
    "user's parts": ([user([text("Hi"), text("there")])], None),
    "system's parts": ([system([text("Be"), text("brief.")]), HI], None),
    "assistant's parts": ([HI, assistant([text("Ho"), text("ho")]), MORE], None),
    "tools": ([HI], TOOLS),
    "system and tools": ([system("Be brief."), HI], TOOLS),
    "null and a call": ([HI, assistant(None, WEATHER), result("sun")], TOOLS),
    "empty and a call": ([HI, assistant("", WEATHER), result("sun")], TOOLS),
    "no parts and a call": ([HI, assistant([], WEATHER), result("sun")], TOOLS),
    "text and a call": (
        [HI, assistant("I look.", WEATHER), result("sun"), assistant("Sunny."), MORE], TOOLS
    ),
    "two calls": (
        [HI, assistant(None, WEATHER, CLOCK), result("sun"), result("noon", 2, "clock")], TOOLS
    ),
    "a result's parts": (
        [HI, assistant(None, WEATHER), result([text("sun"), text("rain")])], TOOLS
    ),
    "reasoning": ([HI, assistant("Ho", reasoning_content="hm"), MORE], None),
    "reasoning and a call": (
        [HI, assistant(None, WEATHER, reasoning_content="hm"), result("sun")], TOOLS
    ),
    "two users": ([HI, user("there")], None),
    "null answer": ([HI, assistant(None), MORE], None),
    "empty answer": ([HI, assistant(""), MORE], None),
    "ends with an answer": ([HI, assistant("Ho")], None),
    "developer": ([system("Be brief.", "developer"), HI], None),
}  # fmt: skip


# reasons: what `render_chat` changes on purpose


def form_of(template: ChatTemplate, role: str) -> str:
    formats = template.content_formats
    return formats.by_role.get(role, formats.default)


def developer_as_system(template: ChatTemplate, message: Message) -> Message:
    knows = any(f"{quote}developer{quote}" in template.source for quote in "\"'")
    is_other = message["role"] == "developer" and not knows
    return {**message, "role": "system"} if is_other else message


def parts_as_text(template: ChatTemplate, message: Message) -> Message:
    content, role = message["content"], message["role"]
    if isinstance(content, list) and (role == "tool" or form_of(template, role) == "string"):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def text_as_part(template: ChatTemplate, message: Message) -> Message:
    content, role = message["content"], message["role"]
    if role == "tool" or form_of(template, role) != "openai" or isinstance(content, list):
        return message
    return {**message, "content": [text(content)] if content else []}


def null_as_empty(template: ChatTemplate, message: Message) -> Message:
    if message["content"] is not None or message.get("tool_calls"):
        return message
    return {**message, "content": ""}


def call_without_text(template: ChatTemplate, message: Message) -> Message:
    if not message.get("tool_calls") or message["content"]:
        return message
    empty: Any = [] if form_of(template, "assistant") == "openai" else ""
    fitting = None if template.call_forms.no_content is None else empty
    return {**message, "content": fitting}


def arguments_as_text(template: ChatTemplate, message: Message) -> Message:
    if not message.get("tool_calls") or not template.call_forms.as_text:
        return message
    calls = [
        {**each, "function": {**each["function"],
                              "arguments": json.dumps(each["function"]["arguments"])}}
        for each in message["tool_calls"]
    ]  # fmt: skip
    return {**message, "tool_calls": calls}


def reasoning_names(template: ChatTemplate, message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        return message
    return {**message, "reasoning": reasoning, "thinking": reasoning}


REASONS: dict[str, Callable[[ChatTemplate, Message], Message]] = {
    "a developer's message is the system's where a template knows no developers":
        developer_as_system,
    "parts are text where a template takes text": parts_as_text,
    "a text is a part where a template takes parts alone": text_as_part,
    "null is an empty answer": null_as_empty,
    "null, an empty text and no parts are the same where calls follow": call_without_text,
    "arguments are text where a template concatenates them": arguments_as_text,
    "reasoning has each of the names that templates read": reasoning_names,
}  # fmt: skip


# rendering


class Template:
    """A template, as `render_chat` asks a tokenizer for one."""

    def __init__(self, source: str) -> None:
        self.compiled = ChatTemplate(source)
        self.special_tokens_map = SPECIAL

    def compiled_chat_template(self, name: str | None, tools: Any) -> ChatTemplate:
        return self.compiled

    def ours(self, messages: Sequence[Message], tools: Any, **options: Any) -> str | None:
        """The prompt; None: the template refuses."""
        options = {"tools_as_text": False, **options}
        try:
            return render_chat(self, messages, tools=tools, **options)  # type: ignore[arg-type]
        except RequestError:
            return None

    def theirs(self, messages: Sequence[Message], tools: Any) -> str | None:
        """transformers' prompt; None: it fails."""
        try:
            [[prompt], _] = render_jinja_template(
                [list(messages)], tools=tools, chat_template=self.compiled.source,
                add_generation_prompt=True, **SPECIAL,
            )  # fmt: skip
        except Exception:  # whichever error the template's code or jinja2 raises
            return None
        return prompt


def reasons_for(template: Template, messages: list[Message], tools: Any) -> Sequence[str] | None:
    """The fewest reasons with which transformers writes what `render_chat` writes; None: there is
    none.
    """
    ours = template.ours(messages, tools)
    for size in range(len(REASONS) + 1):
        for chosen in itertools.combinations(REASONS, size):
            changed = messages
            for name in chosen:
                changed = [REASONS[name](template.compiled, message) for message in changed]
            if template.theirs(changed, tools) == ours:
                return chosen
    return None


# calls


@dataclass
class Found:
    """What was found of one template."""

    same: int = 0
    refused: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    formats: str = ""
    calls: str = ""


NOT_READ = "NOT READ"
MARK_STARTS = ("<", "[", "]<", ">>>")
"""What a mark begins with: a prompt and a turn that go apart within one do so before it."""


def written_turn(template: Template, calls: Sequence[Message], as_text: bool | None) -> Any:
    """The prompt of a question, as far as it is the beginning of the conversation with a turn that
    calls, and that turn; None where the template refuses.
    """
    options = {"tools_as_text": as_text}
    question = template.ours([HI], TOOLS, **options)
    answered = template.ours(
        [HI, assistant("I look.", *calls)], TOOLS, add_generation_prompt=False, **options
    )
    if question is None or answered is None:
        return None
    pairs = zip(question, answered, strict=False)
    size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if size < len(question):
        starts = [question.rfind(mark, 0, size) for mark in MARK_STARTS]
        start = max(starts)
        size = start if ">" not in question[start:size] else size
    return answered[:size], answered[size:]


def read_back(template: Template) -> tuple[str, str]:
    """The formats that `auto` finds, and what became of the template's own calls: "" where they
    came back.
    """
    source = template.compiled.source
    plan = choose_parsers("auto", "auto", source)
    formats = plan.described
    for calls in ([WEATHER, CLOCK], [WEATHER]):
        turn = written_turn(template, calls, plan.tools_as_text)
        if turn is None:
            continue
        prompt, output = turn
        if "Ems" not in output:
            return formats, "the template writes no calls"
        said = plan.read(output, plan.place(prompt), tools=TOOLS)
        read = [(made.name, json.loads(made.arguments)) for made in said.tool_calls]
        meant = [(made["function"]["name"], made["function"]["arguments"]) for made in calls]
        rest = f"{said.reasoning} {said.content}"
        if read == meant[: len(read)] and read and "Ems" not in rest:
            return formats, "" if len(read) == len(meant) else "the template writes one call alone"
        return formats, f"{NOT_READ}: {output!r} says {said}"
    return formats, "the template refuses calls"


def examine(source: str, tell: Callable[[str], None] | None = None) -> Found:
    """What one template does with all conversations and with its own calls."""
    template, found = Template(source), Found()
    for name, (messages, tools) in CONVERSATIONS.items():
        reasons = reasons_for(template, messages, tools)
        if reasons is None:
            found.unexplained.append(name)
        elif template.ours(messages, tools) is None:
            found.refused += 1
        else:
            found.same += not reasons
            found.by_reason.update(reasons)
        if tell is not None and reasons != ():
            tell(f"--- {name}: {reasons}")
            tell(f"ours:   {template.ours(messages, tools)!r}")
            tell(f"theirs: {template.theirs(messages, tools)!r}")
    found.formats, found.calls = read_back(template)
    return found


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    asked.add_argument("folder", type=Path)
    asked.add_argument("names", nargs="*")
    options = asked.parse_args()
    templates = fetch(options.folder, "llama-cpp-python", ARCHIVE, DIGEST, WITHIN) / WITHIN
    sums: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    failures = 0
    for path in sorted(templates.glob("*.jinja")):
        if options.names and not any(name in path.name for name in options.names):
            continue
        found = examine(path.read_text(encoding="utf-8"), print if options.names else None)
        reasons = ", ".join(f"{count} {name}" for name, count in found.by_reason.items())
        print(f"{path.stem}: {found.same} same, {found.refused} refused by both"
              f"{', ' if reasons else ''}{reasons}; {found.formats}"
              f"{', ' if found.calls else ''}{found.calls}")  # fmt: skip
        for name in found.unexplained:
            print(f"    UNEXPLAINED: {name}")
        is_lost = found.calls.startswith(NOT_READ)
        failures += len(found.unexplained) + is_lost
        outcomes[NOT_READ if is_lost else found.calls or "read"] += 1
        sums.update({"templates": 1, "same": found.same, "refused by both": found.refused,
                     "unexplained": len(found.unexplained)})  # fmt: skip
        sums.update(found.by_reason)
    print(*(f"{count:5} {name}" for name, count in sums.items()), sep="\n")
    print("calls:", *(f"{count:5} {name}" for name, count in outcomes.items()), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
