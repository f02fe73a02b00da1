"""The encoder of pictures as a step runs it: items in, rows out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.pictures import picture_of
from quire.step.media import MediaItem

IMAGE = "image"
"""The modality."""


class PictureEncoder:
    """Makes rows of pictures."""

    def __init__(self, encoder: VisionEncoder, max_rows: int) -> None:
        """max_rows: the most that an item may have."""
        self.encoder = encoder
        self.max_rows = max_rows

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """The rows of each item [num_rows, width]; their bits do not depend on the others."""
        return self.encoder.encode([picture_of(item.inputs, self.encoder.spec) for item in items])
