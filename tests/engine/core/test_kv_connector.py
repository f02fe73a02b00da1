"""Connectors of K/V by a class of one's own: the bits of a request alone, and the counts that show
what was loaded; whatever a class does wrong costs time or one request.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire.distributed.kv_connector.base import KVConnectorBase_V1, KVConnectorMetadata
from quire.engine.control_verbs import perform
from quire.engine.core.features import kv_connection
from tests.engine.core.kv_tier_scene import (
    BLOCK,
    OUTPUT,
    PROMPT,
    Ask,
    check_restored,
    open_core,
    prompts,
)
from tests.support.simulation.invariants import check, check_idle


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    KEPT.clear()
    CALLS.clear()


KEPT: dict[bytes, dict[str, torch.Tensor]] = {}
"""Contents of blocks, by their names and layers."""
CALLS: list[str] = []


class Moves(KVConnectorMetadata):
    def __init__(self):
        self.loads, self.saves = [], []


class Own(KVConnectorBase_V1):
    """Keeps blocks in this process; `is_beside`: loads them beside steps."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        get = vllm_config.kv_transfer_config.get_from_extra_config
        self.is_beside, self.trouble = get("is_beside", False), get("trouble", "")
        self.size = vllm_config.cache_config.block_size
        assert kv_cache_config.kv_cache_groups[0].block_size == self.size
        self.requests, self.moves, self.saved = {}, Moves(), set()
        self.done, self.bad, self.sends = set(), set(), set()

    def register_kv_caches(self, kv_caches):
        self.layers = kv_caches

    def on_new_request(self, request):
        self.requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if self.trouble == "raises":
            raise ValueError("no answer")
        if self.trouble == "asks for time" and len(CALLS) < 3:
            CALLS.append("later")
            return None, False
        count = 0
        for key in request.block_hashes[num_computed_tokens // self.size :]:
            if key not in KEPT:
                break
            count += self.size
        return (
            min(count, request.num_tokens - 1 - num_computed_tokens),
            self.is_beside and count > 0,
        )

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        CALLS.append(f"alloc {num_external_tokens}")
        if num_external_tokens:
            tables = blocks.get_block_ids()[0]
            wanted = [b for b, _ in blocks.to_load] if self.is_beside else tables
            for index, block in enumerate(tables):
                key = request.block_hashes[index] if index < len(request.block_hashes) else None
                if block in wanted and key in KEPT:
                    self.moves.loads.append((request.request_id, block, key))

    def build_connector_meta(self, scheduler_output):
        moves, self.moves = self.moves, Moves()
        counts = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        assert set(counts) == {r.req_id for r in scheduler_output.scheduled_new_reqs} | {
            *cached.req_ids
        }
        tables = {r.req_id: r.block_ids[0] for r in scheduler_output.scheduled_new_reqs}
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            assert computed + counts[name] <= self.requests[name].num_tokens
        for name, table in tables.items():
            keys = self.requests[name].block_hashes
            ready = counts[name] + next(
                r.num_computed_tokens
                for r in scheduler_output.scheduled_new_reqs
                if r.req_id == name
            )
            moves.saves += list(zip(table, keys[: ready // self.size], strict=False))
        return moves

    def start_load_kv(self, forward_context, **kwargs):
        for name, block, key in self._get_connector_metadata().loads:
            self.done.add(name)
            if self.trouble == "loses":
                self.bad.add(block)
                continue
            for layer, tensor in self.layers.items():
                assert forward_context.no_compile_layers[layer].kv_cache is tensor
                tensor[block] = KEPT[key][layer]

    def wait_for_layer_load(self, layer_name):
        assert layer_name in self.layers

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for block, key in self._get_connector_metadata().saves:
            KEPT.setdefault(key, {}).setdefault(layer_name, kv_layer[block].clone())

    def wait_for_save(self):
        CALLS.append("saved")

    def get_finished(self, finished_req_ids):
        done, self.done = self.done, set()
        return None, done if self.is_beside else None

    def get_block_ids_with_load_errors(self):
        bad, self.bad = self.bad, set()
        return bad


def connector(trouble="", policy="recompute", **extra):
    own = {"trouble": trouble, **extra}
    return {
        "kv_connector": "Own", "kv_connector_module_path": __name__, "kv_role": "kv_both",
        "kv_load_failure_policy": policy, "kv_connector_extra_config": own,
    }  # fmt: skip


def opened(model, config, **options):
    return Ask(open_core(model, kv_transfer_config=config, max_num_batched_tokens=64, **options))


@pytest.mark.parametrize("is_beside", [False, True], ids=["in the step", "beside steps"])
def test_the_bits_come_back(is_beside, model, expected):
    ask = opened(model, connector(is_beside=is_beside))
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    check_restored(ask, prompts(), expected)
    assert len(KEPT) >= 3 * (PROMPT // BLOCK)
    assert any(call == f"alloc {(PROMPT - 1) // BLOCK * BLOCK}" for call in CALLS)


def test_a_connector_that_always_misses_is_noticed(model, expected, monkeypatch):
    ask = opened(model, connector())
    assert [ask(ids) for ids in prompts()] == expected
    monkeypatch.setattr(Own, "get_num_new_matched_tokens", lambda *args: (0, False))
    with pytest.raises(AssertionError):
        check_restored(ask, prompts(), expected)


@pytest.mark.parametrize("is_beside", [False, True], ids=["in the step", "beside steps"])
def test_what_is_not_loaded_is_computed(is_beside, model, expected):
    ask = opened(model, connector("loses", is_beside=is_beside))
    for _ in range(2):
        assert [ask(ids) for ids in prompts()] == expected
    assert ask.core.scheduler.memory.pool.usage == 0
    assert ask.core.scheduler.counters.num_preemptions == (0 if is_beside else 3)


@pytest.mark.parametrize("is_beside", [False, True], ids=["in the step", "beside steps"])
def test_what_is_not_loaded_fails_where_that_is_wanted(is_beside, model, expected):
    ask = opened(model, connector("loses", "fail", is_beside=is_beside))
    assert [ask(ids) for ids in prompts()] == expected
    ask.add(99, prompts()[0])
    ends = []
    while ask.core.has_work:
        out = ask.core.step()
        assert not out.token_ids
        ends += out.finished
    (end,) = ends
    assert str(end.reason) == "error" and "kv_load_failure_policy" in end.message
    assert ask.core.scheduler.memory.pool.usage == 0
    assert not ask.core.scheduler.requests


def test_a_request_waits_for_an_answer(model, expected):
    ask = opened(model, connector("asks for time"))
    assert ask(prompts()[0]) == expected[0]
    assert CALLS[:3] == ["later"] * 3


def test_a_connector_that_raises_costs_its_loads(model, expected):
    ask = opened(model, connector("raises"))
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0


@pytest.mark.parametrize("is_beside", [False, True], ids=["in the step", "beside steps"])
@pytest.mark.parametrize(
    "method",
    ["update_state_after_alloc", "build_connector_meta", "start_load_kv", "save_kv_layer"],
)
def test_whatever_raises_costs_time_alone(method, is_beside, model, expected, monkeypatch):
    monkeypatch.setattr(kv_connection, "_SETTLE_S", 0.1)
    ask = opened(model, connector(is_beside=is_beside))
    assert [ask(ids) for ids in prompts()] == expected

    def fail(*args, **kwargs):
        raise ValueError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Own, method, fail)
        ask.add(99, prompts()[0])
        found = {}
        while ask.core.scheduler.requests:
            out = ask.core.step()
            for handle, token in zip(out.handles, out.token_ids, strict=True):
                found.setdefault(handle, []).append(token)
        assert found[99] == [token for token, _ in expected[0]]
    hits = ask.external_hits
    assert [ask(ids) for ids in prompts()] == expected
    assert ask.external_hits == hits, "it is not used any more"
    check_idle(ask.core.scheduler)


def test_requests_that_are_none_cost_time_alone(model, expected, monkeypatch):
    ask = opened(model, connector(is_beside=True))
    with monkeypatch.context() as patch:
        patch.setattr(Own, "get_finished", lambda self, ended: ({"mine"}, None))
        assert ask(prompts()[0]) == expected[0]
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0


def test_files_of_whole_prompts_come_back(model, expected, tmp_path):
    config = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }  # fmt: skip
    ask = opened(model, config)
    assert [ask(ids) for ids in prompts()] == expected and ask.external_hits == 0
    check_restored(ask, prompts(), expected)
    ask.core.shutdown()
    ask = opened(model, config)  # as after a restart
    check_restored(ask, prompts(), expected)
    assert ask.computed == 3 * (OUTPUT + (PROMPT - 1) % BLOCK)
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
    hits = ask.external_hits
    assert [ask(ids) for ids in prompts()] == expected
    assert ask.external_hits - hits <= PROMPT, "what is torn is computed"


def test_several_connectors_are_one(model, expected, tmp_path):
    files = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22},
    }
    own = {**connector(), "kv_role": "kv_both"}
    config = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [own, files]},
    }  # fmt: skip
    ask = opened(model, config)
    assert [ask(ids) for ids in prompts()] == expected
    check_restored(ask, prompts(), expected)
    assert KEPT and list(tmp_path.rglob("complete")), "all of them save"
    KEPT.clear()
    check_restored(ask, prompts(), expected)
    config["kv_connector_extra_config"]["connectors"] = [offload, own]
    ask = opened(model, config)
    assert [ask(ids) for ids in prompts()] == expected
    KEPT.clear()
    check_restored(ask, prompts(), expected)


