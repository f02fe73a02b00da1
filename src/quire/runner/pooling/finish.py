"""The part of pooling on the host: cut, normalise, scale, activate and compare, request by
request.

Each row is computed by itself, in fp64, and rounded once, so that its bits do not depend on the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from quire.models.pooling.spec import Classifier, PoolerSpec, Similarity, TermWeights
from quire.params import PoolingParams
from quire.params.pooling import VECTOR_TASKS, QueryVectors

Array = np.ndarray[Any, Any]

_LEAST_NORM = 1e-12


def finished(values: Array, spec: PoolerSpec, params: PoolingParams) -> Array:
    """values [D] or [n, D] fp32, as the head's layers give them -> fp32 of the requested form."""
    activates = spec.activates if params.use_activation is None else params.use_activation
    if params.task in VECTOR_TASKS:
        if spec.terms is not None:
            values = _term_weights(values, spec.terms)
        size = spec.dimensions if params.dimensions is None else params.dimensions
        cut = values if size is None else values[..., :size]
        vectors = _normalised(cut) if activates else cut.copy()
        query = params.compared_with
        return vectors if query is None else _score(query, vectors, spec.similarity)
    assert spec.classifier is not None, "the task needs a classifier"
    return _activated(values, spec.classifier, activates)


def _score(query: QueryVectors, vectors: Array, similarity: Similarity) -> Array:
    """Similarity of a prompt's vectors to those of a query -> [1]."""
    asked = np.frombuffer(query.data, dtype=np.float32).reshape(query.shape)
    if vectors.ndim > 1:
        return np.array([largest_similarities(asked, vectors)], dtype=np.float32)
    compare = _SIMILARITIES[similarity]
    score = compare(asked.astype(np.float64), vectors.astype(np.float64))
    return np.array([score], dtype=np.float32)


def _dot(a: Array, b: Array) -> float:
    return float(np.add.reduce(a * b))


def _cosine(a: Array, b: Array) -> float:
    """0 where one of them is 0."""
    return _dot(a, b) / max(np.sqrt(_dot(a, a)) * np.sqrt(_dot(b, b)), 1e-16)


_SIMILARITIES: Mapping[Similarity, Callable[[Array, Array], float]] = MappingProxyType(
    {
        "cosine": _cosine,
        "dot": _dot,
        "euclidean": lambda a, b: -np.sqrt(_dot(a - b, a - b)),
        "manhattan": lambda a, b: -np.add.reduce(np.abs(a - b)),
    }
)


def largest_similarities(query: Array, document: Array) -> float:
    """The sum, over the tokens of a query [m, D], of the largest dot product with a token of the
    document [n, D] (MaxSim, Khattab & Zaharia 2020); 0 of no tokens.
    """
    if not len(document):
        return 0.0
    products = query @ document.T
    return float(np.add.reduce(products.max(axis=1)))


def _term_weights(scores: Array, terms: TermWeights) -> Array:
    """log(1 + relu(scores)) of the largest scores; sums are of weights already."""
    if terms.pooling == "sum":
        return scores
    wide = np.log1p(np.maximum(scores.astype(np.float64), 0.0))
    return (np.log1p(wide) if terms.is_damped else wide).astype(np.float32)


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
