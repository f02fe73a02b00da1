"""Sources of live requests' media, as they came, to make these again after a core's death."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec

from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.prompt_media import MediaSource, PromptMedia
from quire.step.media import MediaItem

MOST_BYTES = 256 * 2**20
"""The memory of all sources of a front end."""


class GivenInputs:
    """The inputs of an item that came without a source."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self._inputs = inputs
        self.nbytes = sum(int(array.nbytes) for array in inputs.values())

    def make_inputs(self) -> Future[dict[str, Any]]:
        """Return the inputs, which are there already."""
        made: Future[dict[str, Any]] = Future()
        made.set_result(self._inputs)
        return made


class InputsElsewhere:
    """The size of an item's inputs, which another process keeps."""

    def __init__(self, item: MediaItem) -> None:
        self.nbytes = GivenInputs(item.inputs).nbytes

    def make_inputs(self) -> NoReturn:
        """Never called: these inputs are made again elsewhere."""
        raise AssertionError("the process that owns the engine makes inputs again")


class _Kept:
    """A source, and how many requests need it."""

    def __init__(self, source: MediaSource) -> None:
        self.source = source
        self.nbytes = source.nbytes
        self.num_requests = 0


class Remaking:
    """A message whose media are being made again; it may be sent once all are there."""

    def __init__(
        self, engine_index: int, request: EngineCoreRequest, made: list[Future[dict[str, Any]]]
    ) -> None:
        """made: the inputs of each item."""
        self.engine_index = engine_index
        self.handle = request.handle
        self._request = request
        self._made = made

    @property
    def is_ready(self) -> bool:
        """Whether `message` does not wait."""
        return all(future.done() for future in self._made)

    def message(self) -> EngineCoreRequest:
        """The request with its media. Raises what their source raised."""
        media = self._request.media
        if media is None:
            return self._request
        items = [
            msgspec.structs.replace(item, inputs=future.result())
            for item, future in zip(media.items, self._made, strict=True)
        ]
        return msgspec.structs.replace(self._request, media=PromptMedia(items, media.positions))


class KeptMedia:
    """The sources of live requests' media, shared by digest, up to `most_bytes` of them.

    Invariants: `num_bytes` is the sum of the sources; each has a request that needs it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self._kept: dict[bytes, _Kept] = {}
        self.digests: dict[int, list[bytes]] = {}
        """The requests whose media can be made again -> the digests of their items."""

    def keep(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Keep a request's sources if there is room; returns it without inputs, as journals do."""
        media = request.media
        if media is None:
            return request
        new = {
            item.digest: _Kept(media.sources.get(item.digest) or GivenInputs(item.inputs))
            for item in media.items
            if item.digest not in self._kept
        }
        num_bytes = sum(kept.nbytes for kept in new.values())
        if media.is_kept and self.num_bytes + num_bytes <= self._most_bytes:
            self._kept |= new
            self.num_bytes += num_bytes
            # each once: a picture may stand in a prompt several times
            self.digests[request.handle] = list({item.digest: None for item in media.items})
            for digest in self.digests[request.handle]:
                self._kept[digest].num_requests += 1
        bare = [msgspec.structs.replace(item, inputs={}) for item in media.items]
        return msgspec.structs.replace(request, media=PromptMedia(bare, media.positions))

    def keep_elsewhere(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Count the inputs of a request, which the process that it is sent to keeps. Returns it as
        it travels: it says whether there is room for them.
        """
        media = request.media
        if media is None:
            return request
        sources = {item.digest: InputsElsewhere(item) for item in media.items}
        self.keep(msgspec.structs.replace(request, media=PromptMedia(media.items, None, sources)))
        sent = PromptMedia(media.items, media.positions, is_kept=request.handle in self.digests)
        return msgspec.structs.replace(request, media=sent)

    def drop(self, handle: int) -> None:
        """Forget the media of a request that has ended; unknown ones are ignored."""
        for digest in self.digests.pop(handle, ()):
            kept = self._kept[digest]
            kept.num_requests -= 1
            if kept.num_requests == 0:
                del self._kept[digest]
                self.num_bytes -= kept.nbytes

    def remake(self, engine_index: int, request: EngineCoreRequest) -> Remaking:
        """Make a kept request's media again, for a core. Raises what a source raises at once."""
        items: list[MediaItem] = [] if request.media is None else request.media.items
        made = [self._kept[item.digest].source.make_inputs() for item in items]
        return Remaking(engine_index, request, made)
