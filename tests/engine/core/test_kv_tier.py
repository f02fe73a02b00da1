"""K/V that comes back from host memory or a folder: the bits of a request alone, whatever kind of
memory its layers have, and with the counts that show that it was not computed again.
"""

from __future__ import annotations

import threading

import pytest

from quire.engine.control_verbs import perform
from quire.engine.core.builder import core_over, worker_config
from quire.engine.core.features.kv_tier import SharedIndex
from quire.executor.uniproc import open_uniproc
from quire.testing import make_checkpoint
from tests.engine.core.kv_tier_scene import (
    BLOCK,
    BLOCKS,
    MIXED,
    OUTPUT,
    PROMPT,
    Ask,
    alone,
    check_restored,
    folders_of,
    ids_of,
    open_core,
    open_plan,
    prompts,
    tier_of,
)
from tests.executor.weight_transfer.test_updates import tensors_of, update

SLIDING = {"num_hidden_layers": 2, "sliding_window": 11}
HYBRID = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
KINDS = {
    "float32": ("llama", {"num_hidden_layers": 2}, {}),
    "bfloat16": ("llama", {"num_hidden_layers": 2}, {"dtype": "bfloat16"}),
    "int8 with scales": ("llama", {"num_hidden_layers": 2}, {"kv_cache_dtype": "int8"}),
    "windows": ("mistral", SLIDING, {}),
    "two groups": ("gemma3", MIXED, {"num_gpu_blocks_override": 40}),
    "latents": ("youtu", {"num_hidden_layers": 2}, {}),
    "states": ("mamba2", {"num_hidden_layers": 2}, {"num_gpu_blocks_override": 8}),
    "states and keys": ("qwen3_5", HYBRID, {"num_gpu_blocks_override": 8}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folders_of(KINDS, tmp_path_factory)


@pytest.mark.parametrize("name", KINDS)
def test_the_bits_come_back_from_host_memory(name, folders):
    options = KINDS[name][2]
    expected = alone(folders(name), prompts(), **options)
    ask = Ask(open_core(folders(name), **options))
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    check_restored(ask, prompts(), expected)


def test_a_tier_that_always_misses_is_noticed(folders, monkeypatch):
    expected = alone(folders("float32"), prompts())
    ask = Ask(open_core(folders("float32")))
    assert [ask(ids) for ids in prompts()] == expected
    monkeypatch.setattr(SharedIndex, "has", lambda self, key: False)
    with pytest.raises(AssertionError):
        check_restored(ask, prompts(), expected)


def test_what_comes_back_into_another_block_is_noticed(folders, monkeypatch):
    expected = alone(folders("float32"), prompts())
    ask = Ask(open_core(folders("float32")))
    assert [ask(ids) for ids in prompts()] == expected
    transfers = tier_of(ask.core)
    write = transfers._copies.write
    transfers._copies.write = lambda group, block, slot: write(group, block % 3 + 1, slot)
    with pytest.raises(AssertionError):
        check_restored(ask, prompts(), expected)


def test_networks_that_draft_take_part(folders):
    draft = {"method": "draft_model", "model": str(folders("float32")), "num_speculative_tokens": 2}
    options = {"speculative_config": draft, "num_gpu_blocks_override": BLOCKS}
    expected = [ids_of(answer) for answer in alone(folders("float32"), prompts())]
    ask = Ask(open_core(folders("float32"), **options), logprobs=None)
    for _ in range(2):
        assert [ids_of(ask(ids)) for ids in prompts()] == expected
    assert ask.external_hits >= 3 * PROMPT // 2
    assert sum(ask.core.scheduler.counters.num_accepted[1:]) > 0
    assert len(tier_of(ask.core)._copies._kv_cache._parts_of(0)) == 2 * 2, "of both models"


@pytest.mark.full
def test_two_workers_have_a_share_each(folders):
    expected = alone(folders("float32"), prompts())
    plan = open_plan(folders("float32"))
    ask = Ask(core_over(plan, open_uniproc(worker_config(plan), num_workers=2)))
    assert [ids_of(ask(ids)) for ids in prompts()] == list(map(ids_of, expected))
    assert [ids_of(ask(ids)) for ids in prompts()] == list(map(ids_of, expected))
    assert ask.external_hits >= 3 * PROMPT // 2
    stores = [worker.model_runner.transfers._host for worker in ask.core.executor.workers]
    assert set(stores[0]) == set(stores[1]) and len(stores[0]) > 0


@pytest.mark.full
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_in_processes_keep_their_shares(size, folders):
    expected = alone(folders("float32"), prompts())
    ask = Ask(open_core(folders("float32"), **{size: 2}))
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    check_restored(ask, prompts(), expected)
    ask.core.shutdown()


def test_the_least_recently_used_makes_room(folders):
    expected = alone(folders("float32"), prompts())
    ask = Ask(open_core(folders("float32"), host_bytes=1 << 15))
    host = tier_of(ask.core)._host
    for _ in range(2):
        assert [ask(ids) for ids in prompts()] == expected
    assert len(host) == len(host._slots) < 3 * PROMPT // BLOCK


def test_a_content_is_stored_when_it_comes_for_the_second_time(folders):
    extra = {"cpu_bytes_to_use": 1 << 22, "store_threshold": 2, "max_tracker_size": 100}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = extra
    ask = Ask(open_core(folders("float32"), kv_transfer_config=config))
    expected = [ask(ids) for ids in prompts()]
    assert len(tier_of(ask.core)._host) == 0
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    check_restored(ask, prompts(), expected)


class Gate:
    """Holds copies of blocks up until it is opened."""

    def __init__(self, ask):
        self.opened = threading.Event()
        self.copies = tier_of(ask.core)._copies
        self.write, self.copies.write = self.copies.write, self.wait

    def wait(self, *args):
        assert self.opened.wait(60)
        return self.write(*args)


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(folders):
    ask = Ask(open_core(folders("float32")))
    expected = [ask(ids) for ids in prompts()]
    gate = Gate(ask)
    ask.add(77, prompts()[0])
    ask.core.step()
    pool = ask.core.scheduler.memory.pool
    assert ask.core.scheduler.transfers.num_under_way == 1 and pool.usage > 0
    ask.core.abort_requests([77])
    ask.core.step()
    assert pool.usage > 0, "its blocks are still written"
    gate.opened.set()
    ask.run()
    assert pool.usage == 0 and ask.core.scheduler.transfers.num_under_way == 0
    check_restored(ask, prompts(), expected)


def test_others_go_on_while_one_loads(folders):
    ask = Ask(open_core(folders("float32"), num_gpu_blocks_override=24))
    expected = [ask(ids) for ids in prompts()]
    gate = Gate(ask)
    ask.add(77, prompts()[0])
    ask.core.step()
    other = prompts(1, seed=9)[0][:20]
    ask.add(78, other)
    found = {}
    while len(found.get(78, ())) < OUTPUT:
        out = ask.core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            found.setdefault(handle, []).append(token)
    assert 77 not in found
    gate.opened.set()
    assert ask.run()[77] == expected[0]


def test_what_cannot_be_loaded_is_computed_again(folders):
    ask = Ask(open_core(folders("float32")))
    expected = [ask(ids) for ids in prompts()]

    def fail(*args):
        raise OSError("no copy")

    copies = tier_of(ask.core)._copies
    copies.write, write = fail, copies.write
    assert [ask(ids) for ids in prompts()] == expected
    assert ask.external_hits == 0
    copies.write = write
    check_restored(ask, prompts(), expected)


FAILING = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22},
}  # fmt: skip


