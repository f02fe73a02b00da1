"""Pictures of live requests, made again from what came of them when their core has died."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from quire.media.decoding.decoder import DecodeLimits, PictureDecoder, ProcessedPicture
from quire.media.image_processors.processor import Arrays
from quire.media.loader import LoaderThread
from quire.media.placed import PlacedPicture, crop


class PictureRemaker:
    """Decodes in a thread and processes of its own, which start when they are first needed: those
    of new requests belong to a loop that may be waiting for this.
    """

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._thread: LoaderThread | None = None
        self._decoder: PictureDecoder | None = None

    def source_of(self, placed: PlacedPicture) -> PictureSource | None:
        """A source of the picture's inputs; None for one that came by its id alone."""
        encoded = placed.source.encoded
        return None if encoded is None else PictureSource(self, placed, encoded)

    def begin(
        self,
        encoded: bytes | npt.NDArray[Any],
        values: Mapping[str, Any],
        background: tuple[int, int, int],
    ) -> Future[ProcessedPicture]:
        """Begin to process a picture again, with the same options."""
        if self._thread is None or self._decoder is None:
            self._thread, self._decoder = LoaderThread(), PictureDecoder(self._limits)
        work = self._decoder.processed(encoded, values, background=background)
        return self._thread.begin(work)

    def close(self) -> None:
        if self._thread is not None and self._decoder is not None:
            self._thread.close()
            self._decoder.close()
            self._thread = self._decoder = None


class PictureSource:
    """A picture as it came (`MediaSource`): its file, or the pixels that a program gave."""

    def __init__(
        self, remaker: PictureRemaker, placed: PlacedPicture, encoded: bytes | npt.NDArray[Any]
    ) -> None:
        # not the processed picture: its pixels are what a journal does not keep
        self._remaker, self._part, self._encoded = remaker, placed.part, encoded
        self._options = placed.source.values, placed.source.background
        self.nbytes = len(encoded) if isinstance(encoded, bytes) else encoded.nbytes

    def make_inputs(self) -> Future[Arrays]:
        """Begin to make the inputs that it had."""
        made: Future[Arrays] = Future()

        def take(processed: Future[ProcessedPicture]) -> None:
            try:
                arrays = processed.result().arrays
                made.set_result(arrays if self._part is None else crop(arrays, self._part))
            except Exception as error:  # the request waits for one of both
                made.set_exception(error)

        self._remaker.begin(self._encoded, *self._options).add_done_callback(take)
        return made
