"""The journal alone: what is sent when, who is suspected, who is blamed."""

import errno
import os

import pytest

from quire.engine.client.control_state import ControlState
from quire.engine.client.journal import CoreJournal
from quire.engine.process.step_board import StepBoard, board_path, read_step_board
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.delivery_monitor import Overdue
from quire.engine.wire.messages import EngineCoreOutputs
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.processes.codec import FrameOrder, LostFrames
from tests.engine.core.core_over_hashes import request


def journal_of(count):
    journal = CoreJournal(0)
    for handle in range(count):
        assert journal.add(request(handle))
    return journal


def tokens(journal, *handles, times=1):
    for _ in range(times):
        journal.take(EngineCoreOutputs(list(handles), [7] * len(handles)))


def sent(journal):
    return [one.handle for one in journal.due()]


def begin_life(journal):
    journal.restarted()
    return sent(journal)


def test_what_was_emitted_comes_back_as_output():
    journal = journal_of(1)
    first = request(5)
    first.output_token_ids = [1, 2]
    journal.add(first)
    journal.take(EngineCoreOutputs([0, 5], [8, 6, 3, 9], counts=[2, 2]))
    journal.died([0, 5])
    assert journal.due() == []
    journal.restarted()
    first, second = journal.due()
    assert (first.output_token_ids, second.output_token_ids) == ([8, 6], [1, 2, 3, 9])
    assert second.prompt_token_ids == request(5).prompt_token_ids
    assert journal.due() == []


def test_without_suspects_all_go_at_once_and_new_ones_too():
    journal = journal_of(3)
    tokens(journal, 0, 1, 2, times=2)
    assert journal.died([0, 1, 2]) == ([], [])
    assert not journal.add(request(3))
    assert begin_life(journal) == [0, 1, 2, 3]
    assert journal.add(request(4))


def test_suspects_are_tried_in_halves_behind_the_proved():
    journal = journal_of(7)
    tokens(journal, 0, 1, times=2)
    tokens(journal, 2)
    journal.died([0, 1, 2, 3, 4, 5])
    assert begin_life(journal) == [0, 1]
    assert not journal.add(request(9)), "new ones wait"
    tokens(journal, 0, times=2)
    assert sent(journal) == []
    tokens(journal, 1, times=2)
    assert sent(journal) == [2, 3]
    tokens(journal, 2, 3, times=2)
    assert sent(journal) == [4]
    journal.take(EngineCoreOutputs(finished=[Finished(4, FinishReason.STOP)]))
    assert sent(journal) == [5]
    journal.drop(5)
    assert sent(journal) == [6, 9]
    assert journal.add(request(10))


@pytest.mark.parametrize("culprit", range(8))
def test_a_culprit_is_found_alone(culprit):
    journal = journal_of(8)
    live, num_deaths = set(range(8)), 0
    running = set(live)
    while True:
        if culprit in running:
            num_deaths += 1
            blamed, _ = journal.died(running)
            running = set()
            if blamed:
                break
            running.update(begin_life(journal))
        else:
            tokens(journal, *running, times=2)
            running.update(sent(journal))
    assert blamed == [culprit]
    assert num_deaths <= 6
    assert journal.num_fruitless == 0
    rest = set(begin_life(journal))
    for _ in range(9):
        tokens(journal, *rest, times=2)
        rest.update(sent(journal))
    assert rest == live - {culprit}


def test_a_culprit_that_gets_a_token_in_every_life_is_found():
    """Computing all that is known of it works, and the step that decodes it kills."""
    journal = journal_of(2)
    tokens(journal, 0, 1, times=2)
    journal.add(request(2))
    running, blamed = {0, 1, 2}, []
    for _ in range(5):
        blamed, _ = journal.died(running)
        if blamed:
            break
        running = set(begin_life(journal))
        tokens(journal, *running)
        while 0 not in running:
            tokens(journal, *running)
            new = set(sent(journal))
            tokens(journal, *new)
            running |= new
    assert blamed == [0], "who came last is innocent"


def test_one_death_alone_blames_no_request_and_tokens_in_between_clear_it():
    journal = journal_of(1)
    assert journal.died([0]) == ([], [])
    begin_life(journal)
    tokens(journal, 0, times=2)
    journal.add(request(1))
    assert journal.died([1]) == ([], [])
    begin_life(journal)
    tokens(journal, 0, times=2)
    assert sent(journal) == [1]
    assert journal.died([0, 1]) == ([1], [])


