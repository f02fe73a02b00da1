"""Supervised cores that die in virtual time: random traces by the thousand; planted bugs show."""

import gc
import logging

import msgspec
import pytest

from quire.engine.client import journal, supervisor
from quire.engine.client.control_state import ControlState
from quire.engine.client.journal import CoreJournal, JournalEntry
from quire.engine.client.kept_media import KeptMedia, Remaking
from quire.engine.wire.delivery_monitor import Overdue
from quire.processes.codec import FrameOrder
from tests.support.simulation.simulate_faults import SimulatedCores, World, run_traces

NUM_TRACES = 10_000
BY_DEFAULT = 1_000
PART = 1_000


@pytest.fixture(autouse=True)
def silence():
    """Thousands of deaths need no line each, and the collector need not look at torch again."""
    supervisor.logger.setLevel(logging.CRITICAL)
    gc.freeze()
    yield
    gc.unfreeze()
    supervisor.logger.setLevel(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_TRACES, PART))
@pytest.mark.sharp(when=lambda first: first < BY_DEFAULT)
def test_every_request_gets_its_tokens_whatever_dies(first):
    met = run_traces(first, PART)
    innocents = met.pop("innocents blamed", 0)
    assert innocents <= 6, "by chances that coincide, and only so"
    assert all(count >= 30 for count in met.values()) and len(met) >= 13, met


def test_equal_seeds_give_equal_lives():
    first, second = World(3), World(3)
    first.run()
    second.run()
    assert first.clock.now == second.clock.now
    assert [s.output for s in first.stories.values()] == [s.output for s in second.stories.values()]


def merge_output_into_the_prompt(monkeypatch):
    def resumed(self, engine_index):
        whole = [*self.request.prompt_token_ids, *self.output]
        yield msgspec.structs.replace(self.request, prompt_token_ids=whole)

    monkeypatch.setattr(JournalEntry, "resumed", resumed)


def forget_a_token(monkeypatch):
    real = CoreJournal._note_tokens

    def note(self, outputs):
        real(self, outputs)
        for entry in self.entries.values():
            if len(entry.output) == 5:
                entry.output.pop()

    monkeypatch.setattr(CoreJournal, "_note_tokens", note)


def take_repeats(monkeypatch):
    real = FrameOrder.accept
    monkeypatch.setattr(FrameOrder, "accept", lambda self, n: real(self, n) or True)


def pass_over_gaps(monkeypatch):
    def accept(self, number):
        is_new, self.num_taken = number > self.num_taken, max(number, self.num_taken)
        return is_new

    monkeypatch.setattr(FrameOrder, "accept", accept)


def wait_for_ever(monkeypatch):
    monkeypatch.setattr(Overdue, "check", lambda self, *args: None)


def blame_at_once(monkeypatch):
    monkeypatch.setattr(
        CoreJournal, "_blame", lambda self, suspects: suspects if len(suspects) == 1 else []
    )


def try_all_suspects_together(monkeypatch):
    monkeypatch.setattr(journal, "_halves", lambda suspects: iter([suspects] if suspects else []))


def forget_the_pause(monkeypatch):
    monkeypatch.setattr(ControlState, "replay", lambda self: [])


def keep_the_aborted(monkeypatch):
    monkeypatch.setattr(CoreJournal, "drop", lambda self, handle: None)


def lose_those_that_wait(monkeypatch):
    real = CoreJournal._regroup

    def regroup(self, suspects, lost):
        real(self, suspects, lost)
        self._later = self._later[:1]

    monkeypatch.setattr(CoreJournal, "_regroup", regroup)


def forget_what_is_taken_in(monkeypatch):
    monkeypatch.setattr(
        SimulatedCores, "dying_step", lambda self, index: self.links[index].life.board
    )


def send_what_the_journal_keeps(monkeypatch):
    monkeypatch.setattr(Remaking, "message", lambda self: self._request)


def forget_the_media(monkeypatch):
    real = JournalEntry.resumed

    def resumed(self, engine_index):
        for message in real(self, engine_index):
            message.media = None
            yield message

    monkeypatch.setattr(JournalEntry, "resumed", resumed)


def keep_media_for_ever(monkeypatch):
    monkeypatch.setattr(KeptMedia, "drop", lambda self, handle: None)


BUGS = [
    send_what_the_journal_keeps,
    forget_the_media,
    keep_media_for_ever,
    forget_what_is_taken_in,
    merge_output_into_the_prompt,
    forget_a_token,
    take_repeats,
    pass_over_gaps,
    wait_for_ever,
    blame_at_once,
    try_all_suspects_together,
    forget_the_pause,
    keep_the_aborted,
    lose_those_that_wait,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_traces(0, 1500)
