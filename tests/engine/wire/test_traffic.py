"""Lost messages that leave no gap are noticed by heartbeats, and slowness is not taken for loss."""

import pytest

from quire.engine.wire.delivery_monitor import DeliveryMonitor
from quire.engine.wire.messages import Heartbeat
from quire.processes.codec import FrameOrder, LostFrames


def test_each_message_counts_once_and_none_may_be_missing():
    order = FrameOrder()
    assert [order.accept(number) for number in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    with pytest.raises(LostFrames, match="message 5 came after message 3"):
        order.accept(5)


def test_an_output_that_never_comes_is_lost():
    traffic = DeliveryMonitor(patience_s=5.0)
    beat = Heartbeat(num_sent=4)
    with pytest.raises(LostFrames, match="message 4"):
        for _ in range(20):
            traffic.look(beat, num_taken=3, passed_s=0.5)
    assert traffic._our_looks_s <= 6.0


def test_an_output_that_comes_late_is_not_lost():
    traffic = DeliveryMonitor(patience_s=5.0)
    for number in range(200):
        traffic.look(Heartbeat(num_sent=number + 5), num_taken=number, passed_s=0.5)


def test_an_input_that_an_idle_core_never_takes_is_lost():
    traffic, before = DeliveryMonitor(patience_s=5.0), Heartbeat()
    with pytest.raises(LostFrames, match="message 3"):
        for turn in range(20):
            traffic.note_beat(before, Heartbeat(num_taken=2), num_sent=3, now=turn * 0.5)


def test_beats_that_lay_unread_prove_nothing():
    """A front end that was away sends a message and finds the beats of a minute."""
    traffic, before = DeliveryMonitor(patience_s=5.0), Heartbeat()
    for turn in range(120):
        traffic.note_beat(before, Heartbeat(num_taken=2), num_sent=3, now=60 + turn * 1e-4)
    traffic.note_beat(before, Heartbeat(num_taken=3), num_sent=3, now=60.5)


def test_a_core_in_one_long_step_loses_nothing():
    traffic, before = DeliveryMonitor(patience_s=5.0), Heartbeat(7, True, 0.0)
    for turn in range(200):
        beat = Heartbeat(7, True, turn * 0.5, num_taken=2)
        traffic.note_beat(before, beat, num_sent=30, now=turn * 0.5)
        before = beat
    traffic.note_beat(before, Heartbeat(8, True, 0.0, num_taken=30), num_sent=30, now=100.0)