def ends_of(ask, handle, ids):
    ask.add(handle, ids)
    ends = []
    while ask.core.has_work:
        ends += ask.core.step().finished
    assert ask.core.scheduler.memory.pool.usage == 0
    return [(str(end.reason), end.message) for end in ends]


def test_a_damaged_block_ends_its_request_where_that_is_wanted(folders):
    ask = Ask(open_core(folders("float32"), kv_transfer_config=FAILING))
    expected = [ask(ids) for ids in prompts()]
    host = tier_of(ask.core)._host
    content = host.get(next(iter(host)))
    content.slot[3] ^= 1
    [(reason, message)] = ends_of(ask, 70, prompts()[0])
    assert reason == "error" and "kv_load_failure_policy" in message
    check_restored(ask, prompts()[1:], expected[1:])
    assert ask(prompts()[0]) == expected[0], "what is damaged was dropped"


def test_a_block_that_made_room_for_others_is_computed_all_the_same(folders):
    ask = Ask(open_core(folders("float32"), kv_transfer_config=FAILING))
    expected = [ask(ids) for ids in prompts()]
    tier_of(ask.core)._host.clear()
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0


def test_what_cannot_be_stored_is_not_there(folders):
    ask = Ask(open_core(folders("float32")))
    copies = tier_of(ask.core)._copies

    def fail(*args):
        raise OSError("no copy")

    copies.read = fail
    expected = alone(folders("float32"), prompts())
    for _ in range(2):
        assert [ask(ids) for ids in prompts()] == expected
    assert ask.external_hits == 0 and len(tier_of(ask.core)._host) == 0


