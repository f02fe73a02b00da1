"""Ranks of cores that share experts make the same rounds, whatever becomes of a step."""

from __future__ import annotations

import socket

import pytest

from quire.distributed.mesh import Mesh
from quire.errors import PeersLost
from quire.executor.ranks.failures import cause_of
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import FailedTask, Launch, RankAnswer
from quire.executor.ranks.rank_loop import RankLoop
from quire.executor.ranks.rounds import RoundsOfRanks
from quire.executor.ranks.stage_links import StageLinks
from quire.executor.ranks.wiring import RankWiring
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.step.plan import StepPlan


class Rounds:
    is_ending = all_end = False
    waited_s = 0.0

    def __init__(self, is_lost=False):
        self.num_rounds, self.log, self.is_lost = 0, [], is_lost

    def idle_round(self, is_unfinished):
        self.num_rounds += 1
        self.log.append("idle round")
        assert is_unfinished
        if self.is_lost:
            raise PeersLost("gone")
        return True


def plan(step_id, rows):
    return StepPlan(step_id, removed=[], added=[], new_blocks=[], decode_rows=rows, chunks=[])


def answers_after(rounds, *tasks, begins_round):
    """A rank answers steps that fail, before their pass or in it."""
    ours, theirs = socket.socketpair()
    spare, other = socket.socketpair()
    other.close()
    core, rank = RankLink(ours), RankLink(theirs)

    class Failing:
        facts = None

        def launch(self, plan, before, tokens):
            if begins_round:
                rounds.num_rounds += 1
                rounds.waited_s += 2.0
            if plan.step_id == 1:
                raise ArithmeticError("this rank alone")

    class Group:
        def abort(self, reason):
            rounds.log.append("abort")

    wiring = RankWiring(
        rank, RankLink(spare), StageLinks(None, None, None), Group(), lambda n: None
    )
    loop = RankLoop(Failing(), Mesh(2).place(1), wiring, note_done=lambda: None, rounds=rounds)
    for task in tasks:
        core.send(MessageEncoder().encode(task))
    ours.shutdown(socket.SHUT_WR)
    loop.run()
    decoder = MessageDecoder(RankAnswer)
    found = [decoder.decode(core.receive()) for _ in (0, *tasks)][1:]
    wiring.close()
    core.close()
    assert [answer.waited_s for answer in found] == [2.0 * begins_round] * len(tasks)
    return [answer.failure.kind for answer in found]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_that_fails_before_its_pass_makes_a_round_once_others_are_let_go(is_lost):
    rounds = Rounds(is_lost)
    kinds = answers_after(rounds, Launch(1, {}, plan(1, [0]), []), begins_round=False)
    assert kinds == ["ArithmeticError"]
    assert rounds.log == ["abort", "idle round"]


def test_a_step_that_fails_in_its_pass_has_made_its_round():
    rounds = Rounds()
    answers_after(rounds, Launch(1, {}, plan(1, [0]), []), begins_round=True)
    assert (rounds.log, rounds.num_rounds) == (["abort"], 1)


def test_a_step_that_only_changes_rows_is_no_round():
    rounds = Rounds()
    answers_after(rounds, Launch(1, {}, plan(1, []), []), begins_round=False)
    assert rounds.log == ["abort"]


def test_a_step_that_follows_one_that_has_failed_is_a_round_too():
    rounds = Rounds()
    tasks = (Launch(1, {}, plan(1, [0]), []), Launch(2, {}, plan(2, [0]), [], follows=True))
    kinds = answers_after(rounds, *tasks, begins_round=False)
    assert kinds == ["ArithmeticError", "ExchangeAborted"]
    assert rounds.log == ["abort", "idle round"] * 2


def test_a_core_counts_steps_and_rounds_without_any():
    class Executor:
        num_steps, while_waiting, asked = 3, None, []

        def idle_round(self, *flags):
            self.asked.append(flags)
            return [(True, False)] * 2

    executor = Executor()
    rounds = RoundsOfRanks(executor)
    rounds.while_waiting()
    rounds.while_waiting = executor.asked.clear
    assert executor.while_waiting == executor.asked.clear
    rounds.is_ending = True
    assert rounds.idle_round(False) is True
    assert (executor.asked, rounds.all_end, rounds.num_rounds) == ([(False, True)], False, 4)


def test_a_core_that_is_gone_is_the_cause_whatever_else_has_failed():
    failures = {0: FailedTask("ExchangeAborted", "x"), 1: FailedTask("PeersLost", "gone")}
    found = cause_of(failures | {2: FailedTask("RowFailures", "x", {1: "x"})})
    assert isinstance(found, PeersLost)
    assert str(found) == "gone"
