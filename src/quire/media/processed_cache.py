"""Keeps processed pictures by their names, and the ids that callers have given them."""

from __future__ import annotations

from collections import OrderedDict

from quire.media.decoding.decoder import ProcessedPicture

_MOST_UUIDS = 2**16


class ProcessedCache:
    """Pictures by digest, at most `max_bytes` of arrays: those that were used last. One thread may
    use it. A larger picture is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_queries = self.num_hits = 0
        self._pictures: OrderedDict[bytes, ProcessedPicture] = OrderedDict()
        self._uuids: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, digest: bytes) -> ProcessedPicture | None:
        self.num_queries += 1
        found = self._pictures.get(digest)
        if found is not None:
            self.num_hits += 1
            self._pictures.move_to_end(digest)
        return found

    def put(self, digest: bytes, picture: ProcessedPicture) -> None:
        """Keep a picture, and let others go for it."""
        # a picture that is too large would drive all others out and not stay either
        if digest in self._pictures or picture.num_bytes > self.max_bytes:
            return
        self._pictures[digest] = picture
        self.num_bytes += picture.num_bytes
        while self.num_bytes > self.max_bytes:
            _, old = self._pictures.popitem(last=False)
            self.num_bytes -= old.num_bytes

    def name(self, uuid: bytes, digest: bytes) -> None:
        """Remember the picture of a caller's id (`uuid_digest`): the last that came with it."""
        # ids are bounded by number: clients choose them, and they outlive their pictures here
        self._uuids[uuid] = digest
        self._uuids.move_to_end(uuid)
        if len(self._uuids) > _MOST_UUIDS:
            self._uuids.popitem(last=False)

    def named(self, uuid: bytes) -> bytes | None:
        """The picture's name, if one has come with this id."""
        return self._uuids.get(uuid)

    def clear(self) -> None:
        self._pictures.clear()
        self._uuids.clear()
        self.num_bytes = 0
