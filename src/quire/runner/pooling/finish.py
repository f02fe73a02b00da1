"""What is left of pooling on the host: cut, normalise, scale and activate, request by request.

Each row is computed by itself, in fp64, and rounded once, so that its bits do not depend on the
others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.models.pooling.spec import Classifier, PoolerSpec
from quire.params import PoolingParams

Array = np.ndarray[Any, Any]

_LEAST_NORM = 1e-12


def finished(values: Array, spec: PoolerSpec, params: PoolingParams) -> Array:
    """values [D] or [n, D] fp32, as the head's layers give them -> fp32 of the requested form."""
    activates = spec.activates if params.use_activation is None else params.use_activation
    if params.task in ("embed", "token_embed"):
        size = spec.dimensions if params.dimensions is None else params.dimensions
        vectors = values if size is None else values[..., :size]
        return _normalised(vectors) if activates else vectors.copy()
    assert spec.classifier is not None, "the task needs a classifier"
    return _activated(values, spec.classifier, activates)


def _normalised(vectors: Array) -> Array:
    """vectors / max(|vector|, 1e-12)."""
    wide = vectors.astype(np.float64)
    norms = np.sqrt(np.add.reduce(wide * wide, axis=-1, keepdims=True))
    return (wide / np.maximum(norms, _LEAST_NORM)).astype(np.float32)


def _activated(scores: Array, c: Classifier, activates: bool) -> Array:
    wide = (scores.astype(np.float64) - c.mean) / c.deviation
    if activates and c.activation == "sigmoid":
        wide = np.exp(-np.logaddexp(0.0, -wide))
    elif activates and c.activation == "softmax":
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
        wide = powers / np.add.reduce(powers, axis=-1, keepdims=True)
    return wide.astype(np.float32)
