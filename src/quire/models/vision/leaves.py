"""The parameters of a vision encoder: name and shape, in load order. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.models.parameters import (
    Parameter,
    linear_leaves,
    norm_leaves,
    parts_of_block,
    scaled,
)
from quire.models.vision.spec import (
    BOUNDS,
    AveragePool,
    ConnectorStep,
    LearnedAxes,
    LearnedGrid,
    NormStep,
    ProbePool,
    Project,
    VisionTower,
    bounded_products,
    widths,
)


def vision_leaves(tower: VisionTower) -> dict[str, Parameter]:
    """Every leaf of the tower and its connectors by canonical name, in load order."""
    return {leaf.name: leaf for leaf in _leaves(tower)}


def _leaves(t: VisionTower) -> Iterator[Parameter]:
    yield Parameter("patch.weight", (t.dim, *t.patch.kernel), "replicated", "matrix")
    if t.patch.bias:
        yield _vector("patch.bias", t.dim)
    if t.class_token is not None:
        yield _vector("class_token", t.dim)
    if isinstance(t.positions, LearnedGrid):
        side = t.positions.side
        rows = (side, side) if t.positions.is_square else (side**2 + (t.class_token is not None),)
        yield Parameter("positions.weight", (*rows, t.dim), "replicated", "position")
    elif isinstance(t.positions, LearnedAxes):
        shape = (2, t.positions.length, t.dim)
        yield Parameter("positions.weight", shape, "replicated", "position")
    if t.embed_norm is not None:
        yield from norm_leaves("embed_norm", t.embed_norm, t.dim)
    for i, block in enumerate(t.blocks):
        at = f"layers.{i}."
        if t.is_bounded:
            for name in bounded_products(at, block):
                yield from (_vector(f"{name}.{b}", 1) for b in BOUNDS)
        yield from (scaled(leaf, t.leaf_scales) for leaf in parts_of_block(at, block, t.dim))
        if t.layer_scale:
            yield _vector(at + "attn_scale", t.dim, "norm")
            yield _vector(at + "mlp_scale", t.dim, "norm")
    if t.final_norm is not None:
        yield from norm_leaves("norm", t.final_norm, t.dim)
    if isinstance(t.pool, ProbePool):
        yield from (scaled(leaf, t.leaf_scales) for leaf in _probe(t.pool, t.selected_width))
    yield from _steps("connector", t.connector, t)
    for i, (_, steps) in enumerate(t.deepstack):
        yield from _steps(f"deepstack.{i}", steps, t)
    if t.tiles is not None:
        yield _vector("newline", t.width)


def _steps(at: str, steps: Sequence[ConnectorStep], t: VisionTower) -> Iterator[Parameter]:
    for i, step, width in widths(tuple(steps), t.selected_width, t.merge):
        if isinstance(step, NormStep):
            yield from norm_leaves(f"{at}.{i}", step.norm, width)
        elif isinstance(step, AveragePool) and step.standardizes:
            yield _vector(f"{at}.{i}.shift", width)
            yield _vector(f"{at}.{i}.factor", width, "norm")
        elif isinstance(step, Project):
            for part in (".gate", ".up") if step.gated else ("",):
                yield from _product(f"{at}.{i}{part}", step, width, t.merge)


def _probe(p: ProbePool, width: int) -> Iterator[Parameter]:
    yield Parameter("pool.probe", (1, 1, width), "replicated", "position")
    for part in "qkvo":
        yield from linear_leaves(f"pool.{part}", width, width, "replicated", True)
    yield from norm_leaves("pool.norm", p.norm, width)
    yield from linear_leaves("pool.mlp.up", p.mlp.width, width, "replicated", p.mlp.bias)
    yield from linear_leaves("pool.mlp.down", width, p.mlp.width, "replicated", p.mlp.bias)


def _product(at: str, p: Project, inputs: int, merge: int) -> Iterator[Parameter]:
    weight, *bias = linear_leaves(at, p.width, inputs, "replicated", p.bias)
    if p.is_kernel:
        shape = (p.width, inputs // merge**2, merge, merge)
        weight = Parameter(weight.name, shape, "replicated", "matrix")
    yield weight
    yield from bias


def _vector(name: str, size: int, kind: str = "bias") -> Parameter:
    return Parameter(name, (size,), "replicated", "norm" if kind == "norm" else "bias")
