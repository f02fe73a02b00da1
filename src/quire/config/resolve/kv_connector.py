"""Decides what brings K/V from elsewhere and sends it there, by `kv_transfer_config`."""

from __future__ import annotations

import msgspec

from quire.config.resolve.decisions import Decisions
from quire.config.resolve.mapping import refuse_files_of_plugin
from quire.errors import InvalidParameter, NotBuiltYet
from quire.models.layer_memory import KeyValues, RecurrentState
from quire.tiers.kv_transfer_config import NAME, kv_transfer_config, pulls


def decide_kv_connector(d: Decisions) -> None:
    """Fix `kv_connector`: None, or its settings. Raises InvalidParameter or NotBuiltYet."""
    given = d.args.kv_transfer_config
    config = kv_transfer_config(given)
    if config is None:
        d.decide("kv_connector", None, f"{NAME} names none")
        return
    _check_model(d, given)
    backend = d.value("distributed_executor_backend")
    if backend != "uni":
        if backend != "mp" or d.value("nnodes") > 1 or not pulls(config):
            hint = (
                "With several ranks, which are processes of one machine, K/V is exchanged by "
                "NixlConnector, or by a tier of type p2p. Leave it out."
            )
            raise NotBuiltYet(NAME, given, hint)
        sizes = d.value("tensor_parallel_size"), d.value("pipeline_parallel_size")
        config = msgspec.structs.replace(config, tp_size=sizes[0], pp_size=sizes[1])
    d.decide("kv_connector", config, f"{NAME}: {config.kv_connector}, as {config.kv_role}")


def _check_model(d: Decisions, given: object) -> None:
    memories = d.model.pool_memories
    if any(isinstance(memory, RecurrentState) for memory in memories):
        hint = f"{d.model.architecture} has layers with a recurrent state, which stays in the pool."
        raise NotBuiltYet(NAME, given, f"{hint} Leave it out.")
    if any(isinstance(memory, KeyValues) and memory.source is not None for memory in memories):
        hint = f"{d.model.architecture} attends to a second content, whose K/V stays in the pool."
        raise NotBuiltYet(NAME, given, f"{hint} Leave it out.")
    refuse_files_of_plugin(d, NAME, given, "Leave it out.")
    if all(memory is None for memory in memories):
        allowed = "the model keeps no keys and values of a request"
        raise InvalidParameter(NAME, given, allowed, "Leave it out.")
