"""Blocks in host memory: one slot for each content, least recent out, whole for the next."""

import os

import pytest

from quire.tiers.host_store import HostStore
from quire.tiers.slot_table import SlotTable, table_bytes

SLOT, ROOT = 64, b"ab" * 20


def key(number, group=0):
    return bytes([number]) * 32, group


def opened(slots=3, root=ROOT, fd=-1, slot_bytes=SLOT):
    table = SlotTable(slot_bytes, slots, root, fd)
    memory = memoryview(table.memory)
    places = map(table.start_of, range(slots))
    return HostStore([memory[at : at + slot_bytes] for at in places], table)


def filled(*numbers, slots=3, fd=-1):
    store = opened(slots, fd=fd)
    for number in numbers:
        put(store, number)
    return store


def put(store, number):
    place, evicted = store.make_room()
    store.slot(place)[0] = number
    store.commit(place, key(number), 1, bytes([number]) * 16)
    return evicted


def value(store, number):
    content = store.get(key(number))
    assert content.checksum == bytes([number]) * 16 and content.num_bytes == 1
    return content.slot[0]


@pytest.fixture
def memory():
    fd = os.memfd_create("kv")
    os.ftruncate(fd, table_bytes(SLOT, 3))
    yield fd
    os.close(fd)


def test_a_content_is_found_under_its_own_key():
    store = filled(1, 2)
    assert value(store, 1) == 1 and value(store, 2) == 2
    assert store.get(key(3)) is None and store.get(key(1, group=1)) is None


def test_the_least_recently_used_makes_room():
    store = filled(1, 2, 3)
    store.get(key(1))
    assert put(store, 4) == key(2)
    assert store.get(key(2)) is None
    assert [value(store, n) for n in (1, 3, 4)] == [1, 3, 4]


def test_slots_of_what_is_dropped_are_used_again():
    store = filled(1, 2, 3)
    store.drop(key(2))
    assert put(store, 4) is None and len(store) == 3
    store.clear()
    assert len(store) == 0 and [put(store, n) for n in (5, 6, 7)] == [None] * 3


def test_a_content_is_stored_once():
    with pytest.raises(AssertionError):
        filled(1, 1)


def test_what_is_held_stays():
    store = filled(1, 2, 3)
    held = store.get(key(1))
    store.hold(held)
    assert [put(store, n) for n in (4, 5)] == [key(2), key(3)]
    store.clear()
    assert [put(store, n) for n in (6, 7)] == [None] * 2 and held.slot[0] == 1
    assert store.hold(store.get(key(6))), "less than half of the slots are held"
    assert not store.hold(store.get(key(7))), "others need room"
    store.release(key(1), held)
    assert put(store, 8) is None, "its slot is free"


def test_there_is_no_room_where_all_is_held_or_filled():
    store = filled(1, slots=2)
    store.hold(store.get(key(1)))
    assert store.make_room() is not None and store.make_room() is None


def test_the_next_process_finds_what_was_whole(memory):
    store = filled(1, 2, 3, fd=memory)
    store.get(key(1))
    place, _ = store.make_room()
    store.slot(place)[0] = 9  # and it dies
    again = opened(fd=memory)
    assert list(again) == [key(3), key(1)], "in the order of their use"
    assert [value(again, n) for n in (3, 1)] == [3, 1]
    assert put(again, 4) is None and put(again, 5) == key(3)


def test_dropped_contents_are_not_found_by_the_next_process(memory):
    filled(1, 2, fd=memory).drop(key(2))
    assert list(opened(fd=memory)) == [key(1)]
    opened(fd=memory).clear()
    assert not list(opened(fd=memory))


@pytest.mark.parametrize("change", [{"root": b"cd" * 20}, {"slots": 2}, {"slot_bytes": 32}])
def test_memory_of_another_root_or_shape_is_empty(change, memory):
    filled(1, 2, fd=memory)
    assert not list(opened(**{"fd": memory, **change}))
    assert not list(opened(fd=memory)), "what was there is gone"


def test_disowned_memory_is_empty_for_others(memory):
    store = filled(1, fd=memory)
    store.disown()
    put(store, 2)
    assert value(store, 2) == 2 and not list(opened(fd=memory))


def test_parts_of_one_memory_do_not_meet():
    size = table_bytes(SLOT, 3)
    fd = os.memfd_create("kv")
    os.ftruncate(fd, 2 * size)
    tables = [SlotTable(SLOT, 3, ROOT, fd, offset) for offset in (0, size)]
    for number, table in enumerate(tables, 1):
        table.memory[table.start_of(2)] = number
    assert [table.memory[table.start_of(2)] for table in tables] == [1, 2]
    os.close(fd)
