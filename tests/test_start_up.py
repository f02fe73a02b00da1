"""The collector stands still during imports, modules of frames are found without a search, and all
is as before afterwards.
"""

import gc
import inspect
import os
import sys
import weakref

import pytest

import quire
from quire.start_up import quick_imports, without_collections


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


def frames():
    """One of this module, some without a file or a module, and one that says another's name."""
    here = sys._getframe()
    yield here
    for names in ({}, {"__name__": "nobody"}, {"__name__": "json"}, {"__name__": None}):
        exec("import sys; frame = sys._getframe()", names)
        yield names["frame"]
    code = compile("import sys; frame = sys._getframe()", inspect.getfile(inspect), "exec")
    names = {"__name__": "json"}
    exec(code, names)
    yield names["frame"]


def test_modules_of_frames_are_those_that_a_search_finds(monkeypatch):
    search = inspect.getmodule
    given = [*frames(), quire, os.path.join, "text"]
    right = [search(thing) for thing in given]
    assert right[0] is sys.modules[__name__] and right[5] is inspect
    with quick_imports(), quick_imports():
        assert inspect.getmodule is not search
        assert [inspect.getmodule(thing) for thing in given] == right
        assert inspect.getframeinfo(given[0]).filename == __file__
        monkeypatch.setattr(os.path, "realpath", None)
        assert inspect.getmodule(given[0]) is right[0], "without a search"
        monkeypatch.undo()
    assert inspect.getmodule is search
