"""Settings for the events of the KV cache: the fields of `kv_events_config`, checked."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.errors import InvalidParameter, NotBuiltYet

NAME = "kv_events_config"
_PUBLISHERS = ("zmq", "null")
_ENDPOINT = re.compile(r"(tcp://.+:(?P<port>\d+)|(ipc|inproc)://.+)")


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of events of the KV cache. `buffer_steps`: the last batches that can be
    asked for again at `replay_endpoint`; `hwm`: batches that may wait for one subscriber;
    `max_queue_size`: batches that may wait to be sent.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class KVEventsPlan(msgspec.Struct, frozen=True):
    """The publication of events by the `rank`-th core, in whose place `num_deaths` have died."""

    config: KVEventsConfig
    rank: int = 0
    num_deaths: int = 0

    @property
    def endpoint(self) -> str:
        """The endpoint at which this core publishes."""
        return _of_rank(self.config.endpoint, self.rank)

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint at which this core is asked for batches again; None: there is none."""
        given = self.config.replay_endpoint
        return None if given is None else _of_rank(given, self.rank)

    @property
    def first(self) -> int:
        """The number of the core's first batch: greater than all of a core that has died."""
        return self.num_deaths << 32


def kv_events_plan(given: dict[str, Any] | None) -> KVEventsPlan | None:
    """Check `kv_events_config`; None: nothing is published.

    Raises InvalidParameter or NotBuiltYet.
    """
    options = dict(given or {})
    fields = KVEventsConfig.__struct_fields__
    for name in options:
        if name not in fields:
            allowed = f"there is no such field; its fields are {', '.join(fields)}"
            raise InvalidParameter(f"{NAME}[{name!r}]", options[name], allowed)
    try:
        config = msgspec.convert(options, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise InvalidParameter(NAME, given, str(error)) from None
    if config.publisher is not None and config.publisher not in _PUBLISHERS:
        raise NotBuiltYet(f"{NAME}['publisher']", config.publisher, "Use 'zmq' or 'null'.")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if options.get(name, 1) < 1:
            raise InvalidParameter(f"{NAME}[{name!r}]", options[name], "a number of at least 1")
    _check_endpoint("endpoint", config.endpoint)
    if config.replay_endpoint is not None:
        _check_endpoint("replay_endpoint", config.replay_endpoint)
        if config.replay_endpoint == config.endpoint:
            allowed = "it is another one than the endpoint"
            raise InvalidParameter(f"{NAME}['replay_endpoint']", config.replay_endpoint, allowed)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    return KVEventsPlan(config)


def _check_endpoint(name: str, endpoint: str) -> None:
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None:
        allowed = "tcp://host:port, ipc://path or inproc://name"
        raise InvalidParameter(f"{NAME}[{name!r}]", endpoint, allowed)
    if found["port"] is not None and not 0 < int(found["port"]) < 65536:
        if not int(found["port"]):
            hint = "Ports are not chosen: give one, which data-parallel ranks count up from."
            raise NotBuiltYet(f"{NAME}[{name!r}]", endpoint, hint)
        raise InvalidParameter(f"{NAME}[{name!r}]", endpoint, "a port is at most 65535")


def _of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a core: the port is `rank` higher, another name has it at its end."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
