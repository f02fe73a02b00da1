"""An encoder whose outputs are kept in the tier that blocks of K/V are kept in, so that a picture
that comes again is not encoded again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.runner.encoder_outputs import Encoder
from quire.step.media import MediaItem
from quire.step.transfers import ROWS_GROUP, BlockKey

logger = logging.getLogger(__name__)

_UNIT = 64
"""Bytes whose multiples contents of the tier are."""
_PATIENCE_S = 0.5
"""Seconds that a step waits for rows: encoding takes less than a disk that hangs."""


class RowsTier(Protocol):
    """A tier, which keeps contents of at most `slot_bytes`."""

    @property
    def slot_bytes(self) -> int:
        """The bytes of the largest content."""
        ...

    def put(self, key: BlockKey, content: Tensor) -> None:
        """Store [B] uint8 of the host, which nobody writes any more, beside steps."""
        ...

    def get(self, wanted: Sequence[tuple[BlockKey, Tensor]], timeout_s: float) -> bool:
        """Fill [B] uint8 of the host with the contents of all these keys. False: some are not
        there, or did not come in time; then memory that was given may be written later.
        """
        ...


class TieredEncoder:
    """Loads the rows that the tier has, has an encoder make the others, and stores those.

    The tier is of one root, in which the encoder's weights are; it forgets all when they change.
    """

    def __init__(self, encoder: Encoder, like: Tensor) -> None:
        """like: a row of the encoder's, of its type and on its device."""
        self._encoder, self._like = encoder, like
        self._tier: RowsTier | None = None
        self.num_loaded = 0
        """Items whose rows were not made again."""

    def bind(self, tier: RowsTier) -> None:
        """Use a tier from now on."""
        self._tier = tier

    @property
    def max_rows(self) -> int:
        return self._encoder.max_rows

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        tier = self._tier
        if tier is None:
            return self._encoder.encode(items)
        known = {
            item.digest: rows for item in items if (rows := self._load(tier, item)) is not None
        }
        self.num_loaded += len(known)
        missing = [item for item in items if item.digest not in known]
        if missing:
            for item, rows in zip(missing, self._encoder.encode(missing), strict=True):
                known[item.digest] = rows
                self._store(tier, item, rows)
        return [known[item.digest] for item in items]

    def _load(self, tier: RowsTier, item: MediaItem) -> Tensor | None:
        shape = item.num_rows, self._like.shape[-1]
        size = shape[0] * shape[1] * self._like.element_size()
        content = torch.empty(-(-size // _UNIT) * _UNIT, dtype=torch.uint8)
        if not tier.get(_pieces(tier, item, content), _PATIENCE_S):
            return None
        return content[:size].view(self._like.dtype).view(shape).to(self._like.device)

    def _store(self, tier: RowsTier, item: MediaItem, rows: Tensor) -> None:
        if rows.shape != (item.num_rows, self._like.shape[-1]) or rows.dtype != self._like.dtype:
            return  # they are refused where they are used
        size = rows.numel() * rows.element_size()
        content = torch.zeros(-(-size // _UNIT) * _UNIT, dtype=torch.uint8)
        content[:size] = rows.detach().contiguous().view(torch.uint8).reshape(-1).cpu()
        for key, piece in _pieces(tier, item, content):
            tier.put(key, piece)


def _pieces(tier: RowsTier, item: MediaItem, content: Tensor) -> Sequence[tuple[BlockKey, Tensor]]:
    """The pieces of an item's rows that slots have room for, with their names."""
    found = []
    for number, piece in enumerate(torch.split(content, tier.slot_bytes // _UNIT * _UNIT)):
        about = f"rows {number} of {item.num_rows}, {content.nbytes} {item.modality} ".encode()
        found.append(((hashlib.sha256(about + item.digest).digest(), ROWS_GROUP), piece))
    return found
