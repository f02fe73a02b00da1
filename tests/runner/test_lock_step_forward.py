"""A pass of cores that share experts is one round, whether it succeeds or not."""

import pytest

from quire.errors import PeersLost
from quire.runner.forward.lockstep_forward import LockStepForward


class Exchange:
    def __init__(self, calls, is_lost=False):
        self.calls, self.is_lost = calls, is_lost

    def begin(self, is_unfinished):
        if self.is_lost:
            raise PeersLost("gone")
        self.calls.append(("begin", is_unfinished))

    def give_up(self, reason):
        self.calls.append(reason)

    def finish(self):
        self.calls.append("finish")


class Inner:
    def __init__(self, calls, error=None):
        self.calls, self.error = calls, error

    def __call__(self, batch, *, samples_all):
        self.calls.append((batch, samples_all))
        if self.error is not None:
            raise self.error
        return "hidden"

    def logits(self, hidden, last):
        return hidden, last

    def release(self):
        self.calls.append("release")

    def record(self):
        self.calls.append("record")


def test_a_pass_is_inside_a_round():
    calls = []
    forward = LockStepForward(Inner(calls), Exchange(calls))
    assert forward("batch", samples_all=True) == "hidden"
    assert calls == [("begin", True), ("batch", True), "finish"]
    assert forward.logits("hidden", None) == ("hidden", None)
    forward.release()
    forward.record()
    assert calls[3:] == ["release", "record"]


def test_a_pass_that_fails_ends_its_round_before_it_raises():
    calls = []
    forward = LockStepForward(Inner(calls, ZeroDivisionError()), Exchange(calls))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            forward("half", samples_all=False)
    # the core's other workers are let go first: their rounds end with this one's
    gone = "a pass failed: "
    assert calls == [("begin", True), ("half", False), gone, "finish"] * 2


def test_without_the_others_nothing_runs():
    calls = []
    forward = LockStepForward(Inner(calls), Exchange(calls, is_lost=True))
    with pytest.raises(PeersLost):
        forward("batch", samples_all=True)
    assert calls == []
