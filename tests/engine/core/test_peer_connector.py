"""K/V from another engine: the bits of a request alone, the counts that show that it was not
computed again, and peers that die, lie or are not asked for.
"""

from __future__ import annotations

import itertools
import time

import pytest

from quire.distributed.peers import client, server
from quire.distributed.peers.keys import peer_keys
from quire.distributed.peers.messages import PulledBlock, digest_of
from quire.engine.control_verbs import perform
from quire.errors import InvalidParameter, NotBuiltYet
from tests.engine.core.kv_tier_scene import (
    BLOCK,
    MIXED,
    OUTPUT,
    PROMPT,
    alone,
    folders_of,
    ids_of,
    prompts,
)
from tests.engine.core.peer_scene import FIRST_LEG, Peer, peer_config

WHOLE = (PROMPT - 1) // BLOCK * BLOCK
KINDS = {
    "float32": ("llama", {"num_hidden_layers": 2}, {}),
    "int8 with scales": ("llama", {"num_hidden_layers": 2}, {"kv_cache_dtype": "int8"}),
    "two groups": ("gemma3", MIXED, {"num_gpu_blocks_override": 64}),
    "latents": ("youtu", {"num_hidden_layers": 2}, {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folders_of(KINDS, tmp_path_factory)


@pytest.fixture(scope="module")
def model(folders):
    return folders("float32")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(client, "_RETRY_S", 0.0)


@pytest.fixture
def peers(model):
    opened = []

    def make(count=2, **options):
        opened.extend(Peer(model, **options) for _ in range(count))
        return opened[-count:]

    yield make
    for peer in opened:
        peer.core.shutdown()


def check_pulled(peer, before, count=WHOLE):
    """A prompt was answered without computing what was pulled."""
    assert peer.external_hits - before[0] == count
    assert peer.computed - before[1] == PROMPT - count + OUTPUT - 1


def state(peer):
    return peer.external_hits, peer.computed


@pytest.mark.parametrize("name", KINDS)
def test_the_bits_come_from_another_engine(name, folders):
    options = KINDS[name][2]
    expected = alone(folders(name), prompts(), **options)
    prefill, decode = (Peer(folders(name), **options) for _ in range(2))
    for ids, answer in zip(prompts(), expected, strict=True):
        params = prefill.first_leg(ids)
        assert params["do_remote_prefill"] is True and params["remote_num_tokens"] == PROMPT
        assert prefill.num_leased > 0
        before = state(decode)
        assert decode.second_leg(ids, params) == answer
        size = max(group.block_size or BLOCK for group in decode.core.scheduler.config.groups)
        check_pulled(decode, before, (PROMPT - 1) // size * size)
        assert prefill.settle() == 0 and prefill.server.num_expired == 0
    for peer in (prefill, decode):
        assert peer.core.scheduler.memory.pool.usage == 0
        peer.core.shutdown()


@pytest.mark.full
def test_networks_that_draft_take_part(model):
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    expected = [ids_of(answer) for answer in alone(model, prompts())]
    prefill, decode = (Peer(model, speculative_config=draft) for _ in range(2))
    for ids, answer in zip(prompts(), expected, strict=True):
        params, hits = prefill.first_leg(ids), decode.external_hits
        found = decode.second_leg(ids, params)
        assert ids_of(found) == answer and decode.external_hits - hits == WHOLE
    assert sum(decode.core.scheduler.counters.num_accepted[1:]) > 0
    for peer in (prefill, decode):
        peer.core.shutdown()


def test_a_peer_that_always_misses_is_noticed(peers, expected, monkeypatch):
    prefill, decode = peers()
    monkeypatch.setattr(server.PeerServer, "_content", lambda self, name, key: None)
    params, before = prefill.first_leg(prompts()[0]), state(decode)
    assert decode.second_leg(prompts()[0], params) == expected[0]
    with pytest.raises(AssertionError):
        check_pulled(decode, before)
    assert decode.external_hits == 0 and decode.connector.client.num_failed == 1


def test_several_requests_pull_at_once(peers, expected):
    prefill, decode = peers()
    params = [prefill.first_leg(ids) for ids in prompts()]
    for handle, (ids, own) in enumerate(zip(prompts(), params, strict=True), 50):
        decode.send(handle, ids, own)
    found = decode.run()
    assert [found[handle] for handle in sorted(found)] == expected
    assert decode.external_hits == 3 * WHOLE


def test_what_is_cached_is_not_pulled(peers, expected):
    prefill, decode = peers()
    decode.second_leg(prompts()[0], None)
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == 0 and prefill.settle() == 0
    assert prefill.server.num_expired == 0, "it was told that its blocks are not wanted"


def test_a_peer_that_is_gone_costs_time(peers, expected):
    prefill, decode = peers(config=peer_config(kv_load_timeout=0.3))
    params = prefill.first_leg(prompts()[0])
    prefill.core.shutdown()
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == 0 and decode.core.scheduler.memory.pool.usage == 0


def test_a_peer_that_is_gone_ends_the_request_where_that_is_wanted(peers):
    prefill, decode = peers(config=peer_config(policy="fail", kv_load_timeout=0.3))
    params = prefill.first_leg(prompts()[0])
    prefill.server.end_all()
    decode.send(7, prompts()[0], params)
    ends = []
    while decode.core.has_work:
        ends += decode.core.step().finished
    assert [str(end.reason) for end in ends] == ["error"]
    assert "kv_load_failure_policy" in ends[0].message
    assert decode.core.scheduler.memory.pool.usage == 0


def test_leases_end_by_time(peers, expected):
    prefill, decode = peers(config=peer_config(kv_lease_duration=0.2))
    params = prefill.first_leg(prompts()[0])
    assert prefill.core.scheduler.memory.pool.usage > 0 and prefill.core.has_work
    assert prefill.settle() == 0 and prefill.server.num_expired == 1
    assert prefill.core.scheduler.memory.pool.usage == 0
    assert decode.second_leg(prompts()[0], params) == expected[0] and decode.external_hits == 0


def test_a_request_that_waits_keeps_its_lease(peers, expected):
    prefill, decode = peers(config=peer_config(kv_lease_duration=0.6), max_num_seqs=1)
    params = prefill.first_leg(prompts()[0])
    decode.send(1, prompts()[1])
    decode.send(2, prompts()[0], params)
    end = prefill.server._clock() + 1.5
    while prefill.server._clock() < end:
        prefill.core.step()
    assert prefill.num_leased > 0, "beats come while the request waits"
    assert decode.run()[2] == expected[0] and decode.external_hits == WHOLE
    assert prefill.settle() == 0 and prefill.server.num_expired == 0


def test_a_clock_that_is_set_ends_no_lease_and_no_pull(peers, expected, monkeypatch):
    jumps, real = itertools.cycle([86_400.0, -86_400.0, 0.0]), time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    prefill, decode = peers()
    for ids, answer in zip(prompts(), expected, strict=True):
        before = state(decode)
        assert decode.second_leg(ids, prefill.first_leg(ids)) == answer
        check_pulled(decode, before)
    assert prefill.settle() == 0 and prefill.server.num_expired == 0


def test_blocks_of_an_output_are_pulled_too(peers):
    prefill, decode = peers()
    output, params = [], {}
    prefill.send(7, prompts()[0], FIRST_LEG, max_tokens=2 * BLOCK)
    while prefill.core.scheduler.requests:
        step = prefill.core.step()
        output += step.token_ids
        params |= {part.handle: part.params for part in step.parts}
    before = state(decode)
    decode.send(7, [*prompts()[0], *output], params[7], max_tokens=2)
    decode.run()
    assert decode.external_hits - before[0] == (PROMPT + 2 * BLOCK - 1) // BLOCK * BLOCK


def test_params_that_are_refused_leave_the_connector_as_it_was(peers, expected):
    prefill, decode = peers()
    decode.send(7, prompts()[0], {"do_remote_decode": "yes"})
    [end] = decode.core.step().finished
    assert "do_remote_decode" in end.message
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == WHOLE


def test_an_aborted_request_leaves_nothing(peers, expected):
    prefill, decode = peers()
    params = prefill.first_leg(prompts()[0])
    decode.send(9, prompts()[0], params)
    decode.core.step()
    decode.core.abort_requests([9])
    assert decode.settle() == 0 and prefill.settle() == 0
    assert decode.core.scheduler.memory.pool.usage == 0
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]


def test_weights_that_may_have_changed_are_not_shared(peers, expected):
    prefill, decode = peers()
    params = prefill.first_leg(prompts()[0])
    perform(prefill.core, "collective_rpc", (lambda worker: None,))
    assert prefill.num_leased == 0
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0] and decode.external_hits == 0


def test_another_root_is_refused(model, peers, expected):
    (decode,) = peers(1)
    (other,) = peers(1, dtype="bfloat16", block_size=2 * BLOCK)
    params = other.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0] and decode.external_hits == 0
    assert other.server.num_sent_bytes == 0 and not other.server._pullers


def test_resets_end_what_moves(peers, expected):
    prefill, decode = peers()
    prefill.first_leg(prompts()[0])
    assert perform(prefill.core, "reset_prefix_cache", (False, True)) is True
    assert prefill.num_leased == 0
    prefill.core.sleep(1).result(0)
    prefill.core.wake_up()
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == WHOLE


FORGED = {
    "another lease": {"remote_request_id": "0" * 32},
    "another engine": {"remote_engine_id": "f" * 32},
    "more tokens": {"remote_num_tokens": 10**9},
    "other blocks": {"remote_block_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9]]},
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_params_get_nothing_of_others(name, peers, expected):
    prefill, decode = peers(config=peer_config(peers=["127.0.0.1"]))
    theirs = prefill.first_leg(prompts()[1], salt="theirs")
    before = prefill.server.num_sent_bytes
    own = {**theirs, **FORGED[name]}
    assert decode.second_leg(prompts()[0], own) == expected[0]
    assert prefill.server.num_sent_bytes == before, "their K/V is not what this prompt names"
    assert decode.second_leg(prompts()[1], theirs, salt="mine") == expected[1]
    assert prefill.server.num_sent_bytes == before and decode.external_hits == 0


STRANGERS = {
    "another host": {"remote_host": "169.254.169.254"},
    "another port": {"remote_port": 22},
    "a name for it": {"remote_host": "localhost"},
    "more tokens": {"remote_num_tokens": 10**9},
    "another lease": {"remote_request_id": "0" * 32},
    "another engine": {"remote_engine_id": "f" * 32},
    "another signature": {"remote_signature": "0" * 64},
    "a signature that is no text": {"remote_signature": 1},
    "a signature of other letters": {"remote_signature": "\udcff\u00e4"},
    "none": {"remote_signature": None},
}


@pytest.mark.parametrize("name", STRANGERS)
def test_nothing_is_connected_to_for_params_that_no_engine_has_signed(name, peers):
    prefill, decode = peers()
    params = {**prefill.first_leg(prompts()[0]), **STRANGERS[name]}
    decode.send(7, prompts()[0], params)
    [end] = decode.core.step().finished
    assert str(end.reason) == "error" and "it is not among the peers" in end.message
    assert end.message.startswith("kv_transfer_params['remote_host']")
    decode.settle()
    assert not decode.connector.client._links and not decode.connector.client._held
    assert not decode.core.has_work and not decode.core.scheduler.requests


def test_a_router_names_only_peers_that_were_configured(peers, expected):
    (prefill,) = peers(1)
    (decode,) = peers(1, config=peer_config(peers=[f"127.0.0.1:{prefill.server.port}"]))
    params = {**prefill.first_leg(prompts()[0]), "remote_signature": None}
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == WHOLE
    decode.send(7, prompts()[0], {**params, "remote_port": 22})
    [end] = decode.core.step().finished
    assert "it is not among the peers" in end.message


def test_a_request_that_is_refused_holds_no_lease(peers):
    prefill, decode = peers()
    params = prefill.first_leg(prompts()[0])
    decode.send(7, prompts()[0], params, max_tokens=1)
    decode.core.abort_requests([7])
    decode.send(8, prompts()[0] * 2, params)
    [end] = decode.core.step().finished
    assert end.handle == 8 and "cannot be scheduled" in end.message
    decode.settle()
    assert not decode.core.features[-1]._views and prefill.settle() == 0


def test_leases_take_a_share_of_the_pool(peers, expected):
    config = peer_config(kv_lease_pool_share=0.3)
    (prefill,) = peers(1, config=config)
    (decode,) = peers(1)
    assert prefill.first_leg(prompts()[0]) is not None
    assert prefill.first_leg(prompts()[1]) is None, "it is not kept, and computed where it goes on"
    assert prefill.server.num_refused == 1
    params = prefill.first_leg(prompts()[0])
    assert params is not None, "the blocks are kept already"
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == WHOLE
    prefill.server.end_all()
    assert prefill.settle() == 0
    assert prefill.first_leg(prompts()[1]) is not None


def test_leases_are_counted(peers):
    (prefill,) = peers(1, config=peer_config(kv_lease_count=1))
    assert prefill.first_leg(prompts()[0]) is not None
    assert prefill.first_leg(prompts()[0]) is None and prefill.server.num_refused == 1


def test_nobody_renews_a_lease_for_ever(peers):
    (prefill,) = peers(1, config=peer_config(kv_lease_limit=0.4))
    lease = prefill.first_leg(prompts()[0])["remote_request_id"]
    end = prefill.server._clock() + 2.0
    while prefill.num_leased and prefill.server._clock() < end:
        prefill.server._renew([lease])
        prefill.core.step()
    assert not prefill.num_leased and prefill.server.num_expired == 1


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_prefill": "yes"},
        {"remote_host": "a\x00b"},
        {"remote_host": 7},
        {"remote_port": 0},
        {"remote_port": "many"},
        {"remote_num_tokens": "all"},
        {"remote_num_tokens": True},
        {"remote_request_id": "x" * 1000},
        {"remote_engine_id": ["a"]},
        {"remote_prefiller": "host"},
    ],
    ids=str,
)
def test_params_of_other_types_are_refused_by_name(change):
    from quire.distributed.peers.params import check_params

    good = {
        **FIRST_LEG, "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 5600,
        "remote_num_tokens": 8, "remote_request_id": "a", "remote_engine_id": "b",
    }  # fmt: skip
    check_params(good)
    with pytest.raises(InvalidParameter, match=next(iter(change))):
        check_params({**good, **change})


def lying(kind):
    def answer(self, puller, message):
        for key, group in message.blocks:
            content = self._content(message.lease, (key, group))
            digest = digest_of(key, group, content)
            if kind == "short":
                content, digest = content[:-4], digest_of(key, group, content[:-4])
            elif kind == "flipped":
                content = bytes([content[0] ^ 1]) + content[1:]
            elif kind == "another name":
                key = bytes(32)
            elif kind == "another group":
                group = 7
            elif kind == "another read":
                message.number += 1
            frames = [content, content] if kind == "two contents" else [content]
            self._send(puller, PulledBlock(message.number, key, group, digest), *frames)

    return answer


@pytest.mark.parametrize(
    "kind", ["short", "flipped", "another name", "another group", "another read", "two contents"]
)
def test_the_blocks_of_a_peer_that_lies_are_not_used(kind, peers, expected, monkeypatch):
    prefill, decode = peers(config=peer_config(kv_load_timeout=0.3))
    monkeypatch.setattr(server.PeerServer, "_answer", lying(kind))
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == 0 and decode.core.scheduler.memory.pool.usage == 0


def test_who_does_not_know_the_secret_gets_no_answer(peers, expected, monkeypatch):
    (prefill,) = peers(1)
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "words that others know")
    (decode,) = peers(1, config=peer_config(kv_load_timeout=0.3, peers=["127.0.0.1"]))
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == 0 and prefill.server.num_sent_bytes == 0
    assert not prefill.server._pullers