def test_a_request_in_no_step_is_not_a_suspect():
    journal = journal_of(3)
    journal.died([1])
    assert begin_life(journal) == [1]
    journal.died(())
    assert begin_life(journal) == [1], "a start that failed clears nobody"
    assert journal.died([1]).blamed == [1]
    assert begin_life(journal) == [0, 2]


def test_deaths_that_bring_nothing_are_counted():
    journal = journal_of(4)
    for count in (1, 2, 3):
        journal.died(())
        assert journal.num_fruitless == count
    begin_life(journal)
    tokens(journal, 0)
    journal.died(None)
    assert journal.num_fruitless == 0


def test_open_input_cannot_be_resumed_but_can_wait():
    journal = journal_of(1)
    first = request(1)
    first.resumable = True
    more = request(1)
    more.continues = True
    journal.add(first)
    assert journal.add(more)
    assert journal.died([0]) == ([], [1])
    second = request(2)
    second.resumable = True
    journal.add(second)
    more.handle = 2
    assert not journal.add(more)
    assert begin_life(journal) == [0]
    tokens(journal, 0, times=2)
    assert sent(journal) == [2, 2]
    gone = request(3)
    gone.continues = True
    assert not journal.add(gone)


def test_a_second_start_is_not_told():
    journal = journal_of(1)
    outputs = EngineCoreOutputs([0], [4], started=[Started(0, 0, 1.0), Started(9, 0, 1.0)])
    journal.take(outputs)
    assert outputs.started == [Started(0, 0, 1.0)]
    again = EngineCoreOutputs(started=[Started(0, 0, 2.0)])
    journal.take(again)
    assert again.started == []


def test_control_is_brought_back():
    state = ControlState()
    state.note(Utility("is_sleeping"), False)
    assert state.replay() == []
    for _ in range(2):
        state.note(Utility("pause_scheduler", ("abort", True)), None)
    paused = Utility("pause_scheduler", ("keep", False))
    assert state.replay() == [paused]
    state.note(Utility("release_kv_cache_memory"), None)
    state.note(Utility("sleep", (2, "abort")), None)
    state.note(Utility("wake_up", (["weights"],)), False)
    assert state.replay() == [
        paused,
        Utility("release_kv_cache_memory"),
        Utility("sleep", (2, "keep")),
        Utility("wake_up", (["weights"],)),
    ]
    state.note(Utility("wake_up", (["kv_cache"],)), True)
    state.note(Utility("resume_scheduler"), None)
    assert state.replay() == []


def test_frames_come_once_and_in_order():
    order = FrameOrder()
    assert [order.accept(n) for n in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    with pytest.raises(LostFrames, match="message 5 came after message 3"):
        order.accept(5)


def test_what_does_not_come_is_overdue():
    overdue = Overdue(2.0)
    overdue.check(3, 1, 0.0)
    overdue.check(4, 2, 1.9)
    overdue.check(9, 3, 2.5)
    overdue.check(9, 8, 4.4)
    with pytest.raises(LostFrames, match="message 9 has not come for 2.1 s"):
        overdue.check(9, 8, 4.6)


def test_a_board_outlives_its_writer(tmp_path):
    path = board_path(tmp_path, 1, 3)
    assert read_step_board(path) == frozenset()
    board = StepBoard(path, 4)
    assert read_step_board(path) == frozenset()
    board.write([2**40 + 1, 5])
    assert read_step_board(path) == {2**40 + 1, 5}
    board.write([7])
    assert read_step_board(path) == {7}
    board.note_intake(2**62)
    assert read_step_board(path) == {7, 2**62}
    board.write([1, 2, 3, 4])
    board.note_intake(0)
    assert read_step_board(path) == {0, 1, 2, 3, 4}
    board.note_intake(None)
    assert read_step_board(path) == {1, 2, 3, 4}
    board.write(range(5))
    assert read_step_board(path) is None, "more than it can hold"
    board.close()
    path.write_bytes(b"")
    assert read_step_board(path) is None


def test_a_board_without_room_names_its_file(tmp_path, monkeypatch):
    def allocate(fd, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate, raising=False)
    path = board_path(tmp_path, 1, 3)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        StepBoard(path, 4)
    assert read_step_board(path) is None


def test_a_request_that_falls_with_another_core_is_not_a_suspect_and_the_life_does_not_count():
    journal = CoreJournal(0)
    for handle in (1, 2):
        assert journal.add(request(handle))
    for _ in range(5):
        death = journal.ended_with_group()
        assert (death.blamed, death.lost) == ([], [])
        journal.restarted()
        assert [one.handle for one in journal.due()] == [1, 2]
    assert journal.num_fruitless == 0
    assert not journal.is_isolating
