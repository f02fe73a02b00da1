"""The way of the pictures of one prompt: fetched, named, processed, and placed among its ids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt

from quire.errors import RequestError
from quire.media.decoding.decoder import PictureDecoder, ProcessedPicture
from quire.media.digests import picture_digest, uuid_digest
from quire.media.fetch.fetcher import GivenPicture, MediaFetcher
from quire.media.item_limits import DEFAULT_LIMIT, check_count
from quire.media.picture_files import PictureSettings
from quire.media.processed_cache import ProcessedCache

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LoadedPicture:
    """A picture that is ready for the encoder. `encoded`: as it came, for a journal; None where it
    was found by its id alone.
    """

    digest: bytes
    processed: ProcessedPicture
    encoded: bytes | npt.NDArray[Any] | None


class PictureLoader:
    """Loads pictures with the settings of a model. `is_trusting`: ids of callers are names by
    themselves, as in a program that embeds the engine; a server joins them with `scope`, and data
    that comes with an id decides.
    """

    def __init__(
        self,
        settings: PictureSettings,
        fetcher: MediaFetcher,
        decoder: PictureDecoder,
        cache: ProcessedCache,
        *,
        most_pictures: int = DEFAULT_LIMIT,
        is_trusting: bool = False,
        algorithm: str = "sha256",
    ) -> None:
        self.settings = settings
        self._fetcher, self._decoder, self._cache = fetcher, decoder, cache
        self._most_pictures, self._is_trusting = most_pictures, is_trusting
        self._algorithm = algorithm

    async def loaded(
        self,
        pictures: Sequence[GivenPicture],
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        scope: str = "",
        background: tuple[int, int, int] = (255, 255, 255),
    ) -> list[LoadedPicture]:
        """The pictures of one prompt, in order. Raises RequestError before anything is fetched
        where there are too many, MediaFault for the first that cannot be used.
        """
        check_count(len(pictures), self._most_pictures)
        values = self.settings.changed(mm_processor_kwargs)
        fetched = await self._fetcher.fetched(pictures)
        whose = None if self._is_trusting else scope

        async def one(index: int) -> LoadedPicture:
            given, data = pictures[index], fetched[index]
            alias = None
            if given.uuid:
                alias = uuid_digest(given.uuid, values, scope=whose, background=background)
            if data is None:
                assert alias is not None, "the fetcher refuses what has neither"
                return self._known(alias, index)
            if alias is not None and self._is_trusting:
                digest = alias
            else:
                digest = await asyncio.to_thread(
                    picture_digest,
                    data,
                    values,
                    background=background,
                    algorithm=self._algorithm,
                )
            found = self._cache.get(digest)
            if found is None:
                found = await self._decoder.processed(
                    data, values, label=given.label, background=background
                )
                self._cache.put(digest, found)
            if alias is not None:
                self._cache.name(alias, digest)
            return LoadedPicture(digest, found, data)

        # One after the other: the decoder has its queue, and a request must not fill it alone.
        return [await one(index) for index in range(len(pictures))]

    def _known(self, alias: bytes, index: int) -> LoadedPicture:
        digest = self._cache.named(alias)
        found = None if digest is None else self._cache.get(digest)
        if digest is None or found is None:
            raise RequestError(
                f"Cache miss for image at index {index} but data is not provided.",
                parameter="image",
            )
        return LoadedPicture(digest, found, None)


class LoaderThread:
    """An event loop in a thread of its own, for programs that wait for their pictures."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`, or what it raises; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
