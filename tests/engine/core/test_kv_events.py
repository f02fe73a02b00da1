"""A program that follows a core's events knows exactly what its pool has, whatever happens."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from quire.distributed.kv_events import AllBlocksCleared, BlockStored, EventPublisher
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.core.core import EngineCore
from quire.engine.core.features.kv_events import KVEvents, open_publisher
from quire.engine.core.features.plain_features import plain_features
from quire.engine.core.worker_program import of_core
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.errors import InvalidParameter
from quire.params import SamplingParams
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import KVGroupSpec
from quire.step.media import EmbeddedSpan
from quire.testing import make_checkpoint
from quire.tiers.kv_events_config import KVEventsConfig, KVEventsPlan
from tests.engine.core.core_over_hashes import VOCAB, FakeExecutor
from tests.engine.core.kv_tier_scene import BLOCK, PROMPT, Ask, open_plan, prompts
from tests.support.kv_index import Index, Subscriber
from tests.support.simulation.hash_model import HashRunner
from tests.support.simulation.scheduler_settings import scheduler_config

_NUMBERS = itertools.count()


class Scene:
    """A core over the hash model that publishes, its subscriber and the index of that."""

    def __init__(self, *, most_queued=100, is_started=True, first=0, is_cleared=False, **changes):
        name = f"inproc://events-{next(_NUMBERS)}"
        facts = {
            "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_len": 40,
            "key_size": 4, "num_blocks": 24, **changes,
        }  # fmt: skip
        scheduler = Scheduler(scheduler_config(**facts))
        self.publisher = EventPublisher(
            name, name + "-replay", max_queue_size=most_queued, first=first
        )
        self.subscriber = Subscriber(name, name + "-replay")
        self.adapters = {}
        self.feature = KVEvents(
            scheduler, self.publisher, rank=3, is_cleared=is_cleared, clock=lambda: 1.5,
            adapter_of=lambda request: self.adapters.get(request.handle),
        )  # fmt: skip
        encoder = SimpleNamespace(
            rows=lambda digest: list(digest), change=lambda *_: None, failed_in_step=lambda _: []
        )
        runner = HashRunner(
            num_blocks=facts["num_blocks"],
            block_size=facts["key_size"],
            groups=facts.get("groups", (KVGroupSpec(),)),
            vocab_size=VOCAB,
            encoder=encoder,
        )
        features = [*plain_features(scheduler), self.feature]
        self.core = EngineCore(scheduler, FakeExecutor(runner), features=features)
        self.index = Index()
        self.index.next = first
        if is_started:
            self.publisher.start()

    def ask(self, handle, ids, max_tokens=2, salt=None):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(
            EngineCoreRequest(handle, ids, params, seed=0, arrival_time=0.0, cache_salt=salt)
        )

    def run(self):
        while self.core.has_work:
            assert all(str(end.reason) == "length" for end in self.core.step().finished)

    def follow(self):
        self.index.follow(self.subscriber, self.publisher._batches._next - 1)

    def check(self, medium="GPU"):
        self.follow()
        pool = self.core.scheduler.memory.pool
        held = {(medium, group, int.from_bytes(key[-8:], "big")) for key, group in pool._by_key}
        assert set(self.index.contents) == held
        return held


@pytest.fixture
def scene():
    made = []

    def make(**changes):
        made.append(Scene(**changes))
        return made[-1]

    yield make
    for each in made:
        each.core.shutdown()
        each.subscriber.close()


def ids(first, count=13):
    return list(range(first, first + count))


def test_blocks_of_a_request_are_one_event_with_parent_and_tokens(scene):
    stage = scene()
    stage.ask(1, ids(1), max_tokens=5)
    stage.run()
    assert len(stage.check()) == 4
    first = stage.index.events[0]
    assert first.parent_block_hash is None and first.token_ids == ids(1, 12)
    assert (first.block_size, first.medium, first.group_idx) == (4, "GPU", 0)
    assert first.kv_cache_spec_kind == "full_attention" and first.extra_keys == [None] * 3
    last = stage.index.events[1]
    assert last.parent_block_hash == first.block_hashes[-1]
    assert stage.index.prefix(last.block_hashes[0])[:13] == tuple(ids(1))


def test_hits_and_equal_contents_are_not_published_twice(scene):
    stage = scene()
    stage.ask(1, ids(1), max_tokens=1)
    stage.ask(2, ids(1), max_tokens=1)
    stage.run()
    stage.ask(3, ids(1), max_tokens=1)
    stage.run()
    stage.ask(4, [*ids(1, 8), *ids(30, 5)], max_tokens=1)
    stage.run()
    stage.check()
    assert stage.index.num_stored == 4
    stored = stage.index.events[-1]
    assert stored.parent_block_hash == stage.index.events[0].block_hashes[1]
    assert stage.index.prefix(stored.block_hashes[0]) == (*ids(1, 8), *ids(30, 4))


def test_evictions_preemptions_and_aborts_leave_the_index_right(scene):
    stage = scene(num_blocks=10)
    for handle in range(1, 13):
        stage.ask(handle, ids(handle % 5 + 1, 9 + handle), max_tokens=9)
    for turn in itertools.count():
        if not stage.core.has_work:
            break
        stage.core.step()
        if turn == 20:
            stage.core.abort_requests([6, 7])
        stage.check()
    assert stage.core.scheduler.counters.num_preemptions
    assert stage.index.num_stored > len(stage.index.contents)


def test_a_reset_clears_the_index(scene):
    stage = scene()
    stage.ask(1, ids(1))
    stage.run()
    assert stage.check()
    assert stage.core.reset_prefix_cache() and stage.core.has_work
    stage.run()
    assert stage.check() == set() and isinstance(stage.index.events[-1], AllBlocksCleared)
    stage.ask(2, ids(1))
    stage.run()
    assert len(stage.check()) == 3


def test_batches_that_were_lost_come_again(scene):
    stage = scene(most_queued=1, is_started=False, num_blocks=10)
    for handle in range(1, 6):
        stage.ask(handle, ids(handle * 3, 16))
        stage.run()
    stage.publisher.start()
    assert stage.publisher.num_dropped > 3
    assert stage.check()


def test_a_core_that_follows_a_dead_one_clears_the_index_even_if_its_beginning_is_lost(scene):
    stage = scene()
    stage.ask(1, ids(1))
    stage.run()
    stage.check()
    first = KVEventsPlan(KVEventsConfig(), num_deaths=1).first
    later = scene(first=first, is_cleared=True, most_queued=1, is_started=False)
    later.index, seen = stage.index, stage.index.next
    later.ask(1, ids(7))
    later.run()
    later.publisher.start()
    assert seen < first and later.publisher.num_dropped
    assert len(later.check()) == 3


def test_salts_adapters_and_media_are_named(scene):
    stage = scene()
    stage.ask(1, ids(1), salt="tenant")
    stage.run()
    stage.adapters[2] = AdapterRef(id=9, name="sql", folder="/a")
    stage.ask(2, ids(1))
    request = stage.core.scheduler.requests[2]
    request.adapter = 5
    request.embedded = [EmbeddedSpan(6, 9, b"\x01\xff\x02")]
    stage.core.scheduler.memory.rename(request)
    stage.run()
    assert len(stage.check()) == 6
    salted, adapted = stage.index.events
    assert salted.extra_keys == [["tenant"], None, None]
    assert (salted.lora_id, salted.lora_name) == (None, None)
    assert (adapted.lora_id, adapted.lora_name) == (9, "sql")
    assert adapted.extra_keys == [["sql"], ["sql", ["01ff02", 2]], ["sql", ["01ff02", -2]]]
    assert salted.token_ids == adapted.token_ids
    assert not set(salted.block_hashes) & set(adapted.block_hashes)


def test_groups_have_their_own_contents_and_sizes(scene):
    groups = (KVGroupSpec("sliding", window=6), KVGroupSpec("full", block_size=8))
    stage = scene(groups=groups, num_blocks=16)
    for handle in range(1, 9):
        stage.ask(handle, ids(handle, 17 + handle), max_tokens=6)
        stage.run()
        stage.check()
    stored = [event for event in stage.index.events if isinstance(event, BlockStored)]
    facts = {
        (e.group_idx, e.block_size, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
        for e in stored
    }
    assert facts == {(0, 4, "sliding_window", 6), (1, 8, "full_attention", None)}
    for medium, group, each in stage.index.contents:
        if group == 1:
            prefix = stage.index.prefix(each, medium, group)
            assert prefix == tuple(ids(prefix[0], len(prefix)))


def test_snapshots_of_recurrent_state_are_contents(scene):
    stage = scene(groups=(KVGroupSpec("state"),), snapshot_interval=8)
    stage.ask(1, ids(1))
    stage.run()
    assert stage.check()
    stored = stage.index.events[0]
    assert stored.kv_cache_spec_kind == "mamba" and stored.token_ids[0] % 4 == 1


def test_batches_have_the_rank_and_the_time(scene):
    stage = scene()
    stage.ask(1, ids(1))
    stage.run()
    _, number, batch = stage.subscriber.receive()
    assert (number, batch.ts, batch.data_parallel_rank) == (0, 1.5, 3)


def test_a_core_without_the_option_has_no_listener_and_no_calls(scene):
    assert scene().core._updated
    facts = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_len": 40}
    scheduler = Scheduler(scheduler_config(key_size=4, num_blocks=24, **facts))
    core = EngineCore(scheduler, FakeExecutor(None))
    assert scheduler.memory.pool.listeners == [] and core._updated == []


def test_a_core_of_a_plan_publishes_at_the_endpoints_of_its_rank(tmp_path):
    folder = tmp_path / "llama"
    make_checkpoint(folder, {"num_hidden_layers": 1}, "llama")
    given = {
        "enable_kv_cache_events": True, "topic": "kv@pod@model",
        "endpoint": "inproc://plan", "replay_endpoint": "inproc://plan-replay",
    }  # fmt: skip
    plan = of_core(open_plan(folder, host_bytes=0, kv_events_config=given), 1, num_deaths=2)
    core = build_core(plan)
    subscriber = Subscriber("inproc://plan_dp1", "inproc://plan-replay_dp1", topic="kv@pod")
    index = Index()
    for number, batch in subscriber.replay(0):
        assert number == 2 << 32 and batch.data_parallel_rank == 1
        index.apply(number, batch)
    assert [type(event) for event in index.events] == [AllBlocksCleared]
    ask = Ask(core)
    for prompt in (*prompts(), prompts()[0]):
        ask(prompt)
    core.shutdown()
    index.follow(subscriber, core.features[-1]._publisher._batches._next - 1)
    keys = core.scheduler.memory.pool._by_key
    assert {each for _, _, each in index.contents} == {
        int.from_bytes(key[-8:], "big") for key, _ in keys
    }
    assert index.num_stored > len(index.contents) >= PROMPT // BLOCK
    subscriber.close()


class TierScene:
    """A core with a tier that publishes, its subscriber and the index of that."""

    def __init__(self, folder, name, disk, *, first=0, index=None, **options):
        given = {
            "enable_kv_cache_events": True, "endpoint": f"inproc://{name}",
            "replay_endpoint": f"inproc://{name}-replay",
        }  # fmt: skip
        tiers = [{"type": "fs", "root_dir": str(disk), "enable_kv_events": True}]
        extra = {"cpu_bytes_to_use": 1 << 15, "secondary_tiers": tiers}
        config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        config["kv_connector_extra_config"] = extra
        plan = open_plan(folder, kv_events_config=given, kv_transfer_config=config, **options)
        self.core = build_core(of_core(plan, 0, num_deaths=first))
        self.subscriber = Subscriber(given["endpoint"], given["replay_endpoint"])
        self.index = index or Index()
        self.ask, self.tier = Ask(self.core), self.core.executor.worker.model_runner.transfers

    def check(self):
        feature = next(each for each in self.core.features if hasattr(each, "is_opening"))
        while feature.is_opening or self.tier._waiting_bytes:
            self.core.step()
        self.tier.settle()
        feature._polls_left = 0
        self.core.step()
        pool, disk = self.core.scheduler.memory.pool, self.tier._disk
        kept = {"GPU": pool._by_key, "CPU": self.tier._host, "STORAGE": disk.contents()}
        last = self.core.features[-1]._publisher._batches._next - 1
        for number, batch in self.subscriber.replay(self.index.next):
            self.index.apply(number, batch)
        assert self.index.next == last + 1
        assert set(self.index.contents) == {
            (medium, group, int.from_bytes(key[-8:], "big"))
            for medium, keys in kept.items()
            for key, group in keys
        }
        return {medium: len(list(keys)) for medium, keys in kept.items()}

    def close(self):
        self.core.shutdown()
        self.subscriber.close()


def test_a_tier_tells_what_host_memory_and_the_folder_have(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    folder = make_checkpoint(tmp_path / "llama", {"num_hidden_layers": 2}, "llama")
    one = TierScene(folder, "tier-one", tmp_path / "kv")
    for prompt in (*prompts(), prompts()[0]):
        one.ask(prompt)
        counts = one.check()
    assert counts["STORAGE"] > counts["CPU"] > 0, "host memory has made room"
    stored = [e for e in one.index.events if isinstance(e, BlockStored) and e.medium != "GPU"]
    assert {(e.block_size, *e.token_ids) for e in stored} == {(0,)}
    assert perform(one.core, "reset_prefix_cache", (False, False)) is True
    assert one.check() == {**counts, "GPU": 0}, "what the tier has is there after a reset"
    one.close()
    two = TierScene(folder, "tier-two", tmp_path / "kv", first=1, index=one.index)
    assert two.check()["STORAGE"] == counts["STORAGE"], "a server that was started anew"
    two.ask(prompts()[0])
    assert two.check()["CPU"] > 0
    assert perform(two.core, "reset_prefix_cache", (False, True)) is True
    assert two.check() == {"GPU": 0, "CPU": 0, "STORAGE": 0}
    two.close()


def test_the_events_of_a_connector_are_published(scene):
    stage = scene()
    own = [BlockStored([7], None, [], 0, None, "STORAGE", None)]
    stage.feature._of_connector = lambda: [own.pop()] if own else []
    stage.ask(1, ids(1))
    stage.run()
    stage.follow()
    assert ("STORAGE", None, 7) in stage.index.contents


def test_a_taken_endpoint_is_refused_with_its_option():
    plan = KVEventsPlan(KVEventsConfig(endpoint="inproc://taken"))
    publisher = open_publisher(plan)
    with pytest.raises(InvalidParameter, match=r"kv_events_config\['endpoint'\].*in use"):
        open_publisher(plan)
    publisher.close()
