"""Sizes that pictures are brought to: (height, width) everywhere. Sources are the classes of
transformers that the processors are named after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from quire.media.image_processors.processor import refused_shape
from quire.media.image_processors.settings import SizeSetting

Sides = tuple[int, int]


def target_size(height: int, width: int, size: SizeSetting) -> Sides:
    """The size of a picture after a resize to a general size."""
    if size.shortest_edge and size.longest_edge:
        return _between_edges(height, width, size.shortest_edge, size.longest_edge)
    if size.shortest_edge:
        long = int(size.shortest_edge * max(height, width) / min(height, width))
        return (long, size.shortest_edge) if width <= height else (size.shortest_edge, long)
    if size.max_height and size.max_width:
        scale = min(size.max_height / height, size.max_width / width)
        return max(1, int(height * scale)), max(1, int(width * scale))
    return size.height, size.width


def _between_edges(height: int, width: int, shortest: int, longest: int) -> Sides:
    low, high = float(min(height, width)), float(max(height, width))
    exact: float = shortest
    if high / low * shortest > longest:
        exact = longest * low / high
        shortest = round(exact)
    if shortest == min(height, width):
        return height, width
    if width < height:
        return int(exact * height / width), max(1, shortest)
    return max(1, shortest), int(exact * width / height)


def multiple_within(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> Sides:
    """Multiples of `factor` with a product between both bounds (Qwen2-VL). Halves go to even."""
    if max(height, width) > 200 * min(height, width):
        raise refused_shape(height, width, "is more than 200 times as long as it is wide")
    return _bounded(height, width, factor, 1, 1, min_pixels, max_pixels)


def multiple_within_for_frames(
    height: int, width: int, factor: int, num_frames: int, min_pixels: int, max_pixels: int
) -> Sides:
    """As `multiple_within`, for a picture that is repeated `num_frames` times (GLM-4V)."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise refused_shape(height, width, "is more than 200 times as long as it is wide")
    return _bounded(height, width, factor, num_frames, num_frames, min_pixels, max_pixels)


def _bounded(
    height: int,
    width: int,
    factor: int,
    frames: int,
    rounded_frames: int,
    min_pixels: int,
    max_pixels: int,
) -> Sides:
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if rounded_frames * tall * wide > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif rounded_frames * tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        tall = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return tall, wide


def within_patches(
    height: int, width: int, patch_size: int, max_patches: int, max_side: int
) -> Sides:
    """Shrinks, never enlarges, to `max_patches` patches and `max_side` of them on a side (Kimi)."""
    num = max(1, height // patch_size) * max(1, width // patch_size)
    longest = max_side * patch_size
    scale = min(1.0, math.sqrt(max_patches / num), longest / height, longest / width)
    tall, wide = max(1, int(height * scale)), max(1, int(width * scale))
    return min(tall, longest), min(wide, longest)


@lru_cache(maxsize=256)
def fitting_patches(height: int, width: int, patch_size: int, max_patches: int) -> Sides:
    """The largest multiples of `patch_size` that keep the shape and have at most `max_patches`
    patches, found by halving (SigLIP 2).
    """

    def side(scale: float, length: int) -> int:
        return max(patch_size, math.ceil(length * scale / patch_size) * patch_size)

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        num = (side(scale, height) / patch_size) * (side(scale, width) / patch_size)
        low, high = (scale, high) if num <= max_patches else (low, scale)
    return side(low, height), side(low, width)


def best_resolution(height: int, width: int, choices: Iterable[Sequence[int]]) -> Sides:
    """The one of `choices` that keeps most of the picture and wastes least (LLaVA-NeXT)."""
    best, most, least_wasted = (0, 0), 0, math.inf
    for tall, wide in choices:
        scale = min(wide / width, tall / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = tall * wide - kept
        if kept > most or (kept == most and wasted < least_wasted):
            best, most, least_wasted = (tall, wide), kept, wasted
    if not best[0]:
        raise refused_shape(height, width, "fits none of the model's resolutions")
    return best


def fitted(height: int, width: int, target: Sides) -> Sides:
    """The size that fills `target` on one side and keeps the shape, rounded up (LLaVA-NeXT)."""
    tall, wide = target
    if wide / width < tall / height:
        return min(math.ceil(height * (wide / width)), tall), wide
    return tall, min(math.ceil(width * (tall / height)), wide)


@lru_cache(maxsize=64)
def grids_up_to(least: int, most: int) -> tuple[Sides, ...]:
    """All (rows, columns) of `least` to `most` tiles, those of few tiles first."""
    grids = (
        (rows, cols)
        for cols in range(1, most + 1)
        for rows in range(1, most // cols + 1)
        if rows * cols >= least
    )
    return tuple(sorted(grids, key=_num_tiles))


@lru_cache(maxsize=64)
def unordered_grids_up_to(least: int, most: int) -> tuple[Sides, ...]:
    """As `grids_up_to`, but as many tiles in a set's order, which decides ties (LFM2-VL)."""
    pairs = {
        (cols, rows)
        for num in range(least, most + 1)
        for cols in range(1, num + 1)
        for rows in range(1, num + 1)
        if least <= cols * rows <= most
    }
    return tuple((rows, cols) for cols, rows in sorted(pairs, key=_num_tiles))


def _num_tiles(grid: Sides) -> int:
    return grid[0] * grid[1]


def closest_grid(height: int, width: int, tile: Sides, grids: Iterable[Sides]) -> Sides:
    """The one of `grids` whose shape is closest to the picture's; of equals the later, up to twice
    the picture's area (InternVL).
    """
    best, smallest = (1, 1), math.inf
    for rows, cols in grids:
        difference = abs(width / height - cols / rows)
        covers = height * width > 0.5 * tile[0] * tile[1] * rows * cols
        if difference < smallest or (difference == smallest and covers):
            best, smallest = (rows, cols), difference
    return best


def least_scaled_grid(height: int, width: int, tile: int, most: int) -> Sides:
    """(rows, columns) of up to `most` tiles, least enlarged, else shrunk (Command A Vision)."""
    grids = grids_up_to(1, most)
    scales = [min(cols * tile / width, rows * tile / height) for rows, cols in grids]
    if max(scales) < 1:
        return grids[scales.index(max(scales))]
    return grids[scales.index(min(scale for scale in scales if scale >= 1))]
