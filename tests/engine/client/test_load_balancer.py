"""Requests go where there is least to do, unless another core knows their beginning."""

import itertools
import random

import pytest

from quire.engine.client.load_balancer import CHUNK_TOKENS, MAX_CHUNKS, LoadBalancer, load_of
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest, SchedulerStats
from quire.engine.wire.prompt_media import PromptMedia
from quire.params import SamplingParams
from quire.step.media import MediaItem

PREFIX = list(range(4 * CHUNK_TOKENS))
HANDLES = itertools.count()


def request(ids=(1, 2, 3), salt=None, adapter=None):
    return EngineCoreRequest(
        next(HANDLES), list(ids), SamplingParams(), 0, 0.0, cache_salt=salt, adapter=adapter
    )


class Loads:
    """A balancer and the numbers of requests of its cores, which only grow."""

    def __init__(self, num_cores=2):
        self.balancer = LoadBalancer()
        self.loads = dict.fromkeys(range(num_cores), 0.0)

    def choose(self, request):
        index = self.balancer.choose(request, self.loads)
        self.loads[index] += 1
        return index

    def pin(self, request, index):
        self.balancer.note_pinned(request, index)
        self.loads[index] += 1


def test_requests_without_a_common_beginning_are_spread_evenly():
    cores, rng = Loads(3), random.Random(3)
    for _ in range(300):
        cores.choose(request([rng.randrange(10**6)] * 5))
    assert max(cores.loads.values()) - min(cores.loads.values()) <= 1


def test_one_core_that_is_behind_gets_nothing_until_it_has_caught_up():
    cores = Loads()
    cores.loads[0] = 6
    assert [cores.choose(request()) for _ in range(6)] == [1] * 6
    cores.loads[0] = 0
    assert cores.choose(request()) == 0


@pytest.mark.parametrize("tail", [[], [9] * 7, [9] * CHUNK_TOKENS])
def test_a_known_beginning_attracts_and_load_repels(tail):
    cores = Loads()
    home = cores.choose(request(PREFIX))
    assert [cores.choose(request(PREFIX + tail)) for _ in range(2)] == [home] * 2
    cores.loads[home] += 20
    assert cores.choose(request(PREFIX + tail)) == 1 - home


def test_a_pinned_request_leaves_its_beginning_where_it_went():
    cores = Loads()
    cores.pin(request(PREFIX), 1)
    assert cores.choose(request(PREFIX)) == 1


def test_a_beginning_under_another_salt_is_another_beginning():
    cores = Loads()
    home = cores.choose(request(PREFIX))
    assert cores.choose(request(PREFIX, salt="theirs")) == 1 - home


def test_a_beginning_for_another_adapter_is_another_beginning():
    cores = Loads()
    home = cores.choose(request(PREFIX, adapter=AdapterRef("a", 1, "/a")))
    assert cores.choose(request(PREFIX, adapter=AdapterRef("a", 1, "/a"))) == home
    cores.loads = dict.fromkeys(cores.loads, 0.0)
    cores.loads[home] = 1.0
    assert cores.choose(request(PREFIX, adapter=AdapterRef("b", 2, "/b"))) == 1 - home


def test_a_core_that_died_is_not_remembered():
    cores = Loads()
    home = cores.choose(request(PREFIX))
    cores.balancer.forget(home)
    cores.loads = {home: 0.0, 1 - home: 1.0}
    assert cores.choose(request(PREFIX)) == home, "it is empty now, the other is not"
    cores.balancer.forget(home)
    cores.loads = {home: 1.0, 1 - home: 0.0}
    assert cores.choose(request(PREFIX)) == 1 - home


def test_waiting_requests_repel_when_the_kv_cache_fills():
    full = load_of(2, SchedulerStats(num_waiting_reqs=3, kv_cache_usage=0.95))
    assert full > 5 + load_of(2, SchedulerStats(num_waiting_reqs=3, kv_cache_usage=0.4))
    assert load_of(2, SchedulerStats()) == 2


def test_what_is_remembered_is_bounded():
    balancer = LoadBalancer()
    for number in range(MAX_CHUNKS // 100 + 50):
        balancer.note_pinned(request([number] * (100 * CHUNK_TOKENS)), 0)
    assert len(balancer._seen) <= MAX_CHUNKS


def with_media(digest, start=10):
    message = request(PREFIX)
    message.media = PromptMedia([MediaItem(digest, "image", 4, [(start, start + 4)])])
    return message


def test_equal_ids_with_other_media_are_not_the_same_prefix():
    cores = Loads()
    cores.pin(with_media(b"a"), 0)
    cores.loads = {0: 2.0, 1: 0.0}
    assert cores.choose(with_media(b"b")) == 1
    cores.loads = {0: 2.0, 1: 0.0}
    assert cores.choose(with_media(b"a")) == 0
    cores.loads = {0: 2.0, 1: 0.0}
    assert cores.choose(with_media(b"a", start=11)) == 1


def test_equal_ids_to_another_source_are_not_the_same_prefix():
    def with_source(digest):
        message = request(PREFIX)
        message.media = PromptMedia([MediaItem(digest, "text", 4, [])])
        return message

    cores = Loads()
    cores.pin(with_source(b"a"), 0)
    cores.loads = {0: 2.0, 1: 0.0}
    assert cores.choose(with_source(b"b")) == 1
    cores.loads = {0: 2.0, 1: 0.0}
    assert cores.choose(with_source(b"a")) == 0
