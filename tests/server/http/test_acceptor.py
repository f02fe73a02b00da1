"""Who makes way when the descriptors are used up, by a clock of the test's own."""

import os
import resource

import pytest

from quire.server.http.acceptor import RESERVE, most_connections
from quire.server.http.connection import Connections


class Crowd:
    """A listener's connections, by name, at a simulated time."""

    def __init__(self, limit, **options):
        self.now = 100.0
        self.closed = []
        self.unread = set()
        self.all = Connections(limit, clock=lambda: self.now, **options)

    def accept(self, name):
        """Accept a connection; the seconds until there was room."""
        since = self.now
        while not self.all.make_room():
            assert self.now - since < 600, "there is never room"
            self.now += self.all.next_room_s
        self.all.enter(name, lambda: self.closed.append(name), lambda: name in self.unread)
        return self.now - since


@pytest.mark.parametrize("limit", [1, 4, 64])
def test_a_crowd_that_says_nothing_is_passed_in_seconds(limit):
    crowd = Crowd(limit)
    waited_s = sum(crowd.accept(number) for number in range(400))
    assert waited_s + crowd.accept("mine") < 6
    assert len(crowd.closed) == 401 - limit


def test_a_crowd_of_begun_bodies_takes_longer_and_passes_too():
    crowd, waited_s = Crowd(4), 0.0
    for number in range(400):
        waited_s += crowd.accept(number)
        crowd.all.note_head(number)
    assert waited_s < 15
    assert 0 < crowd.accept("mine") < 0.2


def test_a_single_new_client_waits_until_one_has_stalled_for_half_a_second():
    crowd = Crowd(2)
    crowd.accept("a")
    crowd.now += 0.4
    crowd.accept("b")
    assert 0.09 < crowd.accept("mine") < 0.15
    assert crowd.closed == ["a"]


def test_patience_comes_back_when_there_is_room():
    crowd = Crowd(2)
    for number in range(50):
        crowd.accept(number)
    for _ in range(10):
        crowd.all.leave(next(iter(crowd.all._open)))
        crowd.accept(object())
    assert crowd.accept("mine") > 0.4


def test_what_has_come_and_was_not_read_counts():
    """As while the loop did something else."""
    crowd = Crowd(2)
    crowd.accept("reads late")
    crowd.accept("silent")
    crowd.unread.add("reads late")
    crowd.now += 1
    crowd.accept("mine")
    assert crowd.closed == ["silent"]


def test_one_that_is_idle_stays_while_data_of_a_stalled_one_is_to_be_read():
    crowd = Crowd(2)
    crowd.accept("idle")
    crowd.all.note_busy("idle")
    crowd.all.note_idle("idle")
    crowd.accept("reads late")
    crowd.unread.add("reads late")
    crowd.now += 0.6
    assert not crowd.all.make_room()
    crowd.unread.clear()
    assert crowd.all.make_room() and crowd.closed == ["reads late"]


def test_one_whose_data_nobody_reads_does_not_hold_up_others_for_ever():
    crowd = Crowd(2)
    crowd.accept("idle")
    crowd.all.note_busy("idle")
    crowd.all.note_idle("idle")
    crowd.accept("never read")
    crowd.unread.add("never read")
    assert crowd.accept("mine") < 3 and crowd.closed == ["idle"]


def test_those_that_are_answered_never_make_way():
    crowd = Crowd(2)
    for name in "ab":
        crowd.accept(name)
        crowd.all.note_head(name)
        crowd.all.note_busy(name)
    crowd.now += 1000
    assert not crowd.all.make_room() and crowd.closed == []


def test_handshakes_have_longer():
    plain, secured = Crowd(1), Crowd(1, has_tls=True)
    for crowd in (plain, secured):
        for number in range(20):
            crowd.accept(number)
    assert plain.accept("mine") < 0.02 and 0.09 < secured.accept("mine") < 0.2


@pytest.mark.parametrize(
    ("free", "room"), [(20, 1), (30, 6), (60, 30), (100, 50), (128, 64), (200, 136), (1000, 936)]
)
def test_a_part_of_the_descriptors_is_left_to_the_rest(monkeypatch, free, room):
    monkeypatch.setattr(os, "listdir", lambda path: ["0"] * 20)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20 + free, 20 + free))
    assert most_connections() == room
    assert RESERVE == 64
