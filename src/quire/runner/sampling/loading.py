"""Finds custom logits processors: classes, "module:Class" names, and installed entry points."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from quire.errors import InvalidParameter
from quire.runner.sampling.logits_processor import LogitsProcessor

ENTRY_POINT_GROUP = "quire.logits_processors"


def find_logits_processors(
    given: Sequence[str | type] = (), *, installed: Iterable[EntryPoint] | None = None
) -> list[type[LogitsProcessor]]:
    """Return the classes of installed entry points (`quire.logits_processors`), then the given
    ones.

    `given` are classes or "module:Class" names; a class that is named twice is used once. Raises
    InvalidParameter for what cannot be imported or is not a LogitsProcessor.
    """
    points = entry_points(group=ENTRY_POINT_GROUP) if installed is None else installed
    found = [_checked(point.value, point.value) for point in points]
    found += [_checked(item, item) for item in given]
    return list(dict.fromkeys(found))


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