def test_forged_frames_are_dropped(peers, expected):
    import zmq

    prefill, decode = peers()
    from quire.distributed.peers.keys import shared_secret

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = peer_keys(shared_secret("127.0.0.1")).public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"tcp://127.0.0.1:{prefill.server.port}")
    socket.send(b"\x00not msgpack")
    socket.send_multipart([b"a", b"b"])
    socket.send(b"\x93\xa4Read\x01\xa1x")
    params = prefill.first_leg(prompts()[0])
    assert decode.second_leg(prompts()[0], params) == expected[0]
    assert decode.external_hits == WHOLE
    context.destroy(0)


def test_a_tier_of_peers_goes_by_the_name_of_a_router(model, expected):
    tier = {"type": "p2p", "port": 0, "kv_recompute_threshold": 0, "peers": ["127.0.0.1"]}
    config = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 22, "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [tier],
        },
    }  # fmt: skip
    prefill, decode = (Peer(model, config) for _ in range(2))
    prefill.first_leg(prompts()[0], {"remote_decoder": {"kv_request_id": "r-1"}})
    source = {
        "kv_request_id": "r-1", "remote_host": "127.0.0.1", "remote_port": prefill.server.port,
    }  # fmt: skip
    before = state(decode)
    assert decode.second_leg(prompts()[0], {"remote_prefiller": source}) == expected[0]
    check_pulled(decode, before)
    assert prefill.settle() == 0
    for peer in (prefill, decode):
        peer.core.shutdown()


