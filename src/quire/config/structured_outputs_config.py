"""Settings of structured outputs: the fields of `structured_outputs_config`, checked."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec

from quire.errors import InvalidParameter, NotBuiltYet

_BACKENDS = ("auto", "guidance", "xgrammar")
_UNBUILT_BACKENDS = {
    "outlines": "Use 'guidance', which takes JSON schemas, regular expressions and grammars.",
    "lm-format-enforcer": "Use 'guidance', which takes JSON schemas and regular expressions.",
}
_UNBUILT = {
    "reasoning_parser_plugin": "Register the format with a package (docs/plugins.md), and name it.",
}
"""Documented keys that are refused unless they change nothing."""


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library that makes masks, the defaults of requests, and the limits on compiling.

    "guidance" makes all masks with llguidance; "xgrammar" those of the forms that xgrammar enforces
    whole with it, and the others with llguidance. The two `disable` fields and
    `allow_additional_properties` hold for each request that does not say what it wants.
    `reasoning_parser` names a format of reasonings ("" none): forms that do not say `starts_after`
    begin after the reasoning of an output, which the prompt may have opened or closed. With
    `enable_in_reasoning` a form begins with the output, in spite of both. A grammar may
    take `compile_time_s` seconds of computing and `compile_memory_mib` MiB in the process that
    tries it; the last `max_cached_grammars` are kept. `prepare`: read the vocabulary at the start
    of the engine, in a thread, instead of with the first form (None: on engines that serve, where
    it has 32,768 tokens or more).
    """

    backend: str = "guidance"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    allow_additional_properties: bool = False
    reasoning_parser: str = ""
    enable_in_reasoning: bool = False
    compile_time_s: float = 5.0
    compile_memory_mib: int = 1024
    max_cached_grammars: int = 256
    prepare: bool | None = None


def structured_outputs_config(given: dict[str, Any] | None) -> StructuredOutputsConfig:
    """Check `structured_outputs_config`. Raises InvalidParameter or NotBuiltYet."""
    options = dict(given or {})
    for name, hint in _UNBUILT.items():
        if value := options.pop(name, None):
            raise NotBuiltYet(f"structured_outputs_config[{name!r}]", value, hint)
    options["backend"] = _backend(options.get("backend", "auto"))
    options["reasoning_parser"] = options.get("reasoning_parser") or ""
    try:
        config = msgspec.convert(options, StructuredOutputsConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(StructuredOutputsConfig.__struct_fields__)
        raise InvalidParameter(
            "structured_outputs_config", given, f"{error}; its fields are {fields}"
        ) from None
    if (
        not config.compile_time_s > 0
        or min(config.compile_memory_mib, config.max_cached_grammars) < 1
    ):
        raise InvalidParameter("structured_outputs_config", given, "limits must be above 0")
    if config.allow_additional_properties and config.disable_additional_properties:
        allowed = "allow_additional_properties goes without disable_additional_properties"
        raise InvalidParameter("structured_outputs_config", given, allowed)
    return config


def _backend(asked: str) -> str:
    name = "structured_outputs_config['backend']"
    if asked in _UNBUILT_BACKENDS:
        raise NotBuiltYet(name, asked, _UNBUILT_BACKENDS[asked])
    if asked not in _BACKENDS:
        raise InvalidParameter(name, asked, f"the backends are {', '.join(_BACKENDS)}")
    # looked for and not imported: the import takes time that a start without forms need not spend
    if asked == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise InvalidParameter(name, asked, "xgrammar is not installed", "Install quire[xgrammar].")
    return "guidance" if asked == "auto" else asked
