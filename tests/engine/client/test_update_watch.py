"""Cores that die at every moment of an update of two cores' weights: those that answer afterwards
have the same weights, and a whole update makes all answer.
"""

import itertools

import pytest

from quire.engine.client.client import CoreStatus
from quire.engine.client.pending_calls import PendingCalls
from quire.engine.client.supervisor import Supervisor
from quire.engine.control_verbs import perform
from quire.engine.core.weight_verbs import CoreWeights, call_by_name
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import UtilityOutput
from quire.errors import EngineDeadError, WeightMismatch, WeightUpdateError

STEPS = ("start_weight_update", "update_weights", "prepare_weight_update", "commit_weight_update")
BY_NAME = ("start_weight_update", "update_weights", "finish_weight_update")
ARGS = {"update_weights": ({},), "commit_weight_update": ("new", False, "")}


class Workers:
    """One worker, whose weights are a word. `accepts`: whether an update is found to be whole."""

    accepts = True

    def __init__(self):
        self.weights, self.received, self.mixture = "old", None, None

    def collective_rpc(self, method, args, kwargs):
        if method == "receive_weights":
            self.received = self.weights = "new"
        elif method == "finish_receiving" and not self.accepts:
            raise WeightMismatch("A weight did not come.")
        elif method == "commit_update":
            self.received = self.mixture = None
        elif method == "abandon_update":
            self.mixture = self.mixture or (args[0] if self.received else None)
            self.received = None
            return [self.mixture is not None]
        elif method == "restore_update":
            return ["no snapshots are kept"]
        return [1]


class Core(CoreWeights):
    """The methods of a core that concern weights, with no requests."""

    has_weights, features = True, ()

    def __init__(self):
        self.executor, self.scheduler = Workers(), self

    def change_weights(self):
        pass

    def _stop(self, mode, then):
        then()

    def _go_on(self):
        pass

    def _fail_all(self, text):
        pass

    def collective_rpc(self, method, timeout, args, kwargs):
        if method == "reload_weights":
            self.executor.weights = "old"
            self._reloaded()
            return [None]
        return [call_by_name(self, method, args, kwargs)]

    @property
    def answer(self):
        """The weights that a request is answered with; None: it is not."""
        return None if self.refusal or self._held() else self.executor.weights


class TwoCores:
    """What a supervisor has of two cores. `kills` says of a core and a method that the core dies
    "before" it performs it, "after" that, or once it has "answered"; each once.
    """

    engine_indices, next_check_s, is_idle = (0, 1), 1.0, True

    def __init__(self):
        self.cores = {0: Core(), 1: Core()}
        self.calls, self.queue, self.events, self.dead = PendingCalls(), [], [], set()
        self.kills = {}

    def begin_call(self, utility):
        return self._send(utility, [i for i in self.engine_indices if i not in self.dead])

    def _send(self, utility, indices):
        call_id, future = self.calls.begin(utility, indices)
        self.queue += [(index, self.cores[index], call_id, utility) for index in indices]
        return future

    def take(self):
        while self.queue:
            # the second core first: it has performed and answered when the first one does
            self.queue.sort(key=lambda sent: -sent[0])
            index, core, call_id, utility = self.queue.pop(0)
            if core is not self.cores[index]:
                continue
            name = utility.args[0] if utility.method == "collective_rpc" else utility.method
            moment = self.kills.pop((index, name), None)
            if moment != "before":
                output = self._perform(core, call_id, utility)
            if moment in (None, "answered"):
                self.calls.answer(index, output)
            if moment is not None:
                self._kill(index)
                return  # a supervisor sees the death before the rest is performed

    def _perform(self, core, call_id, utility):
        try:
            if utility.method == "collective_rpc":
                return UtilityOutput(call_id, result=core.collective_rpc(*utility.args))
            return UtilityOutput(call_id, result=perform(core, utility.method, utility.args))
        except Exception as error:
            failure = {"failure_type": type(error).__name__, "failure_message": str(error)}
            return UtilityOutput(call_id, **failure)

    def _kill(self, index):
        self.dead.add(index)
        self.cores[index] = Core()
        error = EngineDeadError(f"Engine core {index} died.", engine_index=index)
        self.calls.fail(index, error)
        self.events.append(error)

    def next_output(self):
        if self.events:
            raise self.events.pop(0)

    def dying_step(self, engine_index):
        return ()

    def core_status(self, engine_index):
        return CoreStatus(engine_index, 1, pid=1, is_running=False, is_started=True)

    def is_dead(self, engine_index):
        return engine_index in self.dead

    def restart_core(self, engine_index, first):
        self.dead.discard(engine_index)
        for utility in first:
            self._send(utility, [engine_index])


