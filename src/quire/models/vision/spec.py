"""Vision encoders as values: patches, their positions, transformer blocks, and the connector that
makes rows of a decoder's width. Free of torch.

Blocks are those of decoders (`models/spec.py`) whose attention is not causal: a patch sees the
patches of its frame, or of its window. Patches that a connector joins are neighbours in memory, so
that joining them is a reshape: a frame is a sequence of cells of `merge` by `merge` patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quire.models.spec import Activation, Block, Mlp, Norm

Sampling = Literal[
    "exact", "bilinear_corners", "bilinear", "bicubic", "bilinear_antialias", "bucket"
]


@dataclass(frozen=True, slots=True)
class PatchEmbedding:
    """The product that makes C values of a square of `size` by `size` pixels in `channels` colours,
    of `frames` frames that follow each other.

    `is_cut`: pictures come as vectors of patches; else as frames [channels, height, width].
    `is_kernel`: the weight is stored as that of a convolution. `in_cells`: patches that come cut
    are in the order of the tower; else row by row. `is_centered`: pixels from 0 to 1 become -1 to 1
    first.
    """

    size: int
    channels: int = 3
    frames: int = 1
    bias: bool = False
    is_cut: bool = False
    is_kernel: bool = True
    in_cells: bool = False
    is_centered: bool = False

    @property
    def inputs(self) -> int:
        """Values of a patch."""
        return self.channels * self.frames * self.size**2

    @property
    def kernel(self) -> tuple[int, ...]:
        """The axes of the weight after the first."""
        if not self.is_kernel:
            return (self.inputs,)
        frames = (self.frames,) if self.frames > 1 else ()
        return (self.channels, *frames, self.size, self.size)


@dataclass(frozen=True, slots=True)
class LearnedGrid:
    """A vector for each place of a grid with `side` rows and columns, added to the patch there.

    A frame of another size samples the grid: bilinear between the centres of the corner patches
    (bilinear_corners) or with its borders at those of the grid (bilinear, bicubic), bilinear over
    as many places as a patch covers (bilinear_antialias), or the place that a patch's corner is in
    (bucket); exact: there is no other size. is_square: stored with an axis for rows and one for
    columns.
    """

    side: int
    sampling: Sampling = "exact"
    is_square: bool = False


@dataclass(frozen=True, slots=True)
class LearnedAxes:
    """A vector for each of `length` columns and one for each of as many rows, both added."""

    length: int


@dataclass(frozen=True, slots=True)
class AxialRope:
    """Rotations of queries and keys by the row and by the column of a patch, plus `offset`, with
    half of the D / 2 angles for each.

    `frequencies`: those of a rotation of D / 2 values for both axes, one axis after the other
    (same) or each frequency for both in turn (shared), or every other one of a rotation of D values
    for each (dealt). `first`: the axis of the first half of the angles.
    `pairs`: value i with i + D / 2 (halves), with its neighbour (neighbours), or with i + D / 4
    in each half of the head (quarters).
    """

    theta: float
    frequencies: Literal["same", "shared", "dealt"] = "same"
    first: Literal["row", "column"] = "row"
    pairs: Literal["halves", "neighbours", "quarters"] = "halves"
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """A cell's patches become one row, one after the other."""


@dataclass(frozen=True, slots=True)
class AveragePool:
    """A cell's patches become their mean, times `scale`; in fp32 until the next step where
    `standardizes`: less a learned vector, times another.
    """

    scale: float = 1.0
    standardizes: bool = False


@dataclass(frozen=True, slots=True)
class ClassPool:
    """A frame's one row is that of its class token."""


@dataclass(frozen=True, slots=True)
class ProbePool:
    """A frame's one row: a learned vector's attention over `heads`, plus `mlp` of its `norm`."""

    heads: int
    norm: Norm
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class NormStep:
    """A norm of rows, and an activation of what it makes."""

    norm: Norm
    act: Activation | None = None


@dataclass(frozen=True, slots=True)
class Project:
    """A product of rows with `width` outputs, then `act`; if gated, act(gate) * up of two products.

    `cells`: the weight's inputs are stored as channels of a cell with so many patches, not as
    patches one after the other; `is_kernel`: as those of a convolution.
    """

    width: int
    bias: bool = True
    act: Activation | None = None
    gated: bool = False
    cells: int = 1
    is_kernel: bool = False


BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""The leaves of a product that is kept within bounds, after its weight; each is one number."""


def bounded_products(at: str, block: Block) -> list[str]:
    """The products of a block whose leaves' names begin with `at`."""
    assert isinstance(block.mlp, Mlp), "a dense part"
    inputs = ("mlp.gate", "mlp.up") if block.mlp.gated else ("mlp.up",)
    return [at + name for name in (*(f"attn.{part}" for part in "qkvo"), *inputs, "mlp.down")]


ConnectorStep = Merge | AveragePool | NormStep | Project


@dataclass(frozen=True, slots=True)
class TiledPicture:
    """The rows of a picture that was cut into tiles: those of the whole picture, made small, first;
    then those of the tiles as one grid without what was padded, each line with a learned vector at
    its end. The tiles are those of the best of the `sizes` (height, width).

    `most_tiles`: a grid with more patches than so many tiles is made smaller. `ends_single`: a
    picture of one tile gets the vector, too.
    """

    sizes: tuple[tuple[int, int], ...]
    most_tiles: int | None = None
    ends_single: bool = True


@dataclass(frozen=True, slots=True)
class VisionTower:
    """A vision encoder with C = `dim` and the connector after it; rows are as wide as its last
    product, or wider by that of each entry of `deepstack`.

    `merge`: a cell has so many rows and columns of patches. `image_size`: height and width of all
    frames in pixels; None: frames have sizes of their own. `class_token`: the place of a learned
    vector in each frame; connectors do not see it unless `keeps_class`. `embed_norm` is of what
    enters the first block. `layer_scale`: results of mixers and feed-forward parts are multiplied
    with learned vectors. `window`: patches see those of their window of so many cells in each
    direction, but in the blocks `whole_blocks` all of their frame; None: always all.

    The connector reads the residual streams after so many blocks as `outputs` says, next to each
    other; `final_norm` is of these. `pool`: a frame becomes one row before the connector, which is
    not for a decoder but the result of a prompt that is the picture alone. `deepstack`: after block
    i of a pair, steps of their own. `tiles`: how a picture's rows are arranged; None: one after the
    other. `leaf_scales`: that of decoders. `is_bounded`: inputs and results of the products in
    blocks stay within bounds of each product (`BOUNDS`).
    """

    dim: int
    patch: PatchEmbedding
    blocks: tuple[Block, ...]
    outputs: tuple[int, ...]
    connector: tuple[ConnectorStep, ...]
    merge: int = 1
    image_size: tuple[int, int] | None = None
    positions: LearnedGrid | LearnedAxes | None = None
    rope: AxialRope | None = None
    class_token: Literal["first", "last"] | None = None
    keeps_class: bool = False
    embed_norm: Norm | None = None
    norm_before_positions: bool = False
    final_norm: Norm | None = None
    layer_scale: bool = False
    window: int | None = None
    whole_blocks: tuple[int, ...] = ()
    deepstack: tuple[tuple[int, tuple[ConnectorStep, ...]], ...] = ()
    leaf_scales: tuple[tuple[str, float], ...] = ()
    is_bounded: bool = False
    tiles: TiledPicture | None = None
    pool: ClassPool | ProbePool | None = None

    @property
    def selected_width(self) -> int:
        """Values of a patch that the connector reads."""
        return self.dim * len(self.outputs)

    @property
    def width(self) -> int:
        """Values of a row of the result."""
        connectors = (self.connector, *(steps for _, steps in self.deepstack))
        return sum(width_after(steps, self.selected_width, self.merge) for steps in connectors)


def widths(
    steps: tuple[ConnectorStep, ...], width: int, merge: int
) -> Iterator[tuple[int, ConnectorStep, int]]:
    """Yield the number of each step, the step, and how many values the rows have that it reads."""
    for i, step in enumerate(steps):
        yield i, step, width
        if isinstance(step, Merge):
            width *= merge**2
        elif isinstance(step, Project):
            width = step.width


def width_after(steps: tuple[ConnectorStep, ...], width: int, merge: int) -> int:
    """Width of the rows after the steps."""
    for _, step, found in widths(steps, width, merge):
        width = found * merge**2 if isinstance(step, Merge) else found
        width = step.width if isinstance(step, Project) else width
    return width
