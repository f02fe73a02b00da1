"""The LoRA adapters that clients choose by name: those of --lora-modules, those that were loaded
over HTTP, and those that a folder of adapters has.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import InvalidParameter, RequestError
from quire.lora.request import LoRARequest

Load = Callable[[LoRARequest], Awaitable[bool]]

_MOST_ADAPTERS = 1 << 16
_LONGEST_NAME = 256
_LARGEST_CONFIG = 1 << 20
_FIELDS = {"name", "path", "base_model_name", "is_3d_lora_weight"}


class NameIsServed(RequestError):
    """An adapter of this name is loaded already."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter by its name. `created`: seconds since 1970."""

    request: LoRARequest
    created: int


@dataclass(slots=True)
class ServedAdapters:
    """The adapters of one API server. `load` has the engine read one, and raises what is wrong with
    it; None: the engine has no adapters.

    `may_change`: clients may load and unload. `folder`: its adapters, one in each folder, are
    loaded when a request names them, if they were made from one of `models`.
    """

    load: Load | None = None
    may_change: bool = False
    folder: Path | None = None
    models: Collection[str] = ()
    named: dict[str, ServedAdapter] = field(default_factory=dict)
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    """By name, with the number of those that hold it or wait for it."""

    async def add(self, asked: LoRARequest) -> None:
        """Load an adapter and serve it by its name; `load_inplace` replaces the one of that name.
        Raises NameIsServed without it, other RequestErrors for what cannot be loaded.
        """
        async with self._one_at_a_time(asked.lora_name):
            await self._add(asked)

    async def _add(self, asked: LoRARequest) -> None:
        if self.load is None:
            raise RequestError("LoRA is not enabled: start the server with --enable-lora.")
        name = asked.lora_name
        if name in self.named and not asked.load_inplace:
            raise NameIsServed(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        if name not in self.named and len(self.named) >= _MOST_ADAPTERS:
            raise RequestError(f"{_MOST_ADAPTERS} adapters are served already; unload some.")
        await self.load(asked)
        self.named[name] = ServedAdapter(asked, int(time.time()))

    async def remove(self, name: str) -> bool:
        """Serve a name no longer; False if it is unknown. Requests that have it go on."""
        async with self._one_at_a_time(name):
            return self.named.pop(name, None) is not None

    async def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name, loaded from the folder if need be; None: there is none. Raises
        RequestError for one that is there and cannot be used.
        """
        if name in self.named:
            return self.named[name].request
        if self.folder is None or not self.may_change or not is_plain_name(name):
            return None
        async with self._one_at_a_time(name):
            return await self._resolve(self.folder, name)

    @asynccontextmanager
    async def _one_at_a_time(self, name: str) -> AsyncIterator[None]:
        """Makes each load or unload of a name wait for the one before: loading takes a while, and
        whether the name is free is known only after it.
        """
        lock, num_users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, num_users + 1
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks.pop(name)
            if num_users > 1:
                self._locks[name] = lock, num_users - 1

    async def _resolve(self, folder: Path, name: str) -> LoRARequest | None:
        if name not in self.named:
            path = folder / name
            if not await asyncio.to_thread(_is_made_from, path, self.models):
                return None
            try:
                await self._add(LoRARequest(name, adapter_id(name), str(path)))
            except RequestError as error:
                text = f"The LoRA adapter '{name}' was found but could not be loaded: {error}"
                raise RequestError(text, parameter="model") from error
        return self.named[name].request


def adapter_id(name: str) -> int:
    """The id of an adapter that has a name only: the same in every API server."""
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=4).digest()
    return (int.from_bytes(digest, "big") & 0x7FFFFFFF) or 1


def is_plain_name(name: str) -> bool:
    """Whether a client's name is that of one entry of a folder, and nothing outside it."""
    is_short = 0 < len(name) <= _LONGEST_NAME and name.isprintable()
    return is_short and not name.startswith(".") and not set(name) & set("/\\:")


def _is_made_from(folder: Path, models: Collection[str]) -> bool:
    """Whether a folder has an adapter that PEFT made from one of these models."""
    file = folder / "adapter_config.json"
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
            return False
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        return False
    return config.get("base_model_name_or_path") in tuple(models)


def parse_modules(given: Sequence[str]) -> list[LoRARequest]:
    """The adapters of --lora-modules: NAME=PATH, or JSON with name, path and base_model_name.

    Raises InvalidParameter for another form, an unknown field, or a name that is given twice.
    """
    found: dict[str, LoRARequest] = {}
    for text in given:
        for one in _modules_of(text):
            if one.lora_name in found:
                raise InvalidParameter("lora_modules", one.lora_name, "a name is given once")
            found[one.lora_name] = one
    return list(found.values())


def _modules_of(text: str) -> list[LoRARequest]:
    name, sign, path = text.partition("=")
    if sign and "," not in text and not text.lstrip().startswith(("{", "[")):
        return [LoRARequest(name, adapter_id(name), path)]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    items = value if isinstance(value, list) else [value]
    return [_module(text, item) for item in items]


def _module(text: str, item: Any) -> LoRARequest:
    allowed = 'it is NAME=PATH, or JSON as {"name": "a", "path": "/a", "base_model_name": "b"}'
    if not isinstance(item, Mapping) or not {"name", "path"} <= item.keys() <= _FIELDS:
        raise InvalidParameter("lora_modules", text, allowed)
    base = item.get("base_model_name")
    if not isinstance(item["name"], str) or not isinstance(base, str | None):
        raise InvalidParameter("lora_modules", text, allowed)
    name, path = item["name"], item["path"]
    return LoRARequest(name, adapter_id(name), path, base_model_name=base)