@pytest.mark.parametrize("trouble", ["", "loses"])
@pytest.mark.parametrize("is_beside", [False, True], ids=["in the step", "beside steps"])
def test_preemptions_aborts_and_resets_leave_the_promises(is_beside, trouble, model, expected):
    """A small pool, requests that come and go at random, and every invariant after each step."""
    draw = random.Random(7)
    ask = opened(model, connector(trouble, is_beside=is_beside), num_gpu_blocks_override=18)
    wanted, found, handle = {}, {}, 1000
    for step in range(200):
        if step < 120 and len(ask.core.scheduler.requests) < 3 and draw.random() < 0.4:
            handle, number = handle + 1, draw.randrange(3)
            wanted[handle] = number
            ask.add(handle, prompts()[number])
        if draw.random() < 0.1:
            perform(ask.core, "reset_prefix_cache", (True,))
        if ask.core.scheduler.requests and draw.random() < 0.08:
            gone = draw.choice(list(ask.core.scheduler.requests))
            ask.core.abort_requests([gone])
            del wanted[gone]
        out = ask.core.step()
        check(ask.core.scheduler)
        for each, token in zip(out.handles, out.token_ids, strict=True):
            found.setdefault(each, []).append(token)
    while ask.core.has_work:
        out = ask.core.step()
        for each, token in zip(out.handles, out.token_ids, strict=True):
            found.setdefault(each, []).append(token)
    check_idle(ask.core.scheduler)
    right = [[token for token, _ in answer] for answer in expected]
    assert all(found[each] == right[number] for each, number in wanted.items())
    assert len(wanted) > 15 and (trouble or ask.external_hits > 5 * PROMPT)
