"""The collector stands still during imports, and is as before afterwards."""

import gc
import weakref

import pytest

import quire
from quire.start_up import without_collections


class Thing:
    """An object that the collector follows."""


@pytest.fixture(autouse=True)
def collector():
    """As it is in a new process."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_within_and_what_was_made_is_old():
    with without_collections():
        assert not gc.isenabled()
        made = [Thing() for _ in range(10_000)]
    assert gc.isenabled() and not gc.get_freeze_count()
    young = {id(thing) for old in (0, 1) for thing in gc.get_objects(generation=old)}
    assert young.isdisjoint(map(id, made))


def test_garbage_is_collected_later():
    with without_collections():
        thing = Thing()
        thing.itself = thing
        number = id(thing)
        del thing
    gc.collect()
    assert number not in map(id, gc.get_objects())


def test_garbage_is_young_after_an_access_to_an_imported_name():
    quire.SamplingParams  # noqa: B018, the first access imports it
    thing = Thing()
    thing.itself, reference = thing, weakref.ref(thing)
    del thing
    quire.SamplingParams  # noqa: B018
    gc.collect(0)
    assert reference() is None


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with without_collections(), without_collections():
        pass
    assert not gc.isenabled()


def test_frozen_objects_stay_frozen():
    gc.freeze()
    count = gc.get_freeze_count()
    with without_collections():
        pass
    assert gc.get_freeze_count() > count // 2 and gc.isenabled(), "but for those that have ended"


def test_an_error_within_leaves_it_on():
    with pytest.raises(ValueError, match="no"), without_collections():
        raise ValueError("no")
    assert gc.isenabled()


def test_what_lasts_is_never_looked_at_again():
    with without_collections(lasting=True):
        made = [Thing() for _ in range(10_000)]
    assert gc.isenabled() and gc.get_freeze_count() >= len(made)
    seen = set(map(id, gc.get_objects()))
    assert seen.isdisjoint(map(id, made))
    thing = Thing()
    thing.itself, reference = thing, weakref.ref(thing)
    del thing
    gc.collect()
    assert reference() is None, "what was made later is collected"
