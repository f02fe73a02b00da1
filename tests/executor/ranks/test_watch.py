"""When a rank counts as hung, without processes and without waiting."""

import os
import threading

from quire.executor.ranks.board import RankBoard, RankSigns
from quire.executor.ranks.watch import (
    IMPORTING_S,
    LOADING_S,
    LOOK_S,
    SILENT_S,
    STOPPED_S,
    RankJudge,
)
from quire.processes.process_state import is_starved, thread_times

NOBODY = lambda rank: False  # noqa: E731


class Ranks:
    """Two ranks whose signs a test sets, and looks at them at the right times."""

    def __init__(self, *, is_loading=False):
        self.judge = RankJudge(2)
        self.judge.is_loading = self.judge._was_loading = is_loading
        self.beats, self.done, self.collectives = [0, 0], [0, 0], [0, 0]

    def look(
        self,
        seconds,
        *,
        beating=(0, 1),
        every=LOOK_S,
        step_tokens=None,
        is_stopped=NOBODY,
        starved=(),
    ):
        """Look for so many seconds; what was found first."""
        for _ in range(round(seconds / every)):
            for rank in beating:
                self.beats[rank] += 1
            signs = [RankSigns(*each) for each in zip(self.beats, self.done, strict=True)]
            self.judge.look(
                every, signs, self.collectives, step_tokens=step_tokens, starved=starved
            )
            if found := self.judge.verdict(is_stopped):
                return found
        return None


def test_ranks_that_beat_and_wait_for_work_are_well():
    assert Ranks().look(1000.0) is None


def test_a_silent_rank_hangs_after_ten_seconds():
    ranks = Ranks()
    assert ranks.look(SILENT_S - 0.5, beating=[0]) is None
    assert ranks.look(1.0, beating=[0]) == (1, "gave no sign of life for 10.2 s")


def test_a_stopped_rank_hangs_at_once_and_one_that_is_merely_silent_does_not():
    stopped = lambda rank: rank == 1  # noqa: E731
    assert Ranks().look(2 * STOPPED_S, beating=[0]) is None
    assert Ranks().look(2 * STOPPED_S, beating=[0], is_stopped=stopped)[0] == 1
    assert Ranks().look(2 * STOPPED_S, is_stopped=stopped) is None


def test_a_rank_that_is_stopped_while_it_loads_hangs_at_once():
    stopped = lambda rank: rank == 1  # noqa: E731
    assert Ranks(is_loading=True).look(2 * STOPPED_S, beating=[0], is_stopped=stopped)[0] == 1


def test_loading_may_be_silent_for_longer_and_importing_for_longer_still():
    ranks = Ranks(is_loading=True)
    assert ranks.look(IMPORTING_S - 1, beating=[0]) is None
    assert ranks.look(2.0, beating=[0])[0] == 1
    ranks = Ranks(is_loading=True)
    assert ranks.look(1.0) is None
    assert ranks.look(LOADING_S - 1, beating=[0]) is None
    assert ranks.look(2.0, beating=[0])[0] == 1


def test_what_a_rank_finishes_is_a_sign_of_life():
    """Its thread of signs may get no time where the machine has little."""
    ranks = Ranks(is_loading=True)
    assert ranks.look(1.0) is None
    assert ranks.look(LOADING_S - 1, beating=[0]) is None
    ranks.judge.is_loading = False
    assert ranks.look(SILENT_S - 1, beating=[0]) is None, "it has answered that it is ready"
    for place in (ranks.done, ranks.collectives):
        place[1] += 1
        assert ranks.look(SILENT_S - 1, beating=[0]) is None
    assert ranks.look(2.0, beating=[0])[0] == 1


def test_time_that_others_had_does_not_count():
    ranks = Ranks()
    assert ranks.look(SILENT_S - 1, beating=[0]) is None
    assert ranks.judge.suspects() == [1]
    assert ranks.look(600.0, beating=[0], starved=[1]) is None
    assert ranks.look(2.0, beating=[0])[0] == 1
    ranks = Ranks()
    ranks.judge.note_step(0.5, 1)
    assert ranks.look(SILENT_S - 1, step_tokens=1) is None
    assert ranks.judge.suspects() == [0, 1]
    assert ranks.look(600.0, step_tokens=1, starved=[0]) is None
    assert ranks.look(2.0, step_tokens=1) is not None


def test_a_thread_is_starved_that_can_run_and_does_not():
    before = {1: (False, 0), 2: (True, 10**9)}
    assert is_starved(before, {1: (False, 0), 2: (True, 10**9 + 10**7)}, 0.25)
    assert not is_starved(before, {1: (False, 0), 2: (True, 10**9 + 10**8)}, 0.25), "it spins"
    assert not is_starved(before, {1: (False, 0), 2: (False, 10**9)}, 0.25), "it waits"
    assert not is_starved({}, {2: (True, 10**9)}, 0.25)
    own = thread_times(os.getpid())
    assert own[threading.get_native_id()][0] and own[threading.get_native_id()][1] > 0
    assert thread_times(2**30) == {}


def test_a_watcher_that_was_late_judges_nobody():
    ranks = Ranks()
    assert ranks.look(2.0) is None
    assert ranks.look(600.0, beating=[], every=600.0) is None
    assert ranks.look(2.0) is None


def test_a_step_in_which_nobody_gets_on_has_a_bound_that_follows_from_steps():
    ranks = Ranks()
    assert ranks.look(200.0, step_tokens=1) is None, "no step has been measured"
    ranks.judge.note_step(3.0, 1)
    ranks.done = [4, 4]
    assert ranks.look(29.0, step_tokens=1) is None
    ranks.collectives = [1, 0]
    assert ranks.look(29.0, step_tokens=1) is None
    assert ranks.look(2.0, step_tokens=1) == (
        1, "and the others have finished nothing of a step for 30 s",
    )  # fmt: skip


def test_a_step_of_more_tokens_than_any_so_far_may_take_longer():
    """A stage alone has no collectives: it finishes nothing before the whole chunk."""
    for tokens, bound_s in ((1, 10), (4, 40), (512, 300)):
        ranks = Ranks()
        ranks.judge.note_step(0.5, 1)
        assert ranks.look(bound_s - 1.0, step_tokens=tokens) is None
        assert ranks.look(2.0, step_tokens=tokens) is not None
    ranks = Ranks()
    ranks.judge.note_step(40.0, 512)
    assert ranks.look(399.0, step_tokens=1024) is None
    assert ranks.look(2.0, step_tokens=1024) is not None


def test_nobody_is_stuck_outside_of_a_step():
    ranks = Ranks()
    ranks.judge.note_step(0.01, 1)
    assert ranks.look(100.0) is None


def test_a_board_is_shared_by_its_descriptor():
    board = RankBoard.open(3)

    other = RankBoard(os.dup(board.fileno()), 3)
    other.beat(2)
    other.beat(2)
    other.note_done(1)
    assert board.signs() == [RankSigns(0, 0), RankSigns(0, 1), RankSigns(2, 0)]
    other.close()
    board.close()


def test_a_board_that_is_closed_twice_closes_no_descriptor_of_others():

    board = RankBoard.open(1)
    board.close()
    later = os.open("/", os.O_RDONLY)
    board.close()
    os.fstat(later)
    os.close(later)
