"""What becomes of ranks and of their core where one of them ends or fails at a bad moment, without
processes.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque

import pytest
import torch

from quire.distributed.mesh import Mesh
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import EngineDeadError, LoadError
from quire.executor.ranks import local_ranks
from quire.executor.ranks.board import RankSigns
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.local_ranks import LocalRanks
from quire.executor.ranks.messages import Call, FailedTask, RankAnswer, Task
from quire.executor.ranks.multiproc import MultiprocExecutor
from quire.executor.ranks.processes import RankProcesses
from quire.executor.ranks.rank_loop import RankLoop
from quire.executor.ranks.stage_links import StageLinks
from quire.executor.ranks.wiring import RankWiring
from quire.executor.worker import Worker
from quire.executor.worker_config import WorkerFacts
from quire.models.decoder import HiddenStates
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.runner.forward.stage_output import StageOutput

FACTS = WorkerFacts(num_blocks=9, kv_groups=(), has_own_memory=False)


class Child:
    """A process that has said these words."""

    def __init__(self, words=None):
        self.pid, self.words = os.getpid(), words
        self.pipe, self._other = socket.socketpair()

    def last_words(self):
        return self.words

    def exit_words(self):
        return "exited with code 1"

    def kill(self):
        pass

    def end(self, timeout_s):
        self.pipe.close()
        self._other.close()


class Link:
    """The core's end of a link to a rank that answers with `answer`."""

    def __init__(self, answer):
        self._answer, self._decoder = answer, MessageDecoder(Task)
        self._ends = socket.socketpair()

    def fileno(self):
        return self._ends[0].fileno()

    def send(self, frames):
        self._answer(self._decoder.decode(frames))

    def take(self):
        if select.select([self._ends[0]], [], [], 0)[0]:
            raise EOFError
        return

    def end(self):
        self._ends[1].close()

    def close(self):
        for end in self._ends:
            end.close()


class Processes(RankProcesses):
    """Two ranks; `events` is what happens to them."""

    def __init__(self, *, words=(None, None), are_ready=True):
        self.mesh, self.titles, self.events = Mesh(tp=2), ["rank-0", "rank-1"], []
        self.children = [Child(each) for each in words]
        self.answers = [deque([RankAnswer(0, facts=FACTS)] if are_ready else []) for _ in range(2)]
        self.asides = []
        self.links = [Link(lambda task, rank=rank: self.serve(rank, task)) for rank in range(2)]
        self.awaited = lambda: None
        self.seen = []

    def serve(self, rank, task):
        assert isinstance(task, Call)
        self.events.append((task.method, rank))
        self.seen.append(self.awaited())
        failure = FailedTask("ValueError", "no") if (task.method, rank) == ("sleep", 1) else None
        self.answers[rank].append(RankAnswer(task.serial, failure=failure))

    def signs(self):
        return [RankSigns(0, 0)] * 2

    def collectives(self):
        return [0, 0]

    def reset(self):
        self.events.append("reset")

    def kill(self):
        self.events.append("kill")
        super().kill()

    def close(self):
        self.events.append("close")
        super().close()


@pytest.fixture
def processes():
    return Processes()


@pytest.fixture
def executor(processes):
    made = MultiprocExecutor(processes, Worker)
    yield made
    made.shutdown()


def test_exchanges_are_usable_again_only_when_nobody_will_end_them_any_more(executor, processes):
    """A rank that fails in a call answers first, and then ends the exchange."""
    with pytest.raises(ValueError, match="no"):
        executor.collective_rpc("sleep", (), {})
    assert processes.events == [
        ("sleep", 0), ("sleep", 1), ("check_health", 0), ("check_health", 1), "reset",
    ]  # fmt: skip


def test_a_rank_that_does_not_leave_a_failed_task_can_count_as_hung(executor, processes):
    processes.awaited = lambda: executor._awaited_tokens
    with pytest.raises(ValueError, match="no"):
        executor.collective_rpc("sleep", (), {})
    assert processes.seen == [None, None, 0, 0], "a call of the operator may take its time"


