"""Binding threads to CPUs: the calling one for a while, those that it starts for good."""

import os
import threading

import pytest

from quire.hardware.affinity import bind_thread, bound_thread

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound on this system"
)


def in_a_thread(action):
    """Run `action` in a thread of its own, whose binding ends with it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_a_bound_thread_starts_stay_bound():
    def act():
        one = min(os.sched_getaffinity(0))
        stay = threading.Event()
        with bound_thread({one}):
            started = threading.Thread(target=stay.wait)
            started.start()
            inside = os.sched_getaffinity(0)
        found = inside, os.sched_getaffinity(started.native_id), os.sched_getaffinity(0)
        stay.set()
        started.join()
        return one, *found

    before = os.sched_getaffinity(0)
    one, inside, started, after = in_a_thread(act)
    assert inside == started == {one} and after == before


def test_nothing_changes_without_cpus_or_against_the_system(caplog):
    def act():
        bind_thread(())
        with bound_thread(()):
            bind_thread({1 << 15})
        return os.sched_getaffinity(0)

    assert in_a_thread(act) == os.sched_getaffinity(0)
    (message,) = caplog.messages
    assert message.startswith("Threads are not bound to CPUs 32768: ")
