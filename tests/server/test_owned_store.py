"""What is kept for clients: whose it is, how many, how much."""

from dataclasses import dataclass, field
from itertools import count

import pytest

from quire.server.owned_store import OwnedStore

NUMBERS = count()


@dataclass
class Kept:
    num_bytes: int = 1
    is_over: bool = True
    owner: bytes | None = None
    id: str = field(default_factory=lambda: str(next(NUMBERS)))


def added(store, *items):
    for item in items:
        assert store.add(item)
    return items


def test_only_its_owner_gets_it():
    store = OwnedStore()
    own, other = added(store, Kept(owner=b"a"), Kept(owner=b"b"))
    assert store.get(own.id, b"a") is own and store.get(own.id, b"b") is None
    assert store.get(own.id, None) is None and store.of(b"b") == [other]


def test_the_oldest_makes_room_and_a_use_renews():
    store = OwnedStore(limit=2)
    first, second = added(store, Kept(), Kept())
    store.renew(first.id)
    (third,) = added(store, Kept())
    assert store.of(None) == [third, first]
    store.remove(first.id)
    store.remove(first.id)
    assert store.of(None) == [third]


def test_bytes_are_bounded():
    store = OwnedStore(max_bytes=10)
    first, second, third = added(store, Kept(4), Kept(4), Kept(2))
    assert store.of(None) == [third, second, first]
    (fourth,) = added(store, Kept(5))
    assert store.of(None) == [fourth, third]
    assert not store.add(Kept(11))
    assert store.of(None) == [fourth, third]


def test_what_grows_makes_others_go():
    store = OwnedStore(max_bytes=10)
    first, second, third = added(store, Kept(2), Kept(2), Kept(2))
    first.num_bytes = 7
    store.renew(first.id)
    assert store.of(None) == [first, third]


def test_what_grows_past_the_bound_itself_stays():
    store = OwnedStore(max_bytes=10)
    first, second = added(store, Kept(2), Kept(2))
    first.num_bytes = 11
    store.renew(first.id)
    assert store.of(None) == [first]
    store.renew("unknown")
    (third,) = added(store, Kept(1))
    assert store.of(None) == [third]


@pytest.mark.parametrize("limits", [{"limit": 2}, {"max_bytes": 2}])
def test_what_is_not_over_stays(limits):
    store = OwnedStore(**limits)
    running = added(store, Kept(is_over=False), Kept(is_over=False))
    assert not store.add(Kept())
    running[1].is_over = True
    (last,) = added(store, Kept())
    assert store.of(None) == [last, running[0]]


def test_a_store_of_none_is_closed():
    store = OwnedStore(limit=0)
    assert not store.is_open and not store.add(Kept())