def test_who_asks_late_is_told_of_a_rank_that_failed_before(executor):
    executor._fail(1, "was killed")
    told = []
    executor.register_failure_callback(told.append)
    executor._fail(0, "was killed, too")
    assert told == ["rank-1 was killed."]


def test_the_error_of_a_start_is_that_of_the_rank_that_has_one_of_its_own():
    words = ("ExchangeAborted", "rank 1 is gone"), ("LoadError", "There is no such file.")
    processes = Processes(words=words, are_ready=False)
    processes.links[0].end()
    with pytest.raises(LoadError, match=r"^There is no such file\.$"):
        MultiprocExecutor(processes, Worker)
    assert processes.events == ["kill", "kill", "close"]


def test_a_start_that_is_interrupted_waits_for_nobody(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    processes = Processes(are_ready=False)
    monkeypatch.setattr(MultiprocExecutor, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        MultiprocExecutor(processes, Worker)
    assert processes.events == ["kill", "close"]


def test_processes_that_cannot_all_be_started_are_killed(monkeypatch):
    ended = []

    class Started(Child):
        def __init__(self, *given):
            if ended == ["full"]:
                raise OSError(24, "Too many open files")
            ended.append("full")
            super().__init__()

        def kill(self):
            ended.append("killed")

    monkeypatch.setattr(local_ranks, "ChildProcess", Started)
    with pytest.raises(OSError, match="Too many open files"):
        LocalRanks("module", None, Mesh(pp=2), ())
    assert ended == ["full", "killed"]


@pytest.mark.parametrize("method", ["gone", "fail"])
def test_a_rank_whose_core_ends_in_the_middle_of_a_task_ends_quietly(method, caplog):
    ours, theirs = socket.socketpair()
    spare, other = socket.socketpair()
    other.close()
    core, rank, done = RankLink(ours), RankLink(theirs), []

    class Working:
        facts = None

        def call(self, method, *args):
            return method(*args)

        def gone(self):
            core.close()

        def fail(self):
            core.close()
            raise ValueError("the rank had an error of its own")

    class Group:
        def abort(self, reason):
            raise AssertionError("nobody waits")

    stages = StageLinks(None, None, None)
    wiring = RankWiring(rank, RankLink(spare), stages, Group(), lambda number: None)
    loop = RankLoop(Working(), Mesh().place(0), wiring, note_done=lambda: done.append(1))
    core.send(MessageEncoder().encode(Call(1, {}, method, [], {})))
    loop.run()
    wiring.close()
    assert done == []


def test_a_stage_that_is_gone_is_the_failure_of_others():
    before, after = socket.socketpair(), socket.socketpair()
    stages = StageLinks(RankLink(before[0]), RankLink(after[0]), None)
    before[1].close()
    after[1].close()
    with pytest.raises(ExchangeAborted, match="an earlier stage is gone"):
        stages.receive(4)
    with pytest.raises(ExchangeAborted, match="the next stage is gone"):
        stages.send(StageOutput(None))
    stages.send_failure()
    before[0].close()
    after[0].close()


def test_a_stage_knows_how_long_those_before_have_waited_for_other_cores():
    ours, theirs = socket.socketpair()
    first = StageLinks(None, RankLink(ours), torch.float32)
    second = StageLinks(RankLink(theirs), None, torch.float32)
    for waited_s in (2.5, 0.0):
        first.send(StageOutput(HiddenStates(torch.zeros(1, 4))), waited_s)
        second.receive(4)
        assert second.waited_s == waited_s
    first.send(StageOutput(None), 1.5)
    assert second.receive(4).states is None
    assert second.waited_s == 1.5
    first.close()
    with pytest.raises(ExchangeAborted):
        second.receive(4)
    assert second.waited_s == 0.0
    second.close()


def test_calls_after_the_end_say_so(executor):
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="was closed"):
        executor.check_health()
