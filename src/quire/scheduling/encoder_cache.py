"""The outputs of encoders as a resource: rows that stand at placeholders of prompts, made by plans
and kept for as long as a running request needs them, and after that until their room is needed.

One number bounds the rows that are kept, and with them those that a step has made. A chunk ends
before an item whose rows are neither there nor can be made with it, and never inside a
bidirectional one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.errors import RequestError
from quire.scheduling.request import Request
from quire.step.media import MediaItem

_NO_STEP = -1


@dataclass(slots=True)
class _Output:
    """The rows of an item. `step_id`: the step that makes them. `holders`: running requests, by
    their handles, that need them. `is_stale`: they are dropped when they are there.
    """

    num_rows: int
    step_id: int = _NO_STEP
    is_ready: bool = True
    is_stale: bool = False
    holders: set[int] = field(default_factory=set)


class _Reach(NamedTuple):
    """The work that lets a request go on to position `end`: items to make rows of, and outputs that
    these take the room of.
    """

    end: int
    encodings: list[MediaItem]
    victims: list[bytes]


class EncoderCache:
    """The outputs by the digests of their items, and the requests that hold them.

    A running request holds the output of an item from the plan of its first chunk there until the
    step of its last one has succeeded. Outputs that nobody holds make room for others, the least
    recently used first. Requests are served in the order in which they are planned: once one of
    them lacks room, those after it get nothing new in that step, so that it has room in the end
    however small the items of others are. What a waiting request would use is kept from those
    after it for the step, and not beyond: so two that wait never hold what the other needs.

    Invariants (checked by `tests/support/simulation/invariants.py`): rows in use are those of the
    outputs, at most `num_rows`; only running requests hold outputs; those that are held, or not
    ready, are not dropped but by `forget_all`.
    """

    holds_back_others = False
    is_exhausted = False

    def __init__(self, num_rows: int, *, is_deferred: bool = False) -> None:
        """num_rows: how many are kept; 0: there are no encoders. is_deferred: rows are there once
        `end` says so; otherwise already for the tokens of the step that makes them.
        """
        self.num_rows = num_rows
        self.is_deferred = is_deferred
        self.num_free = num_rows
        self.num_encoded = 0
        """Items that were to be encoded, since the start."""
        self.num_hits = 0
        """Items of running requests whose rows were there already, since the start."""
        self._outputs: dict[bytes, _Output] = {}
        """Outputs in the order of their last use."""
        self._held: dict[int, set[bytes]] = {}
        self._known: dict[bytes, list[int]] = {}
        """Digest -> rows of the item, and how many requests have it."""
        self._lacking: int | None = None
        """The first request in this step that lacks room."""
        self._most_rows: float | None = None
        self._wanted: dict[bytes, int] = {}
        """Digest -> the first request in this step that needs it."""
        self._encodings: dict[bytes, MediaItem] = {}
        self._dropped: dict[bytes, None] = {}

    # Requests come and go

    def add(self, request: Request) -> None:
        """A new request. Raises RequestError if its items could not even be had if it were alone,
        or contradict those of others.
        """
        rows: dict[bytes, int] = {}
        end = 0
        for item in request.media:
            if item is not request.source:
                _check(item, end, request.num_prompt_tokens)
            known = rows.setdefault(item.digest, self._known.get(item.digest, [item.num_rows])[0])
            if known != item.num_rows:
                raise RequestError("two items of different sizes have the same digest")
            end = max(end, item.end)
        most = sum(rows.values())
        if not request.is_whole:  # the first item, at worst, together with the source
            source = 0 if request.source is None else request.source.num_rows
            others = [item.num_rows for item in request.media if item is not request.source]
            most = source + max(others, default=0)
        if most > self.num_rows:
            raise RequestError(
                f"media of {most} rows that must be there at once do not fit into the "
                f"{self.num_rows} of the encoder cache"
            )
        for digest, count in rows.items():
            self._known.setdefault(digest, [count, 0])[1] += 1

    def remove(self, request: Request) -> None:
        for digest in {item.digest for item in request.media}:
            known = self._known[digest]
            known[1] -= 1
            if known[1] == 0 and digest not in self._outputs:
                del self._known[digest]

    # Planning

    def begin(self, most_rows: float | None = None) -> None:
        """Start the planning of a step; most_rows: that it makes while streams wait for it (None:
        as many as fit). The first request that needs some gets them, however many they are.
        """
        self._most_rows = most_rows
        self._lacking = None
        self._wanted.clear()

    def reach(self, request: Request, first: int, count: int) -> int:
        """Number of the next `count` tokens from position `first` that the request may compute in
        this step.
        """
        if not request.media:
            return count
        found = self._look(request, first, first + count)
        end = request.end_of_chunk(first, found.end)
        return 0 if request.is_whole and end < first + count else end - first

    def use(self, request: Request, first: int, count: int) -> None:
        """Have the request compute `count` tokens, at most as many as `reach` allows: the outputs
        that they need are made by this step, and held.
        """
        found = self._look(request, first, first + count)
        assert found.end == first + count, "tokens without what stands there"
        for digest in found.victims:
            self._drop(digest)
        for item in found.encodings:
            self._begin(item, is_ready=True)
        held = self._held.setdefault(request.handle, set())
        new = {item.digest for item in found.encodings}
        for item in request.media_between(first, first + count):
            self.num_hits += item.digest not in held and item.digest not in new
            held.add(item.digest)
            self._outputs[item.digest].holders.add(request.handle)

    def offer(self, request: Request, want: int) -> int:
        """See `Resource.offer`."""
        return self.reach(request, request.num_hit_tokens, want)

    def take(self, request: Request) -> None:
        """Do nothing: outputs are held from the first chunk that needs them."""

    def give_back(self, request: Request) -> None:
        """The request leaves its row, and holds nothing any more."""
        held = self._held.pop(request.handle, None)
        for digest in sorted(held) if held else ():
            self._let_go(digest, request.handle)

    @property
    def has_encodings(self) -> bool:
        """Whether the current plan has items to make rows of."""
        return bool(self._encodings)

    def take_changes(self, step_id: int) -> tuple[list[bytes], list[MediaItem]]:
        """The outputs that the current plan drops, and the items that it then makes rows of."""
        if not self._encodings and not self._dropped:
            return [], []
        for digest in self._encodings:
            self._outputs[digest].step_id = step_id
        self.num_encoded += len(self._encodings)
        changes = list(self._dropped), list(self._encodings.values())
        self._dropped, self._encodings = {}, {}
        return changes

    # Results

    def confirm(self, request: Request, end: int) -> None:
        """A step has succeeded that computed the request's tokens up to `end`: it lets go of items
        before that.
        """
        held = self._held.get(request.handle)
        if not held:
            return
        planned = max(end, request.num_computed_tokens)
        needed = {item.digest for item in request.media_between(end, planned)}
        for digest in sorted(held - needed):
            held.remove(digest)
            self._let_go(digest, request.handle)

    def fail(self, step_id: int, digests: Iterable[bytes]) -> None:
        """A step could not make these rows."""
        for digest in digests:
            output = self._outputs.get(digest)
            if output is not None and output.step_id == step_id:
                self._drop(digest)

    def end(self, done: Iterable[bytes], failed: Iterable[bytes]) -> None:
        """Note outputs that were deferred: these are there, those could not be made."""
        for digest in done:
            output = self._outputs[digest]
            output.is_ready = True
            if output.is_stale:
                self._drop(digest)
        for digest in failed:
            self._drop(digest)

    def forget_all(self) -> None:
        """Drop all outputs, also those that are held, whose requests have them made again."""
        for digest, output in list(self._outputs.items()):
            if output.is_ready:
                self._drop(digest)
            else:
                output.is_stale = True

    # Details

    def _look(self, request: Request, first: int, end: int) -> _Reach:
        """See how far the request gets in [first, end)."""
        encodings: list[MediaItem] = []
        victims: list[bytes] = []
        needed: set[bytes] = set()
        num_new = 0
        for item in request.media_between(first, end):
            digest = item.digest
            if digest in needed:
                continue
            output = None if digest in victims else self._outputs.get(digest)
            if output is not None and output.is_ready:
                needed.add(digest)
                self._wanted.setdefault(digest, request.handle)
                continue
            if output is None and not self._is_for_a_later_step(item, num_new):
                kept = needed.union(victims)
                more = self._make_room(item, num_new, victims, kept, request.handle)
                if more is None:
                    self._lacking = request.handle if self._lacking is None else self._lacking
                elif self.is_deferred:
                    for victim in more:
                        self._drop(victim)
                    self._begin(item, is_ready=False)
                else:
                    victims += more
                    encodings.append(item)
                    num_new += item.num_rows
                    needed.add(digest)
                    self._wanted.setdefault(digest, request.handle)
                    continue
            end = min(end, max(first, item.start))
            if not self.is_deferred:
                break
        return _Reach(end, encodings, victims)

    def _is_for_a_later_step(self, item: MediaItem, num_new: int) -> bool:
        """Whether streams would wait too long for an item beside those of other requests, and
        `num_new` rows of its own one.
        """
        if self._most_rows is None or not self._encodings or self.is_deferred:
            return False
        num_rows = sum(planned.num_rows for planned in self._encodings.values())
        return num_rows + num_new + item.num_rows > self._most_rows

    def _make_room(
        self,
        item: MediaItem,
        num_new: int,
        victims: Sequence[bytes],
        kept: Collection[bytes],
        handle: int,
    ) -> list[bytes] | None:
        """The outputs to drop for the rows of an item, after `num_new` others that take the room of
        `victims`; None if there is no room. `kept` are not dropped for it.
        """
        if self._lacking not in (None, handle):
            return None
        free = self.num_free - num_new + sum(self._outputs[v].num_rows for v in victims)
        more = []
        for digest, output in self._outputs.items():
            if free >= item.num_rows:
                break
            is_free = output.is_ready and not output.holders and digest not in kept
            if is_free and self._wanted.get(digest, handle) == handle:
                more.append(digest)
                free += output.num_rows
        return more if free >= item.num_rows else None

    def _begin(self, item: MediaItem, *, is_ready: bool) -> None:
        self._outputs[item.digest] = _Output(item.num_rows, is_ready=is_ready)
        self._encodings[item.digest] = item
        self.num_free -= item.num_rows

    def _let_go(self, digest: bytes, handle: int) -> None:
        """A request does not need an output any more, which is now the one that was used last."""
        output = self._outputs.pop(digest)
        self._outputs[digest] = output
        output.holders.discard(handle)

    def _drop(self, digest: bytes) -> None:
        output = self._outputs.pop(digest)
        self.num_free += output.num_rows
        for handle in output.holders:
            self._held[handle].discard(digest)
        if self._known[digest][1] == 0:
            del self._known[digest]
        if self._encodings.pop(digest, None) is None:  # or it was planned for this very step
            self._dropped[digest] = None


def _check(item: MediaItem, after: int, num_tokens: int) -> None:
    """Raise RequestError unless an item has its rows at places of the prompt after the item before
    it.
    """
    places = item.places
    if not places or any(start >= end for start, end in places):
        raise RequestError("an item of media stands at no position of the prompt")
    borders = [after, *(border for place in places for border in place), num_tokens]
    if any(left > right for left, right in zip(borders, borders[1:], strict=False)):
        raise RequestError("items of media do not stand one after the other in the prompt")
    if sum(end - start for start, end in places) != item.num_rows:
        raise RequestError("an item of media has more or fewer rows than positions")
    if item.is_bidirectional and len(places) > 1:
        raise RequestError("a bidirectional item of media has more than one range of positions")
    if item.prefix and not item.end <= item.prefix <= num_tokens:
        raise RequestError("an item of media is not a part of the prefix that attends to it")
