"""Pictures as requests name them, to bytes or arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from quire.media.faults import MediaFault
from quire.media.fetch.inline import data_url_bytes, open_file_url, read_data_url, read_file
from quire.media.fetch.settings import ByteBudget, FetchFault, FetchSettings, HeldBytes
from quire.media.fetch.urls import WebAddress, read_web_address, scheme_of
from quire.media.fetch.web import WebClient

Picture = bytes | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GivenPicture:
    """A picture of a request: a `url`, encoded `data`, an array of `pixels`, or `rows` that an
    encoder has made of it; or none of them, and the caller's `uuid` stands for one that came
    before. `label` begins a sentence about it.
    """

    url: str | None = None
    data: bytes | None = None
    pixels: npt.NDArray[Any] | None = None
    rows: Any = None
    uuid: str | None = None
    label: str = "The picture"

    @property
    def is_reference(self) -> bool:
        """Whether it has only an id."""
        given = (self.url, self.data, self.pixels, self.rows)
        return all(each is None for each in given)


class MediaFetcher:
    """Fetches the pictures of a request. All of them are looked at before any is fetched."""

    def __init__(self, settings: FetchSettings, client: WebClient | None = None) -> None:
        self.settings = settings
        self._held = HeldBytes(settings.max_held_bytes)
        self._client = client or WebClient(settings)

    def budget(self) -> ByteBudget:
        """A budget for one request, to be released when its pictures are not needed any more."""
        return ByteBudget(self.settings.max_total_bytes, self._held)

    async def fetched(
        self, pictures: Sequence[GivenPicture], budget: ByteBudget
    ) -> list[Picture | None]:
        """Bytes or pixels of every picture; None for those that only have an id, or come as rows.
        Raises the MediaFault of the first that cannot be used, CapacityError while too much is
        being loaded.
        """
        # all before any is fetched: a request that will be refused asks nobody for anything
        addresses = [self._checked(picture, budget) for picture in pictures]
        room = asyncio.Semaphore(self.settings.num_at_once)

        async def one(picture: GivenPicture, address: WebAddress | None) -> Picture | None:
            try:
                async with room:
                    return await self._one(picture, address, budget)
            except MediaFault as fault:
                raise fault.of(picture.label) from None

        tasks = [
            asyncio.ensure_future(one(*pair)) for pair in zip(pictures, addresses, strict=True)
        ]
        try:
            # all of them to their end, so that the error is that of the first picture and not of
            # the fastest
            found = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
        return [_raised(each) for each in found]

    def _checked(self, picture: GivenPicture, budget: ByteBudget) -> WebAddress | None:
        """Its address on the web, if it is there; raises for what can be told to be refused."""
        try:
            return self._looked_at(picture, budget)
        except MediaFault as fault:
            raise fault.of(picture.label) from None

    def _looked_at(self, picture: GivenPicture, budget: ByteBudget) -> WebAddress | None:
        most, size = self.settings.max_bytes, 0
        if picture.rows is not None:
            size = _rows_bytes(picture.rows)
        elif picture.data is not None:
            size = len(picture.data)
        elif picture.pixels is not None:
            size = picture.pixels.nbytes
        elif picture.url is not None:
            scheme = scheme_of(picture.url)
            if scheme in ("http", "https"):
                address = read_web_address(picture.url)
                self._client.check(address)
                return address
            if scheme == "data":
                size = data_url_bytes(picture.url)
            elif scheme != "file":
                raise MediaFault("has a URL that is not one: it is an HTTP, data or file URL")
        elif not picture.uuid:
            raise MediaFault("has no data and no uuid")
        if size > most:
            raise FetchFault(f"has more than {most} bytes")
        budget.take(size)
        return None

    async def _one(
        self, picture: GivenPicture, address: WebAddress | None, budget: ByteBudget
    ) -> Picture | None:
        if address is not None:
            return await self._client.get(address, budget)
        if picture.data is not None:
            return picture.data
        if picture.pixels is not None:
            return picture.pixels
        if picture.url is None:
            return None
        if scheme_of(picture.url) == "data":
            return await asyncio.to_thread(read_data_url, picture.url)
        settings = self.settings
        file, size = await asyncio.to_thread(
            open_file_url, picture.url, settings.local_root, settings.max_bytes
        )
        try:
            budget.take(size)
        except BaseException:
            file.close()
            raise
        return await asyncio.to_thread(read_file, file, size)


def _rows_bytes(rows: Any) -> int:
    """The bytes of rows as they came: an array, a tensor, base64 of a file, or a dict of these."""
    if isinstance(rows, Mapping):
        return sum(map(_rows_bytes, rows.values()))
    if isinstance(rows, str | bytes):
        return len(rows) * 3 // 4
    size = getattr(rows, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _raised(found: Picture | BaseException | None) -> Picture | None:
    if isinstance(found, BaseException):
        raise found
    return found
