"""The interface of every image processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy.typing as npt

from quire.media.faults import MediaFault
from quire.media.image_processors.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

Arrays = dict[str, npt.NDArray[Any]]
"""The inputs of an encoder by the names that transformers has for them."""


class PictureLayout(msgspec.Struct, frozen=True):
    """Geometry of a processed picture, all in pixels but the tiles: known from its size alone.

    `resized`: the whole picture as the encoder sees it, where it is not a tile's size: of the
    overview if there are tiles. `tile`: of one tile. `rows` and `cols`: the grid of tiles, 0 if it
    is not split. `num_tiles`: with the overview or the crops.
    """

    height: int
    width: int
    resized: tuple[int, int]
    tile: tuple[int, int]
    rows: int = 0
    cols: int = 0
    num_tiles: int = 1

    @property
    def num_values(self) -> int:
        """Numbers that the picture becomes, of three channels."""
        overview = self.resized[0] * self.resized[1]
        return 3 * max(overview, self.num_tiles * self.tile[0] * self.tile[1])


P = TypeVar("P", bound="ImageProcessor")


class ImageProcessor(Protocol):
    """Makes an encoder's inputs of one picture."""

    @classmethod
    def read(cls: type[P], settings: ProcessorSettings) -> P:
        """The processor that the JSON asks for."""
        ...

    def layout(self, height: int, width: int) -> PictureLayout:
        """The geometry of a picture of this size. Raises MediaFault for one that is not taken."""
        ...

    def arrays(self, image: Image, layout: PictureLayout) -> Arrays:
        """The inputs of the encoder; `layout` is that of the picture's size."""
        ...


def whole_layout(
    height: int, width: int, size: tuple[int, int], num_tiles: int = 1
) -> PictureLayout:
    """The layout of a picture that becomes `num_tiles` of the same size without a grid."""
    return PictureLayout(height, width, size, size, num_tiles=num_tiles)


def refused_shape(height: int, width: int, reason: str) -> MediaFault:
    """The error for a picture whose shape a processor does not take."""
    return MediaFault(f"has {width} x {height} pixels: it {reason}")
