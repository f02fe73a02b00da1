"""The outputs of encoders on the device, under the digests of their items, and the embeddings of
steps that they are put into.

What is kept, and for how long, is decided by the scheduler (scheduling/encoder_cache.py): a plan
says what is dropped and what is encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.errors import EngineDeadError
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Array
from quire.step.media import EMBEDS, EmbeddedSpan, MediaItem
from quire.step.plan import NewRow, StepPlan

logger = logging.getLogger(__name__)

_FAILED = "the encoder failed for an item of the prompt; the engine's log says how"


class Encoder(Protocol):
    """Makes rows of the items of one modality."""

    @property
    def max_rows(self) -> int:
        """The most rows that an item may have."""
        ...

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """The rows of each item: [num_rows, C] as wide as the model's embeddings, of their type,
        on the model's device.

        The rows of an item are the same bits whatever it is encoded together with. The inputs are
        not kept. If this raises, the items are tried one by one, and the requests of those that
        fail alone end with an error.
        """
        ...


class GivenEmbeddings:
    """The encoder of embeddings that came with a prompt: `inputs["embeds"]`, [num_rows, C]."""

    def __init__(
        self,
        max_rows: int,
        like: Tensor,
        *,
        scale: float = 1.0,
        num_deep: int = 0,
        width: int | None = None,
    ) -> None:
        """like: a tensor of the embeddings' type and device. scale: the factor that the model has
        for them. num_deep: how many layers get further rows, which are zeros for rows that are not
        wider than `width`, the model's own.
        """
        self.max_rows = max_rows
        self._like, self._scale, self._num_deep = like, scale, num_deep
        self._width = width

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        """See `Encoder`."""
        return [self._rows(item.inputs[EMBEDS]) for item in items]

    def _is_whole(self, rows: Tensor) -> bool:
        """Whether they have the further rows already."""
        return self._width is not None and rows.shape[1] > self._width

    def _rows(self, given: Array) -> Tensor:
        like = self._like
        rows = torch.tensor(given, dtype=like.dtype, device=like.device)
        if self._scale != 1.0:
            rows = rows * self._scale
        if not self._num_deep or self._is_whole(rows):
            return rows
        return torch.cat([rows, *[torch.zeros_like(rows)] * self._num_deep], 1)


class _Piece(NamedTuple):
    """Tokens [start, end) of a step, at which the rows of an item from `first_row` on stand."""

    start: int
    end: int
    digest: bytes
    first_row: int


class EncoderOutputs:
    """The rows that plans have had made. Also a part of the rows: it knows where media stand."""

    def __init__(
        self,
        encoders: Mapping[str, Encoder],
        look_up: Callable[[Tensor], Tensor],
        embeds: Tensor,
        deep: Sequence[Tensor] = (),
        media_id: int | None = None,
        result_width: int | None = None,
    ) -> None:
        """encoders: by modality. look_up: ids [T] -> their embeddings [T, C]. embeds [T, C]: where
        the embeddings of steps are put that have media, and deep, as many each, where the further
        parts of wider rows are (`Batch.deep`). media_id: see `LayerInputs`. result_width: a prompt
        with media is one item, whose only row is its result and has so many values.
        """
        self._encoders = dict(encoders)
        self._look_up = look_up
        self._embeds = embeds
        self._deep = tuple(deep)
        self._media_id = media_id
        self._result_width = result_width
        self._rows: dict[bytes, Tensor] = {}
        self._failed: set[bytes] = set()
        """Items that could not be encoded, until the scheduler drops them."""
        self._spans: dict[int, Sequence[EmbeddedSpan]] = {}
        self.failed_in_step: list[bytes] = []
        """Items of the newest plan that could not be encoded."""

    def add_row(self, row: NewRow) -> None:
        """Note where media stand in the row."""
        if row.embedded:
            self._spans[row.row] = row.embedded

    def remove_row(self, row: int) -> None:
        self._spans.pop(row, None)

    def clear(self) -> None:
        """Give the memory of all rows back; the scheduler has forgotten them."""
        self._rows.clear()
        self._failed.clear()

    def bytes_of(self, num_rows: int) -> int:
        parts = (self._embeds, *self._deep)
        return num_rows * sum(part.shape[1] * part.element_size() for part in parts)

    def change(self, plan: StepPlan) -> None:
        """Drop and encode what a plan says. Raises only what says that the device has failed."""
        for digest in plan.dropped_outputs:
            self._rows.pop(digest, None)
            self._failed.discard(digest)
        self.failed_in_step = []
        by_modality: dict[str, list[MediaItem]] = {}
        for item in plan.encodings:
            by_modality.setdefault(item.modality, []).append(item)
        for modality, items in by_modality.items():
            self._encode(self._encoders[modality], items)

    def failures(self, plan: StepPlan, num_computed: Array) -> dict[int, str]:
        """The rows of a plan whose tokens need what could not be encoded, with the reason.
        `num_computed` by row.
        """
        if not self._failed:
            return {}
        errors = {}
        for chunk in plan.chunks:
            first = int(num_computed[chunk.row])
            for span in self._spans.get(chunk.row, ()):
                overlaps = span.start < first + chunk.num_tokens and first < span.end
                if overlaps and span.digest in self._failed:
                    errors[chunk.row] = _FAILED
        return errors

    def embed(self, inputs: StepInputs, num_computed: Array) -> None:
        """Give a step's batch embeddings where media stand at some of its tokens, and the ids there
        that layers look up, once its ids are on the device. `num_computed` by row.
        """
        # steps of text stay on the program that looks ids up itself
        if not self._spans or self._result_width is not None:
            return
        pieces = list(self._pieces(inputs, num_computed))
        if not pieces:
            return
        ids = inputs.batch.ids
        assert ids is not None, "placeholders have ids"
        embeds = self._embeds[: len(ids)]
        embeds.copy_(self._look_up(ids))
        deep = tuple(part[: len(ids)] for part in self._deep)
        for part in deep:
            part.zero_()
        for piece in pieces:
            rows = self._rows[piece.digest]
            end = piece.first_row + piece.end - piece.start
            parts = rows[piece.first_row : end].chunk(1 + len(deep), 1)
            for target, part in zip((embeds, *deep), parts, strict=True):
                target[piece.start : piece.end] = part
            if self._media_id is not None:
                ids[piece.start : piece.end] = self._media_id
        inputs.batch.embeds, inputs.batch.deep = embeds, deep

    def result_of(self, row: int) -> Tensor | None:
        """The result of a row's prompt [D], where an encoder has made it."""
        if self._result_width is None or row not in self._spans:
            return None
        [span] = self._spans[row]
        return self._rows[span.digest][0]

    def _pieces(self, inputs: StepInputs, num_computed: Array) -> Iterator[_Piece]:
        """The parts of the step's rows at which media stand."""
        for row, start, count in zip(inputs.rows, inputs.starts, inputs.counts, strict=False):
            spans = self._spans.get(int(row))
            if spans is None:
                continue
            first = int(num_computed[row])
            offset = int(start) - first
            for span in spans:
                begin, end = max(first, span.start), min(first + int(count), span.end)
                if begin < end:
                    first_row = span.first_row + begin - span.start
                    yield _Piece(begin + offset, end + offset, span.digest, first_row)

    def _encode(self, encoder: Encoder, items: Sequence[MediaItem]) -> None:
        try:
            found = encoder.encode(items)
            for rows, item in zip(found, items, strict=True):
                self._check(rows, item)
        except EngineDeadError:
            raise
        except Exception:
            # one bad picture must not cost the others theirs
            if len(items) > 1:
                for item in items:
                    self._encode(encoder, [item])
                return
            logger.exception("an item of the modality %s was not encoded", items[0].modality)
            self._failed.add(items[0].digest)
            self.failed_in_step.append(items[0].digest)
            return
        for rows, item in zip(found, items, strict=True):
            self._rows[item.digest] = rows

    def _check(self, rows: Tensor, item: MediaItem) -> None:
        width = self._embeds.shape[1] * (1 + len(self._deep))
        wanted = (item.num_rows, self._result_width or width)
        if tuple(rows.shape) != wanted or rows.dtype != self._embeds.dtype:
            raise ValueError(f"rows {tuple(rows.shape)} of {rows.dtype} in place of {wanted}")
