"""The chat templates of a tokenizer folder, and the choice among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import LoadError, RequestError
from quire.text.json_files import read_json, read_value
from quire.text.model_files import has_file, read_text

_OF_PAIRS = ("clip", "siglip", "siglip2")
_CONTENT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The folder's template, or several by name, or None.

    First chat_template.jinja and additional_chat_templates/*.jinja, then `chat_template` of
    tokenizer_config.json (text, a mapping, or a list of name and template), then
    chat_template.json. Models that compare texts with pictures have none: a text is its content.
    """
    files = _template_files(folder)
    if set(files) == {"default"}:
        return files["default"]
    if files:
        return files
    template = config.get("chat_template")
    if template is None and has_file(folder / "chat_template.json"):
        content = read_value(folder / "chat_template.json")
        template = content.get("chat_template") if isinstance(content, dict) else content
    if template is None and read_json(folder / "config.json").get("model_type") in _OF_PAIRS:
        return _CONTENT
    return _by_name(template)


def choose_template(own: str | dict[str, str] | None, wanted: str | None, has_tools: bool) -> str:
    """The template to use: `wanted` (a text, or a name among `own`), else the tokenizer's own.

    With tools, one named "tool_use" comes before "default". Raises RequestError without a template.
    """
    if wanted is not None:
        return own.get(wanted, wanted) if isinstance(own, dict) else wanted
    if isinstance(own, str):
        return own
    if own is None:
        raise RequestError(
            "The tokenizer has no chat template. Pass `chat_template`, or send a prompt instead of "
            "messages.",
            parameter="chat_template",
        )
    name = "tool_use" if has_tools and "tool_use" in own else "default"
    if name not in own:
        raise RequestError(
            f"The tokenizer has several chat templates and none called 'default'; name one of "
            f"{sorted(own)} through `chat_template`.",
            parameter="chat_template",
        )
    return own[name]


def _template_files(folder: Path) -> dict[str, str]:
    found = {}
    if has_file(folder / "chat_template.jinja"):
        found["default"] = read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_text(path)
    return found


def _by_name(template: Any) -> str | dict[str, str] | None:
    if isinstance(template, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in template}
        except (TypeError, KeyError) as error:
            raise LoadError(
                "chat_template is a list whose entries are not {name, template} objects."
            ) from error
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, dict) and all(isinstance(text, str) for text in template.values()):
        return template
    raise LoadError(f"chat_template must be text, but it is a {type(template).__name__}.")
