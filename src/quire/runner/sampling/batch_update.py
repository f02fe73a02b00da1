"""Turns two consecutive batches into the update that a custom logits processor gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.params import SamplingParams
from quire.runner.sampling.logits_processor import (
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
)


@dataclass(slots=True, eq=False)
class Member:
    """A request during its time in a row, as processors see it; a resumed request is a new member.

    `output_ids` grows when a sampled token is committed: processors hold this list.
    """

    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]

    def added_at(self, index: int) -> AddedRequest:
        """Return its entry for `BatchUpdate.added`."""
        return (index, self.params, self.prompt_ids, self.output_ids)


@dataclass(slots=True)
class Layout:
    """The batch at a processor's last update; one per processor."""

    members: list[Member] = field(default_factory=list)
    size: int = 0
    """The number of indices that the processor may know."""
    is_known: bool = True
    """False after a failed update: the next one then describes the whole batch again."""

    def update_to(self, members: Sequence[Member]) -> BatchUpdate | None:
        """Return the update from the current batch to `members`, None if they are the same. The
        update counts as failed until `settle` is called.
        """
        is_known, self.is_known = self.is_known, False
        if is_known and _same(self.members, members):
            return None
        size, self.size = self.size, max(self.size, len(members))
        return batch_update(self.members if is_known else [], members, size)

    def settle(self, members: Sequence[Member]) -> None:
        """Note that the processor has taken the update to `members`."""
        self.members = list(members)
        self.size = len(members)
        self.is_known = True


def batch_update(
    before: Sequence[Member], after: Sequence[Member], size_before: int
) -> BatchUpdate:
    """Return the update from `before` to `after`; indices after `before` up to `size_before` are
    emptied.

    Persisting members move by swaps, or one way where the target is empty.
    """
    staying = {id(member) for member in after}
    places: list[Member | None] = [m if id(m) in staying else None for m in before]
    places += [None] * (max(size_before, len(after)) - len(before))
    added = _place(places, after)
    filled = {index for index, *_ in added}
    gone = {i for i, member in enumerate(before) if id(member) not in staying}
    gone.update(range(len(before), size_before))
    return BatchUpdate(
        batch_size=len(after),
        removed=sorted(gone - filled, reverse=True),
        added=added,
        moved=_moves(places, after),
    )


def _same(before: Sequence[Member], after: Sequence[Member]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _place(places: list[Member | None], after: Sequence[Member]) -> list[AddedRequest]:
    """Put the new members of `after` into empty places: their final ones if those are empty."""
    known = {id(member) for member in places if member is not None}
    new = [(i, member) for i, member in enumerate(after) if id(member) not in known]
    added, waiting = [], []
    for index, member in new:
        if places[index] is None:
            places[index] = member
            added.append(member.added_at(index))
        else:
            waiting.append(member)
    empty = (i for i, member in enumerate(places) if member is None)
    for member, index in zip(waiting, list(empty), strict=False):
        places[index] = member
        added.append(member.added_at(index))
    return added


def _moves(places: list[Member | None], after: Sequence[Member]) -> list[MovedRequest]:
    """Move every member to its final place; modifies `places`."""
    index_of = {id(member): i for i, member in enumerate(places) if member is not None}
    moved = []
    for target, member in enumerate(after):
        origin = index_of[id(member)]
        if origin == target:
            continue
        displaced = places[target]
        places[target], places[origin] = member, displaced
        index_of[id(member)] = target
        if displaced is None:
            moved.append((origin, target, MoveDirectionality.UNIDIRECTIONAL))
        else:
            index_of[id(displaced)] = origin
            moved.append((origin, target, MoveDirectionality.SWAP))
    return moved
