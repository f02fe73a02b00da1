"""The transformers library: whether it is here, and a model's class and configuration in it.

A model folder's own Python code is never run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire.errors import LoadError, UnsupportedArchitecture, UnsupportedConfigValue
from quire.models.families import added_class
from quire.models.formats import KEYS, read_storage
from quire.models.formats.storage import Storage

_TOKEN_KINDS = ("full_attention", "sliding_attention")
"""Entries of `layer_types` whose layers keep nothing but keys and values."""
WITHOUT_MEMORY = ("mlp",)
"""Entries whose layers keep nothing."""
IN_A_CACHE = ("indexed_attention", "conv", "linear_attention", "hybrid", "hybrid_sliding")
"""Entries whose layers keep a key for choosing tokens, or a state, in a cache of transformers."""
_STEP_DEPENDENT = ("dynamic", "longrope", "su")
"""Types of rotary embedding that transformers scales by the longest sequence of a step."""


def is_installed() -> bool:
    """Whether transformers can be imported; does not import it."""
    return importlib.util.find_spec("transformers") is not None


def require() -> None:
    """Raise UnsupportedArchitecture where transformers is not installed."""
    if not is_installed():
        raise UnsupportedArchitecture(
            "model_impl='transformers' needs the transformers library, which is not installed. "
            "Install it with: pip install 'quire[transformers]'."
        )


def knows(config: Mapping[str, Any]) -> bool:
    """Whether transformers has a causal language model of config.json's first architecture."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = (config.get("architectures") or [None])[0]
    return named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def model_class(config: Mapping[str, Any]) -> Any:
    """The model's class, or the registered one. Raises UnsupportedArchitecture without any."""
    import transformers

    require()
    name = (config.get("architectures") or [None])[0]
    found: Any = added_class(name)
    if found is None and (not isinstance(name, str) or not knows(config)):
        code = " The model's own Python code (auto_map) is never executed by Quire."
        raise UnsupportedArchitecture(
            f"transformers {transformers.__version__} has no causal language model {name!r}."
            + (code if config.get("auto_map") else "")
        )
    return found or getattr(transformers, str(name))


def library_config(config: Mapping[str, Any]) -> Any:
    """transformers' configuration object for a config.json, without what it says of codes
    (codes.py). Raises UnsupportedArchitecture for what cannot run, LoadError for values that
    transformers rejects.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    added = added_class((config.get("architectures") or [None])[0])
    if added is None and (not isinstance(kind, str) or kind not in CONFIG_MAPPING):
        raise UnsupportedArchitecture(f"config.json: transformers has no model_type {kind!r}.")
    plain = {key: value for key, value in config.items() if key not in KEYS}
    try:
        read: Any = CONFIG_MAPPING[str(kind)] if added is None else added.config_class
        made = read.from_dict(plain)
    except Exception as error:  # each class checks its values in its own way
        line = " ".join(str(error).split()) or type(error).__name__
        raise LoadError(f"config.json: transformers rejects it: {line}") from error
    _check(str(config["architectures"][0]), made)
    return made


def renamings(config: Mapping[str, Any]) -> Callable[[str], str]:
    """Make the function of names in files to transformers', where both are one tensor."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    with torch.device("meta"):
        model = model_class(config)._from_config(library_config(config))
    found = get_model_conversion_mapping(model)
    renaming = [each for each in found if isinstance(each, WeightRenaming)]
    return lambda name: str(apply_renamings(name, renaming))


def foreign_storage(config: Mapping[str, Any]) -> Storage | None:
    """The storage of weights in the checkpoint of a model of transformers; None: as they are.

    Raises UnsupportedConfigValue for formats in which more than linear layers are stored in codes,
    and what `read_storage` raises.
    """
    storage = read_storage(config)
    if storage is None:
        return None
    if storage.experts is not None or storage.widened_because is not None:
        key = next(key for key in KEYS if config.get(key))
        raise UnsupportedConfigValue(
            f"config.json: {key}: checkpoints in {storage.method} do not run through transformers, "
            "because they store more than linear layers in codes. Use a checkpoint in bfloat16, or "
            "one in fp8, gptq, awq or compressed-tensors."
        )
    return storage


def refusal(
    architecture: str, why: str, kind: type[UnsupportedArchitecture] = UnsupportedArchitecture
) -> UnsupportedArchitecture:
    """The error for a model that cannot run through transformers."""
    return kind(
        f"{architecture} cannot run through transformers in Quire: {why}. Only models with causal "
        "attention can, whose layers keep keys and values, and states in transformers' own cache."
    )


class OwnAttention(UnsupportedArchitecture):
    """Attention is not called as `attention.py` needs it; a cache of transformers' own may do."""


class MoreInCache(UnsupportedArchitecture):
    """A cache of transformers' own keeps what is not known here."""


def layer_kinds(text: Any) -> tuple[str, ...]:
    """The types of a configuration's layers; empty where all are alike."""
    return tuple(getattr(text, "layer_types", None) or ())


def use_attention(model: Any, name: str) -> None:
    """Have all modules look up the attention function of this name."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@contextmanager
def silenced() -> Iterator[None]:
    """Keep transformers' progress bars and warnings back: what they say is checked here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check(architecture: str, config: Any) -> None:
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise refusal(architecture, "it has an encoder")
    others = sorted({*layer_kinds(text)}.difference(_TOKEN_KINDS, WITHOUT_MEMORY, IN_A_CACHE))
    if others:
        raise refusal(architecture, f"layers of the type {', '.join(others)} keep something else")
    for kind in _rope_types(getattr(text, "rope_parameters", None)):
        if kind in _STEP_DEPENDENT:
            raise refusal(
                architecture,
                f"its rotary embedding (rope_type {kind!r}) depends on the longest sequence that "
                "is computed at the same time",
            )


def _rope_types(parameters: object) -> Iterator[object]:
    """The types in rope_parameters, flat or one object per kind of layer."""
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rope_types(value)