def test_requests_that_are_preempted_come_back_from_it(folders):
    expected = alone(folders("float32"), prompts())
    ask = Ask(open_core(folders("float32"), max_num_batched_tokens=12))
    [ask(ids) for ids in prompts()]
    for handle, ids in enumerate(prompts(), 100):
        ask.add(handle, ids)
    found, steps = {}, 0
    while ask.core.has_work:
        steps += 1
        if steps in (2, 5, 9, 14):
            assert perform(ask.core, "reset_prefix_cache", (True,)) is True
        out = ask.core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            found.setdefault(handle, []).append(token)
    assert [found[handle] for handle in sorted(found)] == list(map(ids_of, expected))
    assert ask.core.scheduler.counters.num_preemptions > 0 and ask.external_hits > 0


def test_a_reset_of_the_connector_forgets_all(folders):
    ask = Ask(open_core(folders("float32")))
    expected = [ask(ids) for ids in prompts()]
    assert perform(ask.core, "reset_prefix_cache", (False, False)) is True
    check_restored(ask, prompts(), expected)
    assert perform(ask.core, "reset_prefix_cache", (False, True)) is True
    assert len(tier_of(ask.core)._host) == 0
    hits = ask.external_hits
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == hits
    check_restored(ask, prompts(), expected)


def test_nothing_of_before_an_update_is_found_after_it(folders, tmp_path):
    other = make_checkpoint(tmp_path / "other", {"num_hidden_layers": 2}, "llama", 7)
    config = {"backend": "ipc"}
    ask = Ask(open_core(folders("float32"), weight_transfer_config=config))
    ask.core.init_weight_transfer_engine({})
    expected = [ask(ids) for ids in prompts()]
    right = alone(other, prompts())
    for folder, answers in ((other, right), (folders("float32"), expected)):
        update(ask.core, tensors_of(folder).items())
        hits = ask.external_hits
        assert [ask(ids) for ids in prompts()] == answers and ask.external_hits == hits
        check_restored(ask, prompts(), answers)


@pytest.mark.parametrize("change", ["a function", "reload_weights"])
def test_other_weights_share_nothing(change, folders):
    ask = Ask(open_core(folders("float32")))
    expected = [ask(ids) for ids in prompts()]

    def negate(worker):
        for tensor in worker.get_model().weight_tensors():
            tensor.mul_(1)

    perform(ask.core, "collective_rpc", (negate if change == "a function" else change,))
    perform(ask.core, "reset_prefix_cache", ())
    assert len(tier_of(ask.core)._host) == 0
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0


def test_salts_and_the_tokens_before_are_part_of_a_content(folders):
    ask = Ask(open_core(folders("float32")))
    ids = prompts()[0]
    ask(ids, salt="one")
    for other in prompts()[1:]:
        ask(other)
    assert ask.external_hits == 0
    ask(ids, salt="two")
    ask(ids)
    ask([7, *ids[1:]], salt="one")
    assert ask.external_hits == 0
    ask(ids, salt="one")
    assert ask.external_hits > PROMPT // 2


def test_what_one_tenant_has_stored_changes_no_count_of_another(folders):
    """Whatever of a prompt's beginning the other has asked for: loads, hits and computed tokens of
    the own request are those of an engine that has never seen it.
    """
    ids, counts = prompts()[0], []
    for seen in (0, BLOCK, PROMPT):
        ask = Ask(open_core(folders("float32")))
        if seen:
            ask(ids[:seen], salt="theirs")
            for other in prompts()[1:]:
                ask(other, salt="theirs")
        before = ask.external_hits, ask.computed, len(ask.cached)
        ask(ids, salt="mine")
        hits, computed, since = before
        counts.append((ask.external_hits - hits, ask.computed - computed, ask.cached[since:]))
    assert counts == [counts[0]] * 3 and counts[0][0] == 0


def test_a_sleeping_engine_keeps_what_it_has_stored(folders):
    ask = Ask(open_core(folders("float32")))
    expected = [ask(ids) for ids in prompts()]
    ask.core.sleep(1).result(0)
    ask.core.wake_up()
    check_restored(ask, prompts(), expected)


def test_the_stats_count_it(folders):
    ask = Ask(open_core(folders("float32")))
    [ask(ids) for ids in prompts()]
    ask.stats.clear()
    ask(prompts()[0])
    hits = sum(stats.external_prefix_cache_hits for stats in ask.stats)
    queries = sum(stats.external_prefix_cache_queries for stats in ask.stats)
    local = sum(stats.prefix_cache_hits for stats in ask.stats)
    assert hits == ask.external_hits > 0 and hits + local == ask.cached[-1]
    assert queries == PROMPT - local
    loaded = sum(stats.kv_offload_load_bytes for stats in ask.stats)
    assert loaded == hits // BLOCK * tier_of(ask.core)._content_bytes[0]
