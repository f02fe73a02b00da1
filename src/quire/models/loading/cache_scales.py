"""Scales of keys and values in 8-bit floats that a quantised checkpoint brings: a number for the
keys of each layer, and one for the values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch

from quire.errors import CorruptCheckpoint
from quire.models.formats.storage import Storage
from quire.models.loading.load_formats import WeightFiles
from quire.ops.fp8 import FP8
from quire.ops.kv import LARGEST_NUMBER, FixedScales
from quire.ops.rounding import TINY

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r".*\b(?P<layer>layers\.\d+)\.(?:.*\.)?"
    r"(?:(?P<kind>[kqv]|kv|prob)_scale|(?P<of>[kqv])_proj\.output_scale)"
)


def is_cache_scale(name: str) -> bool:
    """Whether a tensor is such a scale, or one of queries or attention's probabilities."""
    return _NAME.fullmatch(name) is not None


def used_cache_scales(
    files: WeightFiles, storage: Storage | None, kv_dtype: torch.dtype
) -> dict[str, FixedScales]:
    """Scales that memory of `kv_dtype` is written with, by layer; logs where there are others.

    Raises CorruptCheckpoint for what is not a scale.
    """
    if storage is None:
        return {}
    names = [name for name in files.entries if is_cache_scale(name)]
    if not names and storage.cache is None:
        return {}
    has_many = any(n for name in names for n in files.entries[name].shape if n != 1)
    if kv_dtype is FP8 and storage.cache != "int" and not has_many:
        found = _by_layer(files, names)
        logger.info("The K/V cache has the checkpoint's scales in %d layers.", len(found))
        return found
    why = f"the K/V cache is in {str(kv_dtype).removeprefix('torch.')}"
    if kv_dtype in LARGEST_NUMBER:
        why += ", with a scale for each vector"
    logger.warning(
        "The checkpoint was made for keys and values in 8 bits; its scales for these are not used, "
        "because %s.",
        why,
    )
    return {}


def _by_layer(files: WeightFiles, names: list[str]) -> dict[str, FixedScales]:
    """Scales by layer; where a layer has one alone it is for keys and values."""
    of_keys: dict[str, float] = {}
    of_values: dict[str, float] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        assert match is not None, "names have been chosen by it"
        kind, layer = match["kind"] or match["of"], match["layer"]
        if kind in ("q", "prob"):
            continue
        scale = float(files.read(name).float())
        if not TINY < scale < 1 / TINY:
            raise CorruptCheckpoint(f"{name} is {scale:g}, which is not a scale.")
        for part, scales in (("k", of_keys), ("v", of_values)):
            if part in kind:
                scales[layer] = scale
    return _pairs(of_keys, of_values)


def _pairs(of_keys: Mapping[str, float], of_values: Mapping[str, float]) -> dict[str, FixedScales]:
    return {
        layer: (
            of_keys.get(layer, of_values.get(layer, 1.0)),
            of_values.get(layer, of_keys.get(layer, 1.0)),
        )
        for layer in sorted({*of_keys, *of_values})
    }
