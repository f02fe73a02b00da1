"""Kinds of a model's facts; one model of each is part of the default run (test_families.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from transformers import AutoConfig

from quire.models import find_family, read_spec
from quire.models.rules import tensor_map
from tests.models.hostile.form import Hostile
from tests.models.hostile.models import config_of, keys_of


def kinds_of(hostile: Hostile) -> set[str]:
    """A model's kinds: every choice in its spec, and the steps from tensors to parameters."""
    config = config_of(hostile)
    if hostile.reference is None:
        made = AutoConfig.for_model(hostile.kind, **keys_of(hostile)).to_dict()
        config = made | {"architectures": config["architectures"]}
    spec = read_spec(config)
    stored = tensor_map(find_family(config), spec)
    return {*_choices(spec), *("stored: " + " ".join(tensor.steps) for tensor in stored)}


def _choices(value: Any) -> Iterator[str]:
    """A number counts as default or not, and one without a default is a size, no choice."""
    for field in fields(value):
        found = getattr(value, field.name)
        name = f"{type(value).__name__}.{field.name}"
        if field.name in ("blocks", "mixers"):
            for part in set(found):
                yield from _choices(part)
        elif is_dataclass(found):
            yield f"{name}={type(found).__name__}"
            yield from _choices(found)
        elif found is None or isinstance(found, bool | str):
            yield f"{name}={found}"
        elif field.default is not MISSING:
            yield f"{name} {'is' if found == field.default else 'is not'} {field.default}"
