"""The way of the pictures of one prompt: fetched, named, processed, and placed among its ids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt

from quire.errors import RequestError
from quire.media.decoding.decoder import PictureDecoder, ProcessedPicture
from quire.media.digests import picture_digest, uuid_digest
from quire.media.fetch.fetcher import GivenPicture, MediaFetcher
from quire.media.given_rows import RowsReader
from quire.media.item_limits import DEFAULT_LIMIT, check_count
from quire.media.picture_files import PictureSettings
from quire.media.processed_cache import ProcessedCache

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LoadedPicture:
    """A picture that is ready for the encoder. `encoded`: as it came, for a journal; None where it
    was found by its id alone. `values` and `background`: how it was processed.
    """

    digest: bytes
    processed: ProcessedPicture
    encoded: bytes | npt.NDArray[Any] | None
    values: Mapping[str, Any]
    background: tuple[int, int, int]


class PictureLoader:
    """Loads pictures with a model's settings; `background`: the colour under transparency."""

    def __init__(
        self,
        settings: PictureSettings,
        fetcher: MediaFetcher,
        decoder: PictureDecoder,
        cache: ProcessedCache,
        *,
        most_pictures: int = DEFAULT_LIMIT,
        rows: RowsReader | None = None,
        background: tuple[int, int, int] = (255, 255, 255),
        algorithm: str = "sha256",
    ) -> None:
        self.settings = settings
        self._fetcher, self._decoder = fetcher, decoder
        self.rows = rows
        """Reads pictures that come as rows; None: they are refused."""
        self.cache = cache
        self._most_pictures, self._background = most_pictures, background
        self._algorithm = algorithm

    async def loaded(
        self,
        pictures: Sequence[GivenPicture],
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        scope: str | None = None,
        background: tuple[int, int, int] | None = None,
    ) -> list[LoadedPicture]:
        """The pictures of one prompt, in order. Ids of callers are names by themselves where
        `scope` is None, as in a program that embeds the engine; a server joins them with it, and
        data that comes with an id decides.

        Raises RequestError before anything is fetched where there are too many, MediaFault for the
        first that cannot be used.
        """
        self.check_count(len(pictures))
        values = self.settings.changed(mm_processor_kwargs)
        background = background or self._background
        # held until all is processed: the bytes are in memory until then
        budget = self._fetcher.budget()
        try:
            fetched = await self._fetcher.fetched(pictures, budget)
            return await self._loaded(pictures, fetched, values, scope, background)
        finally:
            budget.release()

    async def _loaded(
        self,
        pictures: Sequence[GivenPicture],
        fetched: Sequence[bytes | npt.NDArray[Any] | None],
        values: Mapping[str, Any],
        scope: str | None,
        background: tuple[int, int, int],
    ) -> list[LoadedPicture]:
        """Process what was fetched one by one: a request must not fill the decoder's queue."""

        async def one(index: int) -> LoadedPicture:
            given, data = pictures[index], fetched[index]
            alias = None
            if given.uuid:
                alias = uuid_digest(given.uuid, values, scope=scope, background=background)
            if given.rows is not None:
                digest, made = await asyncio.to_thread(self._read_rows, given)
                self.cache.put(digest, made)
                if alias is not None:
                    self.cache.name(alias, digest)
                return LoadedPicture(digest, made, None, values, background)
            if data is None:
                assert alias is not None, "the fetcher refuses what has neither"
                digest, known = self._known(alias, index)
                return LoadedPicture(digest, known, None, values, background)
            # a program answers for its ids, so that nothing is hashed
            if alias is not None and scope is None:
                digest = alias
            else:
                digest = await asyncio.to_thread(
                    picture_digest,
                    data,
                    values,
                    background=background,
                    algorithm=self._algorithm,
                )
            found = self.cache.get(digest)
            if found is None:
                found = await self._decoder.processed(
                    data, values, label=given.label, background=background
                )
                self.cache.put(digest, found)
            if alias is not None:
                self.cache.name(alias, digest)
            return LoadedPicture(digest, found, data, values, background)

        return [await one(index) for index in range(len(pictures))]

    def _read_rows(self, given: GivenPicture) -> tuple[bytes, ProcessedPicture]:
        if self.rows is None:
            raise RequestError("Rows of pictures are not taken here.", parameter="image_embeds")
        return self.rows.read(given.rows, given.label)

    def check_count(self, num: int) -> None:
        """Raise RequestError for more pictures than a prompt may have."""
        check_count(num, self._most_pictures)

    def close(self) -> None:
        self._decoder.close()

    def _known(self, alias: bytes, index: int) -> tuple[bytes, ProcessedPicture]:
        digest = self.cache.named(alias)
        found = None if digest is None else self.cache.get(digest)
        if digest is None or found is None:
            raise RequestError(
                f"Cache miss for image at index {index} but data is not provided.",
                parameter="image",
            )
        return digest, found


class LoaderThread:
    """An event loop in a thread of its own, for programs that wait for their pictures."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # a daemon: a fetch that hangs must not keep the program from its exit
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`, or what it raises; Ctrl-C cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, R]) -> Future[R]:
        """The result of `work` when it is there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        if not self._loop.is_closed():
            # a loop may only be touched from its own thread
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
