"""This process's place among those of a launcher like torchrun, by its variables."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quire.errors import InvalidParameter

_OPTION, _VALUE = "distributed_executor_backend", "external_launcher"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LaunchedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Process number `rank` of `world_size`, on its host number `local_rank` of
    `local_world_size`. All meet at a store at `address`:`port`, which the launcher itself has
    opened, or else process 0 opens.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    launcher_has_store: bool = False


def launched_process(environ: Mapping[str, str]) -> LaunchedProcess:
    """Read the variables; one process needs none. Raises InvalidParameter for bad ones."""
    size = _number(environ, "WORLD_SIZE", 1, least=1)
    if size > 1:
        for name in _NEEDED:
            if name not in environ:
                _refuse(f"{name} is not set")
    rank = _number(environ, "RANK", 0)
    if rank >= size:
        _refuse(f"RANK is {rank} of WORLD_SIZE={size}")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size, least=1)
    local_rank = _number(environ, "LOCAL_RANK", rank % local_size)
    if local_rank >= local_size:
        _refuse(f"LOCAL_RANK is {local_rank} of LOCAL_WORLD_SIZE={local_size}")
    return LaunchedProcess(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environ, "MASTER_PORT", 29500),
        launcher_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        _refuse(f"{name} is {text!r}")
    return int(text)


def _refuse(what: str) -> None:
    raise InvalidParameter(
        _OPTION, _VALUE, f"the environment is not that of a launcher: {what}",
        f"Start the program with torchrun, or set {', '.join(_NEEDED)}.",
    )  # fmt: skip
