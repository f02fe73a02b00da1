"""Decides which hidden states are written to files: `speculative_config` with the method
`extract_hidden_states` names the layers, `kv_transfer_config` the folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from quire.config.hidden_states import HiddenStatesPlan
from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter, NotBuiltYet
from quire.tiers.kv_transfer_config import HIDDEN_STATES as _CONNECTOR
from quire.tiers.kv_transfer_config import NAME as _NAME

METHOD = "extract_hidden_states"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_LAYERS_AT = f"speculative_config['draft_model_config']['hf_config'][{_LAYERS!r}]"
_NEUTRAL: dict[str, tuple[object, str]] = {
    "allow_custom_save_path": (False, "The engine names the files."),
    "use_synchronization_lock": (False, "A file is complete when its answer comes."),
}
"""Keys of the connector that change nothing here, at the value that is taken."""


def decide_hidden_states(d: Decisions) -> None:
    """Fix `hidden_states`: None, or a plan. Raises InvalidParameter or NotBuiltYet."""
    wish, given = d.model.drafts, d.args.kv_transfer_config
    if wish is None or wish.config.method != METHOD:
        if given and given.get("kv_connector") == _CONNECTOR:
            hint = f"Hidden states stay in their engine; {_CONNECTOR} goes with {METHOD}."
            raise NotBuiltYet(_NAME, given, hint)
        d.decide("hidden_states", None, "speculative_config: no hidden states are asked for")
        return
    if d.value("model_impl") == "transformers" or d.value("pooler") is not None:
        allowed = "the model is a decoder of Quire's own that generates and does not pool"
        raise InvalidParameter("speculative_config['method']", METHOD, allowed)
    folder = _folder(given)
    plan = HiddenStatesPlan(_layers(wish.config.draft_model_config, d.model.num_layers), folder)
    d.decide("hidden_states", plan, f"speculative_config: {METHOD}")


def _folder(given: Mapping[str, Any] | None) -> str:
    """The folder for files; the keys of the connector are taken away one by one."""
    left = dict(given or {})
    name = left.pop("kv_connector", None)
    if name != _CONNECTOR:
        allowed = f"kv_connector is {_CONNECTOR}, which {METHOD} needs"
        raise InvalidParameter(_NAME, given, allowed)
    role = left.pop("kv_role", "kv_producer")
    if role not in ("kv_producer", "kv_both"):
        raise InvalidParameter(f"{_NAME}['kv_role']", role, "kv_producer: states are only written")
    extra = left.pop("kv_connector_extra_config", None) or {}
    if not isinstance(extra, Mapping):
        raise InvalidParameter(f"{_NAME}['kv_connector_extra_config']", extra, "a dict")
    own = dict(extra)
    folder = own.pop("shared_storage_path", None)
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        allowed = "the folder that files go to, in kv_connector_extra_config"
        raise InvalidParameter(f"{_NAME}['shared_storage_path']", folder, allowed)
    for key, (neutral, hint) in _NEUTRAL.items():
        value = own.pop(key, neutral)
        if value is not neutral:
            raise NotBuiltYet(f"{_NAME}[{key!r}]", value, hint)
    # what is left is unknown, and would be ignored
    for key, value in [*left.items(), *own.items()]:
        raise NotBuiltYet(f"{_NAME}[{key!r}]", value, "Leave it out.")
    return os.path.abspath(folder)


def _layers(config: Mapping[str, Any] | None, depth: int) -> tuple[int, ...]:
    inner = (config or {}).get("hf_config")
    found = inner.get(_LAYERS) if isinstance(inner, Mapping) else None
    is_list = isinstance(found, list | tuple) and all(type(layer) is int for layer in found)
    if not is_list or not found or len({*found} & {*range(depth + 1)}) < len(found):
        allowed = f"different layers, 0 to {depth}"
        raise InvalidParameter(_LAYERS_AT, found, allowed)
    return tuple(sorted(found))
