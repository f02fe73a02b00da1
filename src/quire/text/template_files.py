"""The chat templates of a tokenizer folder, and the choice among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import LoadError, RequestError


def read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """The folder's template, or several by name, or None.

    First chat_template.jinja and additional_chat_templates/*.jinja, then `chat_template` of
    tokenizer_config.json (text, a mapping, or a list of name and template), then
    chat_template.json.
    """
    files = _template_files(folder)
    if set(files) == {"default"}:
        return files["default"]
    if files:
        return files
    template = config.get("chat_template")
    if template is None and (folder / "chat_template.json").is_file():
        template = _read_json_template(folder / "chat_template.json")
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
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from error


def _read_json_template(path: Path) -> Any:
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}.") from error
    return content.get("chat_template") if isinstance(content, dict) else content


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
