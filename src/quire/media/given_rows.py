"""Pictures that come as an encoder's output: the rows that stand in a prompt in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import InvalidParameter, RequestError
from quire.media.decoding.decoder import ProcessedPicture
from quire.media.digests import ContentHash
from quire.media.image_processors.processor import PictureLayout
from quire.media.tensors import Numbers, checked_rows, is_tensor, numbers_of, tensor_of_text
from quire.step.media import EMBEDS

NAME = "image_embeds"
GRID = "image_grid_thw"


@dataclass(frozen=True, slots=True)
class RowsReader:
    """Reads the rows of a picture, of one of the `widths` that the model takes. `cell`: patches of
    a row, by side, where a picture's grid decides the positions of its rows; None: it does not.
    `layout`: of any picture that is not split.
    """

    is_enabled: bool
    widths: tuple[int, ...]
    cell: int | None
    layout: PictureLayout

    def read(self, given: Any, label: str) -> tuple[bytes, ProcessedPicture]:
        """The name of the rows, and these with their grid. `given`: an array, a tensor, one of
        these as a file in base64, or a dict of such by their names. Raises RequestErrors.
        """
        if not self.is_enabled:
            raise RequestError(
                f"You must set `--enable-mm-embeds` to input `{NAME}`.", parameter=NAME
            )
        given = given if isinstance(given, Mapping) else {NAME: given}
        for key in given:
            if key not in (NAME, GRID):
                allowed = f"{NAME} has {NAME} and {GRID}"
                raise InvalidParameter(f"{NAME}.{str(key)[:40]}", "...", allowed)
        rows = given.get(NAME)
        if isinstance(rows, str | bytes):
            rows = tensor_of_text(NAME, rows)
        rows = checked_rows(rows, NAME, *self.widths)
        arrays = {EMBEDS: rows}
        content = ContentHash(NAME)
        content.add_array("rows", rows)
        if self.cell is not None:
            arrays[GRID] = self._grid(given.get(GRID), len(rows), label)
            content.add("grid", arrays[GRID].astype("<i8").tobytes())
        elif given.get(GRID) is not None:
            raise InvalidParameter(GRID, "...", "pictures of this model have no grid")
        return content.digest(), ProcessedPicture(self.layout, arrays)

    def _grid(self, given: Any, num_rows: int, label: str) -> Numbers:
        """The grid of patches [1, 3]: frames, rows and columns."""
        if given is None:
            text = f"{label}: {NAME} of this model come with {GRID} [frames, rows, columns]."
            raise RequestError(text, parameter=GRID)
        assert self.cell is not None, "grids are read where they count"
        grid = whole_numbers(given).reshape(-1)
        is_right = len(grid) == 3 and min(grid) > 0 and grid[0] == 1
        if not is_right or any(int(side) % self.cell for side in grid[1:]):
            allowed = f"it is [1, rows, columns] of patches, multiples of {self.cell}"
            raise InvalidParameter(GRID, grid.tolist()[:6], allowed)
        wanted = int(grid[1]) * int(grid[2]) // self.cell**2
        if wanted != num_rows:
            allowed = f"{label} has {num_rows} rows, and a picture of this grid {wanted}"
            raise InvalidParameter(GRID, grid.tolist(), allowed)
        return grid.astype(np.int64)[None]


def rows_given(data: Any, reader: RowsReader) -> list[Any] | None:
    """The rows in `multi_modal_data["image"]`, a value per picture; None: it has pictures."""
    if isinstance(data, Mapping):
        return _of_dict(data, reader)
    items = list(data) if isinstance(data, list | tuple) else [data]
    found: list[Any] = []
    for item in items:
        if isinstance(item, Mapping):
            found += _of_dict(item, reader)
        # three axes are a picture's as well; only a width that the model has makes them rows
        elif is_tensor(item) and item.ndim == 3 and item.shape[2] in reader.widths:
            found.extend(item)
        elif (is_tensor(item) or isinstance(item, np.ndarray)) and item.ndim == 2:
            found.append(item)
        else:
            return None
    return found


def _of_dict(given: Mapping[str, Any], reader: RowsReader) -> list[Any]:
    """The rows of each picture, which may be concatenated where grids say how many there are."""
    rows, grids = given.get(NAME), given.get(GRID)
    others = {key: value for key, value in given.items() if key not in (NAME, GRID)}
    if isinstance(rows, str | bytes):
        rows = tensor_of_text(NAME, rows)
    if grids is None or reader.cell is None:
        more = {} if grids is None else {GRID: grids}
        several: Any = rows
        is_list = isinstance(rows, list | tuple) or getattr(rows, "ndim", 2) == 3
        return [{NAME: each, **more, **others} for each in (several if is_list else [rows])]
    table = whole_numbers(grids)
    table = table.reshape(-1, 3) if table.size % 3 == 0 else table.reshape(1, -1)
    if isinstance(rows, list | tuple):
        parts = list(rows)
    else:
        counts = [int(np.prod(grid)) // reader.cell**2 for grid in table]
        parts, start = [], 0
        for index, count in enumerate(counts):
            # the last one gets what is left, so that a wrong number of rows is refused with its
            # picture
            end = None if index == len(counts) - 1 else start + count
            parts.append(rows[start:end] if rows is not None else None)
            start += count
    if len(parts) != len(table):
        allowed = f"there are {len(table)} grids for {len(parts)} pictures"
        raise InvalidParameter(GRID, table.tolist()[:4], allowed)
    pairs = zip(parts, table, strict=True)
    return [{NAME: part, GRID: grid, **others} for part, grid in pairs]


def whole_numbers(given: Any) -> Numbers:
    """An array of whole numbers, from a list, an array, a tensor, or a file in base64."""
    if isinstance(given, str | bytes):
        return tensor_of_text(GRID, given, is_whole=True)
    if is_tensor(given):
        given = numbers_of(given)
    try:
        found = np.asarray(given)
    except ValueError:
        # ragged lists; refused below with what is not whole
        found = np.asarray("")
    if found.dtype.kind not in "iu" or found.size > 3 * 2**16:
        raise InvalidParameter(GRID, "...", "it has whole numbers, three for each picture")
    return found
