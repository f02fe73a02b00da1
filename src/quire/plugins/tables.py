"""The tables of what needs torch, here so that a front end fills them without it. Values are names,
"module:attribute", or what they name.

Their own entries are with those who use them; the names of these are reserved here, and a test
compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import PluginError
from quire.plugins.name_table import NameTable


def _check_named(value: object) -> None:
    if not (isinstance(value, str) and ":" in value) and not callable(value):
        raise PluginError(
            f"What is registered must be callable or its name as 'module:name', and is {value!r}."
        )


LOAD_FORMATS: NameTable[str | Callable[..., Any]] = NameTable(
    "load format",
    reserved=(
        *("auto", "hf", "mmap", "safetensors", "pt", "mistral"),
        *("runai_streamer", "sharded_state", "dummy"),
    ),
    check=_check_named,
    home="quire.plugins.tables:LOAD_FORMATS",
)
"""(folder, decoder) -> `WeightFiles` (quire.models.loading.load_formats)."""

OP_PROVIDERS: NameTable[str | Callable[..., Any]] = NameTable(
    "provider of ops",
    reserved=("cpu", "fa3", "torch", "triton"),
    check=_check_named,
    home="quire.plugins.tables:OP_PROVIDERS",
)
"""(facts) -> the `Implementation`s of a provider (quire.ops.registry). It is asked before those of
Quire, on every device; each implementation says what it supports.
"""

WEIGHT_TRANSFERS: NameTable[str | type] = NameTable(
    "backend of weight transfers",
    reserved=("nccl", "ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress"),
    check=_check_named,
    home="quire.plugins.tables:WEIGHT_TRANSFERS",
)
"""Classes below `WeightTransferEngine` (quire.executor.weight_transfer.engines)."""

EC_CONNECTORS: NameTable[str | type] = NameTable(
    "connector of encoder caches",
    reserved=("ECExampleConnector",),
    check=_check_named,
    home="quire.plugins.tables:EC_CONNECTORS",
)
"""Classes below `ECConnectorBase` (quire.distributed.ec_connector)."""

KV_CONNECTORS: NameTable[str | type] = NameTable(
    "connector of K/V",
    reserved=(
        *("OffloadingConnector", "SimpleCPUOffloadConnector", "MultiConnector"),
        *("ExampleConnector", "SharedStorageConnector", "ExampleHiddenStatesConnector"),
        *("NixlConnector", "NixlPullConnector", "p2p"),
    ),
    check=_check_named,
    home="quire.plugins.tables:KV_CONNECTORS",
)
"""Classes below `KVConnectorBase_V1` (quire.distributed.kv_connector.base)."""


def home_of(entry: str | type) -> tuple[str, str]:
    """The module and the name of the class of an entry."""
    if isinstance(entry, type):
        return entry.__module__, entry.__qualname__
    module, _, name = entry.partition(":")
    return module, name
