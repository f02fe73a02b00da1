"""Requests go where there is least to do, unless another core knows their beginning."""

import itertools
import random

import pytest

from quire.engine.client.load_balancer import CHUNK_TOKENS, MAX_CHUNKS, LoadBalancer
from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats
from quire.params import SamplingParams

PREFIX = list(range(4 * CHUNK_TOKENS))
HANDLES = itertools.count()


def request(ids=(1, 2, 3), salt=None):
    return EngineCoreRequest(next(HANDLES), list(ids), SamplingParams(), 0, 0.0, cache_salt=salt)


def test_requests_without_a_common_beginning_are_spread_evenly():
    balancer, rng = LoadBalancer(), random.Random(3)
    given = [0, 0, 0]
    for _ in range(300):
        given[balancer.choose(request([rng.randrange(10**6)] * 5), [0, 1, 2])] += 1
    assert max(given) - min(given) <= 1


def test_one_core_that_is_behind_gets_nothing_until_it_has_caught_up():
    balancer = LoadBalancer()
    for _ in range(6):
        balancer.pin(request(), 0)
    assert [balancer.choose(request(), [0, 1]) for _ in range(6)] == [1] * 6
    for handle in [handle for handle, owner in balancer.owners.items() if owner == 0]:
        assert balancer.release(handle) == 0
    assert balancer.num_requests(0) == 0
    assert balancer.choose(request(), [0, 1]) == 0


@pytest.mark.parametrize("tail", [[], [9] * 7, [9] * CHUNK_TOKENS])
def test_a_known_beginning_attracts_and_load_repels(tail):
    balancer = LoadBalancer()
    home = balancer.choose(request(PREFIX), [0, 1])
    assert [balancer.choose(request(PREFIX + tail), [0, 1]) for _ in range(2)] == [home] * 2
    for _ in range(20):
        balancer.pin(request(), home)
    assert balancer.choose(request(PREFIX + tail), [0, 1]) == 1 - home


def test_a_beginning_under_another_salt_is_another_beginning():
    balancer = LoadBalancer()
    home = balancer.choose(request(PREFIX), [0, 1])
    assert balancer.choose(request(PREFIX, salt="theirs"), [0, 1]) == 1 - home


def test_a_core_that_died_is_not_remembered():
    balancer = LoadBalancer()
    home = balancer.choose(request(PREFIX), [0, 1])
    for _ in range(2):
        balancer.pin(request(), home)
    balancer.forget(home)
    balancer.pin(request(), 1 - home)
    assert balancer.choose(request(PREFIX), [0, 1]) == home, "it is empty now, the other is not"
    assert balancer.choose(request(PREFIX), [1 - home]) == 1 - home


def test_waiting_requests_repel_when_the_kv_cache_fills():
    balancer = LoadBalancer()
    balancer.note_stats(0, SchedulerStats(num_waiting_reqs=3, kv_cache_usage=0.95))
    balancer.note_stats(1, SchedulerStats(num_waiting_reqs=3, kv_cache_usage=0.4))
    assert [balancer.choose(request(), [0, 1]) for _ in range(5)] == [1] * 5


def test_what_is_remembered_is_bounded():
    balancer = LoadBalancer()
    for number in range(MAX_CHUNKS // 100 + 50):
        balancer.pin(request([number] * (100 * CHUNK_TOKENS)), 0)
    assert len(balancer._seen) <= MAX_CHUNKS
