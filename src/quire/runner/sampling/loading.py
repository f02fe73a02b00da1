"""Finds custom logits processors: classes, and names as "module:Class"."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from quire.errors import InvalidParameter
from quire.runner.sampling.logits_processor import LogitsProcessor


def find_logits_processors(given: Sequence[str | type]) -> list[type[LogitsProcessor]]:
    """Return the classes that are given as such or as "module:Class"; one that is given twice is
    used once. Raises InvalidParameter for what cannot be imported or is not a LogitsProcessor.
    """
    return list(dict.fromkeys(_checked(item, item) for item in given))


def make_logits_processors(
    classes: Sequence[type[LogitsProcessor]],
    plan: Any,
    device: torch.device,
    *,
    is_pin_memory: bool = False,
) -> list[LogitsProcessor]:
    """Make one processor of each class, in order; `plan` is passed on to them."""
    return [cls(plan, device, is_pin_memory) for cls in classes]


def _checked(item: str | type, shown: object) -> type[LogitsProcessor]:
    found = _imported(item) if isinstance(item, str) else item
    if isinstance(found, type) and issubclass(found, LogitsProcessor):
        return found
    allowed = "each must be a subclass of quire.LogitsProcessor, or its name as 'module:Class'"
    raise InvalidParameter("logits_processors", shown, allowed)


def _imported(name: str) -> object:
    module_name, _, path = name.partition(":")
    if not path:
        raise InvalidParameter("logits_processors", name, "a name is written 'module:Class'")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidParameter(
            "logits_processors", name, f"it cannot be imported ({error})"
        ) from error
    return found
