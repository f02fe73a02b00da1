"""Models that plugins and programs register: a family of Quire's, or a class of transformers."""

from __future__ import annotations

import inspect
from typing import Any

from quire.errors import PluginError, UnsupportedArchitecture
from quire.models.rules import Family
from quire.plugins import resolve_reference
from quire.plugins.names_of_vllm import missing_names, without_counterpart

AddedModel = Family | type | str
"""A description, a class of transformers, or the name of either as "module:name"."""

_INSTEAD = (
    "Register a quire.models.rules.Family, or a class of transformers whose attention goes through "
    "its attention interface: docs/plugins.md."
)


def check_added(value: object) -> None:
    """Raise TypeError or ValueError for a non-model, UnsupportedArchitecture if it cannot run."""
    if isinstance(value, str):
        module, colon, name = value.partition(":")
        if not (module and colon and name) or ":" in name:
            raise ValueError(
                f"model_cls={value!r} must name a class or a Family as '<module>:<name>'."
            )
    elif isinstance(value, type):
        _check_class(value.__name__, value)
    elif not isinstance(value, Family):
        raise TypeError(
            "model_cls must be a Family, a class, or the name of either as '<module>:<name>', and "
            f"is a {type(value).__name__}."
        )


def resolved(architecture: str, value: AddedModel) -> Family | type[Any]:
    """The family or the class, imported where it is given by name. Raises UnsupportedArchitecture
    for what cannot be imported, and for a class that cannot run.
    """
    if not isinstance(value, str):
        return value
    try:
        found = resolve_reference(value)
    except PluginError as error:
        module = value.partition(":")[0]
        if missing_names(module):
            raise _written_for_vllm(architecture, module) from error
        raise UnsupportedArchitecture(f"The architecture {architecture}: {error}") from error
    if isinstance(found, Family):
        return found
    if isinstance(found, type):
        _check_class(architecture, found)
        return found
    raise UnsupportedArchitecture(
        f"The architecture {architecture}: {value} is neither a Family nor a class. {_INSTEAD}"
    )


def _check_class(architecture: str, kind: type[Any]) -> None:
    if hasattr(kind, "_from_config") and hasattr(kind, "config_class"):
        return
    if "vllm_config" in _parameters(kind):
        raise _written_for_vllm(architecture, kind.__module__)
    raise UnsupportedArchitecture(
        f"The architecture {architecture}: {kind.__module__}.{kind.__qualname__} is not a model of "
        f"transformers (PreTrainedModel). {_INSTEAD}"
    )


def _parameters(kind: type[Any]) -> set[str]:
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return set()


def _written_for_vllm(architecture: str, module: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"The architecture {architecture} is a class that was written for vLLM ({module}): "
        f"{without_counterpart(module)}. {_INSTEAD}"
    )