def call_of(name, by_name):
    if not by_name:
        return Utility(name, ARGS.get(name, ()))
    kwargs = {"update_info": {}} if name == "update_weights" else {}
    return Utility("collective_rpc", (name, None, [], kwargs))


class Trainer:
    def __init__(self):
        self.cores = TwoCores()
        times = itertools.count(step=100)  # so that no restart waits
        self.supervisor = Supervisor(self.cores, max_restarts=9, clock=lambda: next(times))

    def call(self, utility):
        future = self.supervisor.begin_call(utility)
        self.settle()
        return future.result(timeout=0)

    def settle(self):
        for _ in range(6):
            self.supervisor.take()
            self.supervisor.next_output()
            assert len(self.answers - {None}) < 2, "two versions at once"

    @property
    def answers(self):
        """Of the cores that have come to the requests that are sent now."""
        busy = {sent[0] for sent in self.cores.queue} | self.cores.dead
        return {core.answer for i, core in self.cores.cores.items() if i not in busy}

    def update(self, by_name=False):
        """All calls; returns the error of the first that fails."""
        for name in BY_NAME if by_name else STEPS:
            try:
                self.call(call_of(name, by_name))
            except Exception as error:
                return error
        return None


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("moment", ["before", "after", "answered"])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_core_that_dies_in_an_update_leaves_one_version_or_refusals(by_name, moment, dies):
    for name in BY_NAME if by_name else STEPS:
        trainer = Trainer()
        trainer.cores.kills[dies, name] = moment
        error = trainer.update(by_name)
        if error is None:  # the last answer came before the death
            assert (dies, moment) == (0, "answered") and name in (STEPS[-1], BY_NAME[-1])
            assert trainer.answers == {"new", None}  # it was a core that dies after an update
        else:
            assert isinstance(error, WeightUpdateError), error
            assert str(error).startswith(f"Engine core {dies} died")
            assert trainer.answers in ({"old"}, {None}), name
        if trainer.answers == {None}:
            assert all(core.refusal for core in trainer.cores.cores.values())
            for index in (0, 1):  # a later life refuses as well
                trainer.cores._kill(index)
                trainer.settle()
                assert trainer.answers == {None}
        assert trainer.update() is None
        assert trainer.answers == {"new"}


def test_an_update_that_fails_on_one_core_leaves_refusals_on_all():
    trainer = Trainer()
    trainer.cores.cores[1].executor.accepts = False
    assert isinstance(trainer.update(by_name=True), WeightMismatch)
    assert trainer.answers == {None}
    assert trainer.call(Utility("collective_rpc", ("reload_weights", None, [], {}))) == [None, None]
    assert trainer.answers == {"old"}


def test_what_a_death_has_ended_is_not_taken_for_an_update_by_itself():
    """The next call of its trainer is told, and the one after it is another's."""
    trainer = Trainer()
    trainer.call(call_of("start_weight_update", False))
    trainer.cores._kill(1)
    trainer.settle()
    assert trainer.answers == {"old"}
    with pytest.raises(WeightUpdateError, match="over on all cores"):
        trainer.call(Utility("is_updating_weights"))
    assert trainer.call(Utility("is_updating_weights")) is False


def test_an_update_that_is_refused_leaves_the_open_one():
    trainer = Trainer()
    trainer.call(call_of("start_weight_update", False))
    with pytest.raises(WeightUpdateError, match="open already"):
        trainer.call(call_of("start_weight_update", False))
    trainer.cores.kills[1, "update_weights"] = "before"
    with pytest.raises(WeightUpdateError, match="Engine core 1 died"):
        trainer.call(call_of("update_weights", False))
    trainer.call(Utility("abandon_weight_update", ("over",)))
    assert trainer.answers in ({"old"}, {None})
