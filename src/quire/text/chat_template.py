"""Chat templates: Jinja from a checkpoint or a request, rendered where it can do no harm.

The environment is Jinja2's immutable sandbox with the helpers that Hugging Face templates expect:
`raise_exception`, `strftime_now`, an unescaped `tojson`, the `generation` tag, loop controls,
trimmed blocks. What is bounded: the numbers of `range` (Jinja: 100,000), calls and loop turns of
one rendering together (MAX_STEPS), the length of the output and of any text made by repetition
(MAX_CHARACTERS), the size of powers. What is not: memory that one operation takes from operands
that grew step by step (doubling a text by concatenation), and format widths; so templates that come
with a request stay off on a server unless its operator trusts the senders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.encodable import plain_text
from quire.errors import InvalidParameter, RequestError
from quire.params import checks
from quire.text.templates.content_format import detect_content_format
from quire.text.templates.template_bounds import (
    DROPPED_FILTERS,
    MAX_CHARACTERS,
    STEPS_OF_A_CALL,
    Budget,
    OperationsAsFilters,
    bounded_call,
    bounded_filters,
    bounded_operation,
    json_length,
    text_of,
)
from quire.text.templates.template_builtins import (
    DictMaker,
    GenerationTag,
    PlainNamespace,
    count_loop_turns,
    raise_exception,
    strftime_now,
    to_json,
)
from quire.text.templates.template_forms import (
    CallForms,
    ContentFormats,
    detect_call_forms,
    detect_content_formats,
)

MAX_POWER_BITS = 4096
# Follows the text that the model is to continue; the trailing blank tells whether the
# template strips contents.
_CONTINUE_MARK = "continue-this-text-here-5c0f9 "
_FILTERS = bounded_filters()
_MAX_DATE_PART = 256
"""The most characters that one character of a date's format becomes."""
_MOST_LEVELS = 200
"""Levels of nesting in what a template gets."""
# What a template reads besides the messages, when it is only asked for its forms.
_PROBE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_NOTHING_ELSE = {"tools": None, "documents": None, "add_generation_prompt": False}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template: renders messages to a prompt.

    `variables` are the names that it reads from outside; `content_format` is "openai" if it loops
    over the parts of a content somewhere, else "string". Raises RequestError when `source`
    is not valid Jinja.
    """

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):
            raise RequestError(
                f"chat_template must be text, but it is a {type(source).__name__}.",
                parameter="chat_template",
            )
        self.source = source
        environment = _Sandbox()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self.content_format = detect_content_format(tree)
            count_loop_turns(tree)
            tree = OperationsAsFilters().visit(tree)
            self._code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"The chat template has a syntax error in line {error.lineno}: {error.message}",
                parameter="chat_template",
            ) from error
        except RecursionError as error:
            raise RequestError(
                "The chat template is nested too deeply.", parameter="chat_template"
            ) from error

    @property
    def knows_tools(self) -> bool:
        """Whether it reads the variable `tools`."""
        return "tools" in self.variables

    @cached_property
    def content_formats(self) -> ContentFormats:
        if self.content_format == "string":
            return ContentFormats("string")
        return detect_content_formats(self._render_probe)

    @cached_property
    def call_forms(self) -> CallForms:
        return detect_call_forms(self._render_probe)

    def _render_probe(self, messages: Sequence[Any]) -> str:
        variables = dict.fromkeys(_PROBE_TOKENS, "") | _NOTHING_ELSE
        try:
            return self.render(messages, variables, has_null_contents=True)
        except RequestError:  # a template for tools alone may need a list of them
            return self.render(messages, variables | {"tools": []}, has_null_contents=True)

    def render(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        has_null_contents: bool = False,
    ) -> str:
        """The prompt for `messages`; `variables` are all other names, the special tokens' roles
        among them.

        Keys of messages whose value is None are left out; the reasoning of a message is offered
        under each name that templates use. `has_null_contents`: a content that is None stays, for
        templates that ask for it. Raises RequestError: with the template's own text when it raised,
        and for every failure in it.
        """
        return self._render(_prepared(messages, has_null_contents), variables)

    def render_open(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        has_null_contents: bool = False,
    ) -> str:
        """The prompt that ends within the last message, for the model to go on with it.

        Raises RequestError as `render` does, and together with `add_generation_prompt`, when the
        last message has no text, or when the template leaves its text out.
        """
        if variables.get("add_generation_prompt"):
            allowed = "it cannot be combined with add_generation_prompt=True"
            hint = "Set one of the two."
            raise InvalidParameter("continue_final_message", True, allowed, hint)
        prepared = _prepared(messages, has_null_contents)
        final_text = _mark_end(prepared[-1])
        text = self._render(prepared, variables)
        # stripped, as a template may strip contents
        if _CONTINUE_MARK.strip() not in text or final_text.strip() not in text:
            raise RequestError(
                "continue_final_message=True needs a template that writes the last message as it "
                "is, and this one "
                "leaves its text out or changes it.",
                parameter="continue_final_message",
            )
        end = text.rindex(_CONTINUE_MARK.strip())
        keeps_blanks = text.startswith(_CONTINUE_MARK, end)
        return text[:end] if keeps_blanks else text[:end].rstrip()

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        environment = _Sandbox(max_characters=MAX_CHARACTERS)
        template = jinja2.Template.from_code(
            environment, self._code, environment.make_globals(None)
        )
        plain = {name: plain_data(value, name) for name, value in variables.items()}
        try:
            return self._bounded_text(template, {**plain, "messages": messages})
        # before `Exception`: its words are for the client already
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(
                f"The chat template refused: {error.message or type(error).__name__}",
                parameter="messages",
            ) from error
        except (
            Exception
        ) as error:  # any code of the template may fail in any way; it is this request's failure
            raise RequestError(
                f"The chat template failed: {type(error).__name__}: {error}", parameter="messages"
            ) from error

    def _bounded_text(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces, length = [], 0
        # in pieces, so that a template that writes without end is stopped at the bound
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise RequestError(
                    f"The chat template writes more than {MAX_CHARACTERS} characters.",
                    parameter="messages",
                )
            pieces.append(piece)
        return plain_text("".join(pieces))  # a string of its own may be a lone surrogate


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering (or one compilation), with the budget of that rendering.

    Raises jinja2.exceptions.SecurityError inside the template when a bound is passed.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_characters: int = 0) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self._printed,
        )
        for name in DROPPED_FILTERS:
            del self.filters[name]
        self.filters |= _FILTERS
        self.filters["tojson"] = self._to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = self._strftime_now
        del self.globals["lipsum"]  # milliseconds a call, for no template that we know of
        self.globals["dict"] = DictMaker()
        self.globals["namespace"] = PlainNamespace
        self.budget = Budget(max_characters)

    @property
    def turn(self) -> None:
        """Read by the code of every loop turn (see `count_loop_turns`), which counts it."""
        self.budget.step(1)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template comes through here, so that calls are counted too."""
        self.budget.step(STEPS_OF_A_CALL)
        bounded_call(self.budget, function, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Joins the pieces that a macro or a block writes."""
        texts, length = [], 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_CHARACTERS:
                break
            texts.append(piece)
        self.budget.build(length)
        return "".join(texts)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Raises for a forbidden attribute; Jinja would go on until it is used."""
        raise jinja2.exceptions.SecurityError(
            f"the attribute {attribute!r} of a {type(obj).__name__} is not for templates"
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators whose results can be far larger than their operands."""
        if operator == "+" and type(left) is type(right) is str:
            self.budget.build(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = left.bit_length() * abs(right)
            if bits > MAX_POWER_BITS:
                raise jinja2.exceptions.SecurityError("a number with too many digits")
        else:
            bounded_operation(self.budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _printed(self, value: Any) -> Any:
        return value if type(value) is str else text_of(self.budget, value)

    def _to_json(self, value: Any, *args: Any, **kwargs: Any) -> str:
        self.budget.build(json_length(self.budget, value, *args, **kwargs))
        return to_json(value, *args, **kwargs)

    def _strftime_now(self, format: str) -> str:
        self.budget.build(_MAX_DATE_PART * len(format))
        return strftime_now(format)


def _mark_end(message: dict[str, Any]) -> str:
    """Append the mark to the message's last text, in place; the text without it."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise RequestError(
        "continue_final_message=True needs a last message with text to continue.",
        parameter="continue_final_message",
    )


def _prepared(messages: Sequence[Any], has_null_contents: bool = False) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "messages must be a list with at least one message.", parameter="messages"
        )
    kept = {"content"} if has_null_contents else set()
    return [
        _prepared_message(message, f"messages[{i}]", kept) for i, message in enumerate(messages)
    ]


