"""Who is told when that a wave begins, and who falls with whom."""

from types import SimpleNamespace

from quire.engine.client.core_sockets import CoreConnection
from quire.engine.client.lockstep_group import LockstepGroup
from quire.engine.data_parallel.coordinator import Waves
from quire.engine.process.liveness import PEERS_LOST
from quire.errors import EngineDeadError
from quire.processes.codec import core_identity


def listening(num_cores=2, incarnation=1):
    waves = Waves(num_cores)
    for index in range(num_cores):
        waves.listens(core_identity(index, incarnation), True)
    return waves


def test_a_wave_begins_for_all_once_all_listen():
    waves = Waves(2)
    waves.ask(1, 0)
    waves.listens(core_identity(0, 1), True)
    assert waves.due() == []
    waves.listens(core_identity(1, 1), True)
    assert waves.due() == [core_identity(0, 1), core_identity(1, 1)]
    assert waves.due() == []
    assert waves.is_running


def test_a_core_that_asks_again_is_told_again():
    waves = listening()
    waves.ask(1, 3)
    assert waves.due()
    waves.ask(1, 3)
    assert len(waves.due()) == 2
    assert waves.wave == 3


def test_a_wave_that_is_over_does_not_begin_again():
    waves = listening()
    waves.ask(1, 0)
    waves.due()
    waves.complete(1, 0)
    assert (waves.wave, waves.is_running) == (1, False)
    waves.ask(1, 0)  # was on its way when the wave ended
    assert waves.due() == []
    waves.ask(1, 1)
    assert waves.due()


def test_a_coordinator_that_knows_nothing_learns_from_who_asks():
    waves = listening()
    waves.ask(1, 41)
    assert waves.due()
    assert waves.wave == 41
    waves = listening()
    waves.complete(1, 7)
    assert (waves.wave, waves.is_running) == (8, False)


def test_an_earlier_life_is_passed_over_and_a_new_one_begins_at_its_first_wave():
    waves = listening(incarnation=2)
    waves.ask(2, 5)
    waves.due()
    waves.ask(1, 9)
    waves.complete(1, 9)
    assert (waves.wave, waves.due()) == (5, [])
    for index in (0, 1):
        waves.listens(core_identity(index, 2), False)
        waves.listens(core_identity(index, 3), True)
    waves.ask(3, 0)
    assert waves.wave == 0
    assert waves.due() == [core_identity(0, 3), core_identity(1, 3)]


def test_a_core_that_has_gone_is_waited_for():
    waves = listening()
    waves.listens(core_identity(1, 1), False)
    waves.ask(1, 0)
    assert waves.due() == []


def group(codes, incarnations=None):
    numbers = incarnations or [1] * len(codes)
    cores = [
        CoreConnection(index, number, SimpleNamespace(exit_code=code))
        for index, (code, number) in enumerate(zip(codes, numbers, strict=True))
    ]
    return LockstepGroup(dict(enumerate(cores))), cores


def test_the_first_to_end_has_died_and_the_others_end_because_of_it():
    found, cores = group([-9, None, None])
    assert found.was_ended_by_peer(cores[0]) is False
    assert found.peers_of(cores[0]) == [cores[1], cores[2]]
    cores[0].error = EngineDeadError("killed")
    assert found.was_ended_by_peer(cores[2]) is True
    assert found.was_ended_by_peer(cores[1]) is True


def test_a_core_that_lost_a_peer_is_not_the_first_even_if_noticed_before():
    found, cores = group([PEERS_LOST, -9])
    assert found.was_ended_by_peer(cores[0]) is True
    assert found.was_ended_by_peer(cores[1]) is False


def test_if_all_lost_each_other_one_of_them_counts():
    found, cores = group([PEERS_LOST, PEERS_LOST])
    assert list(map(found.was_ended_by_peer, cores)) == [False, True]


def test_a_core_elsewhere_has_died_first_unless_it_says_that_it_lost_the_others():
    found, cores = group([PEERS_LOST, None, None])
    for elsewhere in cores[1:]:
        elsewhere.process = None
    cores[1].reported_error = "PeersLost: Another one of the group is gone"
    assert list(map(found.was_ended_by_peer, cores)) == [True, True, False]


def test_a_restarted_core_does_not_end_with_an_earlier_incarnation():
    found, cores = group([-9, None], [1, 2])
    assert found.peers_of(cores[0]) == []
    cores[0].incarnation = 3
    assert found.peers_of(cores[0]) == [cores[1]]
    assert found.was_ended_by_peer(cores[0]) is False
