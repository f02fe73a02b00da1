"""Admission: the hint when to come back, by a clock that stands where it is put."""

import random

import pytest

from quire.engine.frontend.admission import Admission, FadingCount, QueueLimits
from quire.errors import MaxQueuedTokensError, QueueOverflowError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Queue:
    """What admission looks at of an output processor."""

    def __init__(self, num_unfinished=0, num_queued_tokens=0):
        self.num_unfinished = num_unfinished
        self.num_queued_tokens = num_queued_tokens


def hint(admission, num_completions=1):
    with pytest.raises((QueueOverflowError, MaxQueuedTokensError)) as caught:
        admission.check(num_completions)
    return caught.value.retry_after_s


@pytest.mark.parametrize("num_events", [30, 300, 30_000])
def test_a_fading_count_knows_a_steady_rate(num_events):
    chance = random.Random(3)
    count, now = FadingCount(10.0, 0.0), 0.0
    for _ in range(num_events):
        now += chance.uniform(0, 0.5)
        count.add(1, now)
    assert count.rate(now) == pytest.approx(4.0, rel=0.35)
    assert count.at(now + 10) == pytest.approx(count.at(now + 10)), "looking changes nothing"


def test_it_counts_half_after_its_half_life():
    count = FadingCount(2.0, 0.0)
    count.add(8, 0.0)
    assert [count.at(0.0), count.at(2.0), count.at(4.0)] == [8.0, 4.0, 2.0]


def test_limits_are_inclusive():
    queue = Queue(num_unfinished=3, num_queued_tokens=9)
    admission = Admission(queue, QueueLimits(4, 10))
    admission.check(1)
    with pytest.raises(QueueOverflowError):
        admission.check(2)
    queue.num_queued_tokens = 10
    with pytest.raises(MaxQueuedTokensError):
        admission.check(1)
    assert admission.num_rejected == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1}


def test_without_experience_the_hint_is_a_second():
    assert hint(Admission(Queue(4), QueueLimits(4, 10), Clock())) == 1.0


def test_the_hint_follows_the_rate_and_the_crowd():
    clock = Clock()
    admission = Admission(Queue(4), QueueLimits(4, 10), clock)
    for _ in range(600):
        clock.now += 0.5
        admission.note_ended(1)
    alone = hint(admission)
    assert alone == pytest.approx(0.5, rel=0.1), "two end in a second"
    assert hint(admission, 3) == pytest.approx(2.0, rel=0.1), "three, behind one that was refused"
    crowd = [hint(admission) for _ in range(20)]
    assert crowd == sorted(crowd) and crowd[-1] == pytest.approx(11, rel=0.1)
    clock.now += 20
    assert hint(admission) == pytest.approx(2.0, rel=0.1), (
        "the crowd is forgotten; so half the rate"
    )
    for _ in range(10_000):
        hint(admission)
    assert hint(admission) == 60.0