def _prepared_message(message: Any, name: str, kept: Collection[str]) -> dict[str, Any]:
    plain = plain_data(message, name)
    if not isinstance(plain, dict):
        raise RequestError(
            f"{name} must be an object with role and content, but it is a "
            f"{type(message).__name__}.",
            parameter="messages",
        )
    plain = {key: value for key, value in plain.items() if value is not None or key in kept}
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def plain_data(value: Any, name: str, levels: int = _MOST_LEVELS) -> Any:
    """A copy of `value` made of None, bool, int, float, str, list, tuple and dict alone.

    A template must not reach the methods of richer objects. Dataclasses and pydantic models are
    read by field. Raises RequestError for anything else, for texts that are not valid Unicode, and
    for what is nested in more than `levels` or holds itself.
    """
    if isinstance(value, str):
        return checks.text(name, str(value))
    if value is None or type(value) in (int, float, bool):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if not levels:
        raise RequestError(
            f"{name} is nested more than {_MOST_LEVELS} levels deep, or holds itself.",
            parameter="messages",
        )
    inner = partial(plain_data, name=name, levels=levels - 1)
    if isinstance(value, Mapping):
        return {inner(key): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        copied = [inner(item) for item in value]
        return copied if isinstance(value, list) else tuple(copied)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: inner(getattr(value, field.name)) for field in fields}
    if callable(dump := getattr(value, "model_dump", None)):
        return inner(dump())
    raise RequestError(
        f"{name} holds a {type(value).__name__}; chat templates are given JSON-like values only.",
        parameter="messages",
    )
