"""The vision encoder, built from a spec: pictures in, rows for a decoder out.

Branches on the spec are taken while the parts are built. A picture's rows depend on nothing but the
picture: frames are embedded and attended to one by one, whatever else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.models.loading.model_parts import tensors_within
from quire.models.maker import Maker
from quire.models.spec import Attention
from quire.models.vision.blocks import VisionBlock, make_block
from quire.models.vision.bounded import BoundedMaker
from quire.models.vision.connector import RowFunction, make_connector
from quire.models.vision.layout import PatchLayout, lay_out
from quire.models.vision.pictures import Picture, frames_of, vectors_of
from quire.models.vision.pool import make_probe_attention
from quire.models.vision.positions import axial_table, quarters_to_halves, sampled_grid
from quire.models.vision.spec import LearnedAxes, LearnedGrid, ProbePool, VisionTower
from quire.models.vision.tiles import arranged
from quire.ops import AttentionPlan, PromptBatch


@dataclass(frozen=True, slots=True)
class _Places:
    """A step's patches and what else is in their frames: `layout`, where the patches are among
    the tokens, where class tokens are, and the frames' lengths.
    """

    layout: PatchLayout
    patches: Tensor
    classes: Tensor
    lengths: list[int]


class VisionEncoder:
    """A tower with its weights and connectors."""

    def __init__(self, spec: VisionTower, make: Maker) -> None:
        """Take every leaf of `spec` from the maker, in load order."""
        self.spec, self.ops, self.dtype = spec, make.ops, make.dtype
        self.device = make.device
        self.files_name: str | None = None
        """A name of the files that the weights are from, where somebody has given them one."""
        self._patch = make.linear("patch", "patch", change=_flat, is_adaptable=False)
        has_class = spec.class_token is not None
        self._class = make.tensor("class_token") if has_class else None
        self._table = make.tensor("positions.weight") if spec.positions is not None else None
        if isinstance(spec.positions, LearnedGrid) and spec.positions.is_square:
            assert self._table is not None
            self._table = self._table.flatten(0, 1)
        norm = None if spec.embed_norm is None else make.norm("embed_norm", spec.embed_norm)
        self._embed_norm = norm
        is_in_quarters = spec.rope is not None and spec.rope.pairs == "quarters"
        # rows of weights are put in order once, so that the rotation's pairs are half a head apart,
        # as its op has them
        turn = quarters_to_halves if is_in_quarters else None
        self._blocks: list[VisionBlock] = [
            make_block(
                BoundedMaker(make, f"layers.{i}.", block) if spec.is_bounded else make,
                f"layers.{i}.",
                block,
                is_scaled=spec.layer_scale,
                turn=turn,
            )
            for i, block in enumerate(spec.blocks)
        ]
        self._norm = None if spec.final_norm is None else make.norm("norm", spec.final_norm)
        probe = spec.pool if isinstance(spec.pool, ProbePool) else None
        self._pool = None if probe is None else make_probe_attention(make, probe)
        connect = partial(make_connector, make, width=spec.selected_width, merge=spec.merge)
        self._connector: RowFunction = connect("connector", spec.connector)
        self._deepstack: dict[int, RowFunction] = {
            layer: connect(f"deepstack.{i}", steps)
            for i, (layer, steps) in enumerate(spec.deepstack)
        }
        self._newline = make.tensor("newline") if spec.tiles is not None else None
        self._parts = make.parts

    def weight_tensors(self) -> Iterator[Tensor]:
        for _, part in self._parts:
            yield from tensors_within(part)

    def release_weights(self) -> None:
        for name in [name for name in vars(self) if name.startswith("_")]:
            delattr(self, name)

    def take_weights(self, other: VisionEncoder) -> None:
        assert self.spec == other.spec, "weights of another encoder"
        vars(self).update(vars(other))

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The rows [n, width] of each picture, in the order of its placeholders."""
        frames = [frames_of(picture, self.spec.patch) for picture in pictures]
        flat = [frame for of_picture in frames for frame in of_picture]
        if not flat:
            return []
        layout = lay_out(flat, self.spec.merge, self.spec.window)
        rows = self._run(self._embedded(pictures, layout), layout)
        counts = [sum(self._rows_of(frame) for frame in some) for some in frames]
        parts = list(rows.split(counts))
        if self.spec.tiles is None:
            return parts
        assert self._newline is not None
        return [
            self._arranged(part, picture, some)
            for part, picture, some in zip(parts, pictures, frames, strict=True)
        ]

    def _rows_of(self, frame: tuple[int, int]) -> int:
        if self.spec.pool is not None:
            return 1
        height, width = frame
        return height * width // self.spec.merge**2 + self.spec.keeps_class

    def _embedded(self, pictures: Sequence[Picture], layout: PatchLayout) -> Tensor:
        """The patches [T, C] of all pictures in the layout's order."""
        patch = self.spec.patch
        vectors = [vectors_of(picture, patch) for picture in pictures]
        x = torch.cat([v.to(self.device, self.dtype) for v in vectors])
        if patch.is_centered:
            x = 2 * (x - 0.5)
        index = layout.raster
        if patch.in_cells:
            within = np.arange(self.spec.merge**2)
            index = (layout.cells[:, None] * len(within) + within).ravel()
        # spares a copy of all patches where they have the order already
        if not np.array_equal(index, np.arange(len(index))):
            x = x[self._on_device(index)]
        return self.ops.linear(x, self._patch)

    def _run(self, x: Tensor, layout: PatchLayout) -> Tensor:
        """Patches [T, C] -> rows."""
        spec, ops = self.spec, self.ops
        places = self._placed(layout)
        if spec.norm_before_positions and self._embed_norm is not None:
            x = ops.norm(x, self._embed_norm)
        x = self._with_positions(x, places)
        if not spec.norm_before_positions and self._embed_norm is not None:
            x = ops.norm(x, self._embed_norm)
        # entries of this step's table of rotations, not places in a prompt
        positions = torch.arange(len(x), device=self.device)[None]
        whole, windows = self._groups(places)
        selected, stacked = {}, []
        # outputs count blocks from 0, which is what enters the first
        for i in range(len(self._blocks) + 1):
            if i in spec.outputs:
                selected[i] = x
            if i == len(self._blocks):
                break
            sees_all = spec.window is None or i in spec.whole_blocks
            x = self._blocks[i](x, positions, whole if sees_all else windows)
            if i in self._deepstack:
                stacked.append(self._deepstack[i](x[places.patches]))
        chosen = [selected[i] for i in spec.outputs]
        x = chosen[0] if len(chosen) == 1 else torch.cat(chosen, 1)
        if self._norm is not None:
            x = ops.norm(x, self._norm)
        if self._pool is not None:
            x = self._pool(x.split(places.lengths))
        elif spec.pool is not None:
            x = x[places.classes]
        elif spec.class_token is not None and not spec.keeps_class:
            x = x[places.patches]
        rows = self._connector(x)
        if stacked:
            rows = torch.cat((rows, *stacked), 1)
        if spec.window is None:
            return rows
        # windows sorted the cells; placeholders follow the order of the frame
        back = np.argsort(layout.cells)
        return rows[self._on_device(back)]

    def _placed(self, layout: PatchLayout) -> _Places:
        """Places of patches and class tokens: one of these in each frame, or none."""
        lengths, extra = layout.lengths, int(self.spec.class_token is not None)
        starts = np.cumsum([0, *(length + extra for length in lengths)])[:-1]
        shift = extra if self.spec.class_token == "first" else 0
        patches = [np.arange(n) + start + shift for n, start in zip(lengths, starts, strict=True)]
        ends = starts if shift else starts + np.array(lengths)
        return _Places(
            layout,
            self._on_device(np.concatenate(patches)),
            self._on_device(ends if extra else np.zeros(0, np.int64)),
            [length + extra for length in lengths],
        )

    def _with_positions(self, x: Tensor, places: _Places) -> Tensor:
        """Patches [T, C] plus learned positions, with the class tokens."""
        spec, ops, table = self.spec, self.ops, self._table
        at_class = None
        if isinstance(spec.positions, LearnedGrid):
            assert table is not None
            if self._class is not None:
                first = spec.class_token == "first"
                at_class, table = (table[0], table[1:]) if first else (table[-1], table[:-1])
            x = ops.add(x, self._grid(table, spec.positions, places.layout))
        elif isinstance(spec.positions, LearnedAxes):
            assert table is not None
            rows, columns = (
                self._on_device(n) for n in (places.layout.rows, places.layout.columns)
            )
            x = ops.add(x, ops.add(table[0][columns], table[1][rows]))
        if self._class is None:
            return x
        out = x.new_empty(len(x) + len(places.classes), x.shape[1])
        out[places.patches] = x
        out[places.classes] = self._class if at_class is None else self._class + at_class
        return out

    def _grid(self, table: Tensor, grid: LearnedGrid, layout: PatchLayout) -> Tensor:
        """The samples of the learned grid [T, C] at the patches of a layout."""
        samples: dict[tuple[int, int], Tensor] = {}
        for frame in layout.frames:
            # frames of one size are sampled once
            if frame not in samples:
                found = sampled_grid(table, grid.sampling, *frame)
                samples[frame] = found.to(self.dtype)
        starts = np.cumsum([0, *layout.lengths])
        raster = self._on_device(layout.raster)
        parts = [
            samples[frame][raster[start : start + frame[0] * frame[1]] - start]
            for frame, start in zip(layout.frames, starts.tolist(), strict=False)
        ]
        return torch.cat(parts)

    def _groups(self, places: _Places) -> tuple[PromptBatch, PromptBatch]:
        """Attention plans of the blocks that see whole frames, and of those that see windows."""
        rotary = None
        if self.spec.rope is not None:
            total = sum(places.lengths)
            rows, columns, turns = (torch.zeros(total, device=self.device) for _ in range(3))
            rows[places.patches] = self._on_device(places.layout.rows).float()
            columns[places.patches] = self._on_device(places.layout.columns).float()
            # class tokens stay as they are
            turns[places.patches] = 1
            mixer = self.spec.blocks[0].mixer
            assert isinstance(mixer, Attention)
            rotary = axial_table(self.spec.rope, mixer.head_dim, rows, columns, turns)
        whole = PromptBatch(self._plan(places.lengths), rotary)
        if self.spec.window is None:
            return whole, whole
        return whole, PromptBatch(self._plan(places.layout.windows), rotary)

    def _plan(self, lengths: Sequence[int]) -> AttentionPlan:
        sizes = np.array(lengths, dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        plan: AttentionPlan = self.ops.plan_prompts(query_start=starts, seq_lens=sizes)
        return plan

    def _arranged(
        self, rows: Tensor, picture: Picture, frames: Sequence[tuple[int, int]]
    ) -> Tensor:
        assert self.spec.tiles is not None and self.spec.image_size is not None
        assert self._newline is not None and picture.size is not None, "a picture has its size"
        side = self.spec.image_size[0]
        return arranged(rows, frames, picture.size, self._newline, self.spec.tiles, side)

    def _on_device(self, index: object) -> Tensor:
        return torch.as_tensor(index, dtype=torch.int64, device=self.device)


def _flat(weight: Tensor) -> Tensor:
    """A convolution's weight as that of a product; a bias as it is."""
    return weight.flatten(1) if weight.dim() > 1 else weight
