"""LoRA adapters by name: of --lora-modules, loaded over HTTP, or found by resolvers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from quire.errors import EngineError, InvalidParameter, RequestError
from quire.lora.request import LoRARequest, check_lora_request
from quire.lora.resolver import LoRAResolver, is_printable_name

logger = logging.getLogger(__name__)

Load = Callable[[LoRARequest], Awaitable[bool]]

_MOST_ADAPTERS = 1 << 16
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

    `may_change`: clients may load and unload, and `resolvers` are asked, one after the other, for a
    name that is not served. `models`: the names of the engine's model, the last one its `model`.
    """

    load: Load | None = None
    may_change: bool = False
    resolvers: Mapping[str, LoRAResolver] = field(default_factory=dict)
    models: Sequence[str] = ()
    named: dict[str, ServedAdapter] = field(default_factory=dict)
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    """Locks by name, each with the number of tasks that hold it or wait for it."""

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
        # the error has the words of vLLM's
        if name in self.named and not asked.load_inplace:
            raise NameIsServed(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        # names are kept until they are unloaded, and clients choose them
        if name not in self.named and len(self.named) >= _MOST_ADAPTERS:
            raise RequestError(f"{_MOST_ADAPTERS} adapters are served already; unload some.")
        # named only once it is loaded: no request may choose an adapter that turns out to be broken
        await self.load(asked)
        self.named[name] = ServedAdapter(asked, int(time.time()))

    async def remove(self, name: str) -> bool:
        """Serve a name no longer; False if it is unknown. Requests that have it go on."""
        async with self._one_at_a_time(name):
            return self.named.pop(name, None) is not None

    async def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name, found by a resolver and loaded if need be; None: there is none.
        Raises RequestError for one that is there and cannot be used, and EngineError where nothing
        is found because a resolver failed.
        """
        if name in self.named:
            return self.named[name].request
        # the name goes to the code of others and to the log
        if not (self.resolvers and self.may_change and is_printable_name(name)):
            return None
        async with self._one_at_a_time(name):
            # another request may have loaded it while this one waited
            if name not in self.named:
                await self._resolve(name)
            return self.named[name].request if name in self.named else None

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
            # the entry goes with its last user: any name that clients ask for makes one
            lock, num_users = self._locks.pop(name)
            if num_users > 1:
                self._locks[name] = lock, num_users - 1

    async def _resolve(self, name: str) -> None:
        """Load what the first resolver finds that can be loaded."""
        failed = unusable = None
        for title, resolver in self.resolvers.items():
            try:
                found = await resolver.resolve_lora(self.models[-1], name)
                if found is not None:
                    found = check_lora_request(found)
            except Exception:  # code of others: the request is told, and the other resolvers asked
                logger.exception("The LoRA resolver %r failed", title)
                failed = title
                continue
            if found is None:
                continue
            try:
                await self._add(LoRARequest(name, adapter_id(name), found.lora_path))
                return
            except RequestError as error:
                unusable = unusable or error
        if unusable is not None:
            text = f"The LoRA adapter '{name}' was found but could not be loaded: {unusable}"
            raise RequestError(text, parameter="model") from unusable
        if failed is not None:
            raise EngineError(
                f"The model `{name}` is not served here, and the LoRA resolver {failed!r}, which "
                "might know it, failed; the server's log says why."
            )


def adapter_id(name: str) -> int:
    """The id of an adapter that has a name only: the same in every API server."""
    digest = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=4).digest()
    # ids are positive
    return (int.from_bytes(digest, "big") & 0x7FFFFFFF) or 1


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
