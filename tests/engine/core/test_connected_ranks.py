"""K/V between engines of several ranks: each rank pulls its share, and what one of them does not
get is computed.
"""

from __future__ import annotations

import random
import socket

import pytest

from quire.engine.core.builder import build_core, core_over, worker_config
from quire.errors import InvalidParameter, NotBuiltYet
from quire.executor.uniproc import open_uniproc
from tests.engine.core.kv_tier_scene import (
    OUTPUT,
    PROMPT,
    Ask,
    open_plan,
    prompts,
)
from tests.engine.core.peer_scene import Peer, peer_config
from tests.engine.core.test_peer_connector import check_pulled, state

TP2 = {"tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def free_ports(count):
    while True:
        first = random.randrange(20000, 30000)
        try:
            for port in range(first, first + count):
                with socket.socket() as found:
                    found.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


class RankedPeer(Peer):
    """A core with two workers, in threads of this process or in processes."""

    def __init__(self, model, sizes=TP2, *, in_threads=True, **extra):
        config = peer_config(port=free_ports(2), **extra)
        options = {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "enforce_eager": False}
        plan = open_plan(model, host_bytes=0, kv_transfer_config=config, **options, **sizes)
        if in_threads:
            core = core_over(plan, open_uniproc(worker_config(plan), num_workers=2))
        else:
            core = build_core(plan)
        Ask.__init__(self, core)

    def half(self, rank):
        return self.core.executor.workers[rank].connected_rank._half


@pytest.fixture
def peers(model):
    opened = []

    def make(count=2, **options):
        opened.extend(RankedPeer(model, **options) for _ in range(count))
        return opened[-count:]

    yield make
    for peer in opened:
        assert peer.core.scheduler.memory.pool.usage == 0
        peer.core.shutdown()


def check_exchange(prefill, decode, expected):
    for ids, answer in zip(prompts(), expected, strict=True):
        params = prefill.first_leg(ids)
        assert prefill.num_leased > 0
        before = state(decode)
        assert decode.second_leg(ids, params) == answer
        check_pulled(decode, before)
        assert prefill.settle() == 0


def test_each_rank_pulls_its_share(peers, expected):
    prefill, decode = peers()
    check_exchange(prefill, decode, expected)
    counts = [decode.half(rank).counts for rank in range(2)]
    assert counts[0]["nixl_bytes_transferred"] == counts[1]["nixl_bytes_transferred"] > 0
    assert all(prefill.half(rank).server.num_expired == 0 for rank in range(2))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [TP2, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_that_are_processes_pull_theirs(sizes, peers, expected):
    check_exchange(*peers(sizes=sizes, in_threads=False), expected)


def test_what_one_rank_does_not_get_is_computed(peers, expected):
    prefill, decode = peers()
    params = prefill.first_leg(prompts()[0])
    prefill.half(1).withdraw(params["remote_request_id"])
    hits, computed = state(decode)
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == hits and decode.computed - computed == PROMPT + OUTPUT - 1
    assert decode.half(0).counts["nixl_num_failed_transfers"] == 0
    assert decode.half(1).counts["nixl_num_failed_transfers"] == 1
    assert prefill.settle() == 0 and decode.num_leased == 0


@pytest.mark.full
def test_a_rank_without_room_keeps_none_of_a_prompt(peers):
    [prefill] = peers(1)
    prefill.half(1).server._has_room = lambda blocks: False
    assert prefill.first_leg(prompts()[0]) is None
    assert prefill.num_leased == 0 and not prefill.half(0).server._leases


@pytest.mark.full
def test_an_engine_of_other_ranks_is_not_asked(peers, model, expected):
    [ranked], single = peers(1), Peer(model)
    for one, other in ((ranked, single), (single, ranked)):
        params = one.first_leg(prompts()[0])
        before = state(other)
        assert other.second_leg(prompts()[0], params) == expected[0]
        assert other.external_hits == before[0] and one.num_leased > 0
        one.core.scheduler.connections.connection.settle()
        assert one.num_leased == 0
    with pytest.raises(AssertionError, match="tp_size.*a number of ranks"):
        single.second_leg(prompts()[1], params | {"tp_size": "2"})
    single.core.shutdown()


def test_what_ranks_cannot_do_is_refused_by_name(model):
    for config in (
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        {
            "kv_connector": "MultiConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]},
        },
    ):  # fmt: skip
        with pytest.raises(NotBuiltYet, match="With several ranks.* NixlConnector"):
            open_plan(model, host_bytes=0, kv_transfer_config=config, **TP2)
    plan = open_plan(model, host_bytes=0, kv_transfer_config=peer_config(port=0), **TP2)
    with pytest.raises(InvalidParameter, match="each takes the next one"):
        core_over(plan, open_uniproc(worker_config(plan), num_workers=2))
    with pytest.raises(InvalidParameter, match="there is no such field"):
        open_plan(model, host_bytes=0, kv_transfer_config=peer_config() | {"tp_size": 2})
