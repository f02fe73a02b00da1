"""The store of blocks in host memory: one slot for each content, the least recently used goes."""

import pytest

from quire.tiers.host_store import HostStore


def key(number):
    return bytes([number]) * 32, 0


def filled(*numbers, slots=3):
    store = HostStore([bytearray(1) for _ in range(slots)])
    for number in numbers:
        put(store, number)
    return store


def put(store, number):
    slot, evicted = store.put(key(number))
    slot[0] = number
    return evicted


def test_a_content_is_found_under_its_own_key():
    store = filled(1, 2)
    assert store.get(key(1))[0] == 1 and store.get(key(2))[0] == 2
    assert store.get(key(3)) is None and store.get((key(1)[0], 1)) is None


def test_the_least_recently_used_makes_room():
    store = filled(1, 2, 3)
    store.get(key(1))
    assert put(store, 4) == key(2)
    assert store.get(key(2)) is None
    assert [store.get(key(n))[0] for n in (1, 3, 4)] == [1, 3, 4]


def test_slots_of_what_is_dropped_are_used_again():
    store = filled(1, 2, 3)
    store.drop(key(2))
    assert put(store, 4) is None and len(store) == 3
    store.clear()
    assert len(store) == 0 and [put(store, n) for n in (5, 6, 7)] == [None] * 3


def test_a_content_is_stored_once():
    with pytest.raises(AssertionError):
        filled(1, 1)
