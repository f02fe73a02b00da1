"""Reads PEFT's `adapter_config.json`; a key is understood, of no effect, or refused. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import AdapterNotFound, BadAdapter, LoadError
from quire.models.adapters.name_patterns import NamePatterns, name_patterns
from quire.text.json_files import read_json
from quire.text.model_files import has_file

CONFIG = "adapter_config.json"

_UNDERSTOOD = (
    *("peft_type", "peft_version", "bias", "r", "lora_alpha", "use_rslora", "rank_pattern"),
    *("alpha_pattern", "target_parameters", "init_lora_weights", "modules_to_save"),
    "ensure_weight_tying",
)
_OF_TRAINING = (
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size"),
)
"""Keys that say how an adapter was made. What it changes is said by the names of its tensors."""
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the weights of the model as they are."""
_REASONS = {
    "use_dora": "DoRA scales the model's own weights as well",
    "lora_bias": "an adapter with biases is not supported",
    "trainable_token_indices": "rows of an embedding that are trained alone are not supported; "
    "train with embed_tokens among target_modules",
    "layer_replication": "the model would have other layers",
    "alora_invocation_tokens": "an adapter that begins within a prompt is not supported",
}
_MOST_RANK = 1 << 16


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The config of a LoRA adapter, as far as it is about tensors.

    `target_parameters`: parameters, by the ends of their names, that were adapted without being
    modules' weights. `keeps_tied`: of a tied model, embedding and head have the same adapter, and
    both are in the file. `version` of PEFT, () where the file has none. Modules have the names that
    they had in the model that was trained.
    """

    rank: int
    alpha: float
    is_rank_stabilised: bool
    keeps_tied: bool
    ranks: NamePatterns
    alphas: NamePatterns
    target_parameters: tuple[str, ...]
    saved_modules: tuple[str, ...]
    version: tuple[int, ...]

    def rank_of(self, module: str) -> int:
        return int(self.ranks.value_of(module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Factor of B @ A of a module."""
        rank, alpha = self.rank_of(module), self.alphas.value_of(module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read a folder's adapter_config.json. Raises AdapterNotFound without one, BadAdapter for keys
    and values that are not supported, all of them in one sentence each.
    """
    path = folder / CONFIG
    try:
        if not has_file(path):
            raise AdapterNotFound(f"There is no LoRA adapter in {folder}: it has no {CONFIG}.")
        config = read_json(path)
    except LoadError as error:
        raise BadAdapter(str(error)) from error
    if problems := list(_problems(config)):
        raise BadAdapter(f"{CONFIG}: {'; '.join(problems)}.")
    return PeftConfig(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        is_rank_stabilised=bool(config.get("use_rslora")),
        keeps_tied=bool(config.get("ensure_weight_tying")),
        ranks=name_patterns("rank_pattern", config.get("rank_pattern") or {}),
        alphas=name_patterns("alpha_pattern", config.get("alpha_pattern") or {}),
        target_parameters=tuple(config.get("target_parameters") or ()),
        saved_modules=tuple(config.get("modules_to_save") or ()),
        version=_version(config.get("peft_version")),
    )


def _problems(config: Mapping[str, Any]) -> list[str]:
    """Problems of a config, one clause each."""
    found = []
    if config.get("peft_type") != "LORA":
        found.append(f"peft_type is {_shown(config.get('peft_type'))}, and only LORA is supported")
    if not _is_rank(config.get("r")):
        found.append(f"r must be an integer from 1 to {_MOST_RANK}, not {_shown(config.get('r'))}")
    if not _is_finite(config.get("lora_alpha")):
        found.append(f"lora_alpha must be a number, not {_shown(config.get('lora_alpha'))}")
    if config.get("bias", "none") != "none":
        found.append(f"bias is {_shown(config['bias'])}: adapters that change biases are refused")
    if not _is_one_of(config.get("init_lora_weights"), _HARMLESS_STARTS):
        found.append(
            f"init_lora_weights is {_shown(config['init_lora_weights'])}, which changes the "
            "model's own weights; save with path_initial_model_for_weight_conversion"
        )
    for key, is_valid in (("rank_pattern", _is_rank), ("alpha_pattern", _is_finite)):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(is_valid, patterns.values())):
            found.append(f"{key} must map patterns of names to numbers")
    for key in ("target_parameters", "modules_to_save"):
        names = config.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            found.append(f"{key} must be a list of names")
    for key in ("use_rslora", "ensure_weight_tying"):
        if not _is_one_of(config.get(key), (True, False, None)):
            found.append(f"{key} must be true or false, not {_shown(config[key])}")
    known = {*_UNDERSTOOD, *_OF_TRAINING}
    for key, value in config.items():
        if key not in known and not _is_one_of(value, (None, False, {}, [], "")):
            reason = _REASONS.get(key, "this key is not supported")
            found.append(f"{_shown(key)[1:-1]}={_shown(value)}: {reason}")
    return found


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST_RANK


def _is_finite(value: object) -> bool:
    if type(value) not in (int, float):
        return False
    assert isinstance(value, int | float)
    return abs(value) < 1e30  # false for NaN as well


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Whether it is one of them and of its type: 0 is not False here."""
    return any(type(value) is type(other) and value == other for other in allowed)


def _shown(value: object) -> str:
    return repr(value)[:80]


def _version(value: object) -> tuple[int, ...]:
    """The first two numbers of a version, () for anything else."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", value) if isinstance(value, str) else None
    return () if found is None else (int(found[1]), int(found[2]))