@pytest.mark.parametrize(
    ("extra", "error", "text"),
    [
        ({"backends": ["GDS"]}, NotBuiltYet, "backends"),
        ({"enforce_handshake_compat": False}, NotBuiltYet, "never an answer"),
        ({"prot": 1}, InvalidParameter, "there is no such field"),
        ({"host": "0.0.0.0"}, InvalidParameter, "other engines find it"),
        ({"host": "10.1.2.3"}, InvalidParameter, "QUIRE_CLUSTER_SECRET"),
        ({"port": -1}, InvalidParameter, "a port"),
        ({"kv_lease_duration": 0}, InvalidParameter, "kv_lease_duration"),
        ({"kv_lease_limit": 0}, InvalidParameter, "kv_lease_limit"),
        ({"kv_lease_count": 0}, InvalidParameter, "kv_lease_count"),
        ({"kv_lease_pool_share": 1.5}, InvalidParameter, "a share of the pool"),
        ({"peers": "10.0.0.1"}, InvalidParameter, "a list of"),
        ({"peers": ["10.0.0.1/8"]}, InvalidParameter, "networks of addresses"),
    ],
)
def test_settings_are_refused_by_name(extra, error, text, model):
    with pytest.raises(error, match=text):
        Peer(model, peer_config(**extra))


def test_a_port_that_is_taken_is_said(peers, model):
    (one,) = peers(1)
    with pytest.raises(InvalidParameter, match="it cannot be opened"):
        Peer(model, peer_config(port=one.server.port))
