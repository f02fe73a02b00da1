"""Resolvers of adapters: asked for unknown names, if clients may load adapters."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

from quire.errors import PluginError
from quire.lora.request import LoRARequest
from quire.plugins.name_table import NameTable

_LONGEST_NAME = 256
_LARGEST_CONFIG = 1 << 20


class LoRAResolver(ABC):
    """Finds adapters by the names that clients write, and brings their folders to this machine."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of this name with a folder of this machine, or None: it knows none.

        `base_model_name` is the engine's `model`. `lora_name` is a client's text, up to 256
        printable characters with slashes and dots in any order: no path to be trusted. The name
        and the id of the result do not count. The request waits for this, others do not.
        """


def _check(value: Any) -> None:
    if not callable(getattr(value, "resolve_lora", None)) or isinstance(value, type):
        raise PluginError(
            "A LoRA resolver must be an object with the coroutine resolve_lora(base_model_name, "
            f"lora_name), and is {value!r}."
        )


LORA_RESOLVERS: NameTable[LoRAResolver] = NameTable("LoRA resolver", check=_check)
"""Resolvers by name, asked in the order in which they were registered."""


class FolderResolver(LoRAResolver):
    """Finds the folders of one folder by their names, if PEFT made their adapters from the engine's
    model or from one of `models`.
    """

    def __init__(self, folder: str | Path, models: Collection[str] = ()) -> None:
        self.folder, self.models = Path(folder), tuple(models)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not is_plain_name(lora_name):
            return None
        path, models = self.folder / lora_name, (base_model_name, *self.models)
        is_one = await asyncio.to_thread(_is_made_from, path, models)
        return LoRARequest(lora_name, 1, str(path)) if is_one else None


def is_printable_name(name: str) -> bool:
    """Whether resolvers are asked for a client's name."""
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable()


def is_plain_name(name: str) -> bool:
    """Whether a client's name is that of one entry of a folder, and nothing outside it."""
    # `..` and hidden folders, paths, and Windows' drives and streams
    return is_printable_name(name) and not name.startswith(".") and not set(name) & set("/\\:")


def _is_made_from(folder: Path, models: Collection[str]) -> bool:
    """Whether a folder has an adapter that PEFT made from one of these models."""
    file = folder / "adapter_config.json"
    try:
        # read whole, so that its size is looked at first
        if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return False
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return False
    return config.get("base_model_name_or_path") in models
