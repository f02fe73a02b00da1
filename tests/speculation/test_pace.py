"""How many drafts are made, by what was accepted and what steps cost; with times that are given."""

import numpy as np
import pytest

from quire.runner.drafting.pace import FixedPace, MeasuredPace, StepTimes

K = 7


def learnt(chance, times, num_rows=1, steps=60, seed=0):
    """A pace after steps of these rows, and the drafts of its last ones."""
    pace = MeasuredPace(K, 64, 32 * K)
    rows = list(range(num_rows))
    draw = np.random.default_rng(seed)
    drafts = np.zeros(num_rows, dtype=np.int64)
    asked = []
    for _ in range(steps):
        wrong = draw.random((num_rows, K + 1)) >= chance
        wrong[np.arange(num_rows), drafts] = True
        right = wrong.argmax(axis=1)
        pace.note_accepted(rows, drafts, right)
        size = num_rows + int(drafts.sum())
        pace.note_time(size, times(size))
        pace.note_drafting(int(drafts.max()), 0.0)
        drafts = np.array(pace.limits(rows, [100] * num_rows))
        asked.append(drafts)
    return pace, np.array(asked[-20:])


def bound_by_memory(size):
    return 0.010 + 0.0001 * size


def bound_by_computation(size):
    return 0.010 * size


def test_right_drafts_of_cheap_steps_are_made_in_full():
    asked = learnt(1.0, bound_by_memory, steps=400)[1].ravel().tolist()
    assert asked.count(K) >= len(asked) - 1, "but for a rest now and then"


def test_drafts_that_cost_what_they_save_are_not_made():
    for chance in (0.0, 0.5, 0.95):
        asked = learnt(chance, bound_by_computation, num_rows=8)[1]
        assert asked.sum() <= 8 * 2, "but for one that is tried now and then"


def test_wrong_drafts_end():
    assert learnt(0.0, bound_by_memory, steps=200)[1].sum() <= 3


def test_the_number_follows_from_what_is_accepted():
    few, many = (learnt(c, lambda n: 0.010 + 0.0015 * n, steps=200)[1].mean() for c in (0.4, 0.9))
    assert 0 < few < many <= K


def test_a_row_with_good_drafts_gets_more_than_one_with_bad_ones():
    pace = MeasuredPace(K, 8, 32 * K)
    pace.note_time(2, 0.010)
    for _ in range(30):
        pace.note_accepted([0, 1], np.array([3, 3]), np.array([3, 0]))
        pace.note_time(8, 0.0150)
        pace.note_time(2, 0.010)
    good, bad = pace.limits([0, 1], [100, 100])
    assert good > bad
    pace.forget(0)
    assert pace.limits([0, 1], [100, 100])[0] < good


def test_drafts_that_are_slow_to_make_are_not_made():
    pace = learnt(0.8, bound_by_memory)[0]
    assert max(pace.limits([0], [100])) > 0
    for _ in range(60):
        pace.note_drafting(1, 0.1)
    assert max(pace.limits([0], [100])) == 0


def test_drafts_are_tried_again_and_paused_now_and_then():
    pace = learnt(0.0, bound_by_memory, steps=200)[0]
    asked = [pace.limits([0], [100])[0] for _ in range(2000)]
    assert 2 <= sum(asked) <= 8
    pace = learnt(1.0, bound_by_memory)[0]
    asked = [pace.limits([0], [100])[0] for _ in range(600)]
    assert 1 <= asked.count(0) <= 4


def test_a_try_is_of_few_rows_and_of_others_next_time():
    pace = learnt(0.0, bound_by_computation, num_rows=32)[0]
    rows, tried = list(range(32)), []
    while len(tried) < 8:
        drafts = np.array(pace.limits(rows, [100] * 32))
        if drafts.any():
            assert drafts.sum() == drafts.astype(bool).sum() == 32 // 8
            tried.append(set(np.flatnonzero(drafts).tolist()))
        pace.note_accepted(rows, drafts, np.zeros_like(drafts))
        pace.note_time(32 + int(drafts.sum()), bound_by_computation(32 + int(drafts.sum())))
    assert len(set.union(*tried)) == 32
    assert sum(pace.limits([0, 1], [0, 0])) == 0


def test_no_more_than_there_is_room_for():
    pace = learnt(1.0, bound_by_memory)[0]
    assert pace.limits([0, 1], [2, 0]) == [2, 0]
    assert pace.limits([0], [0]) == [0]
    many = pace.limits(list(range(64)), [100] * 64)
    assert sum(many) <= 32 * K


@pytest.mark.parametrize(
    ("num_rows", "most"), [(1, 3), (4, 3), (5, 3), (8, 3), (9, 0), (16, 0), (99, 0)]
)
def test_ranges_of_batch_sizes(num_rows, most):
    pace = FixedPace(3, [(1, 4, 5), (9, 16, 0)])
    assert pace.limits(list(range(num_rows)), [50] * num_rows) == [most] * num_rows


def test_times_between_known_ones():
    times = StepTimes()
    assert times.of(1, 3) is None
    for _ in range(3):
        assert times.of(1, 3) is None
        times.note(1, 1.0)
    assert times.of(2, 0) is not None
    assert times.of(1, 2).tolist() == pytest.approx([1.0, 1.02, 1.04])
    times.note(5, 3.0)
    assert times.of(1, 6).tolist() == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
    times.note(3, 0.5)
    assert times.of(3, 0).tolist() == [1.0], "more tokens never take less time"
    for _ in range(100):
        times.note(3, 2.0)
    assert times.of(3, 0)[0] == pytest.approx(2.0, rel=0.01)
    for seconds in (9.0, 8.0, 4.0, 9.0):
        times.note(7, seconds)
    assert times.of(7, 0)[0] == pytest.approx(4.4), "what is held up counts little"
