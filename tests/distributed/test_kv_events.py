"""Events of the KV cache on the wire: the form that routers read, numbers, replays, full queues."""

import socket

import msgspec
import pytest

from quire.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EndpointTaken,
    EventPublisher,
    KeptBatches,
    KVEventBatch,
)
from tests.support.kv_index import Subscriber

STORED = {
    "type": "BlockStored", "block_hashes": [5, 2**64 - 1], "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": None, "medium": "GPU",
    "lora_name": None, "extra_keys": [None, None], "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}  # fmt: skip


def batch(*events):
    return KVEventBatch(12.5, list(events), 0)


def test_a_batch_is_an_array_and_an_event_a_map():
    stored = BlockStored(
        [5, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0, "full_attention"
    )
    removed = BlockRemoved([5], "GPU", 0)
    payload = msgspec.msgpack.encode(batch(stored, removed, AllBlocksCleared()))
    assert msgspec.msgpack.decode(payload) == [
        12.5,
        [
            STORED,
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    decoded = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert decoded == batch(stored, removed, AllBlocksCleared())


def test_required_fields_are_there_even_where_they_are_none():
    bare = msgspec.to_builtins(BlockStored([5], None, [], 0, None, None, None))
    names = "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name"
    assert sorted(bare) == sorted(names.split())
    assert set(msgspec.to_builtins(BlockRemoved([5], None))) == {"type", "block_hashes", "medium"}


def test_the_oldest_batch_makes_room_and_is_counted():
    batches = KeptBatches(first=7, most_queued=2, most_kept=3)
    for payload in (b"a", b"b", b"c", b"d"):
        batches.add(payload)
    assert batches.num_dropped == 2
    assert [batches.take() for _ in range(3)] == [(9, b"c"), (10, b"d"), None]
    assert batches.since(0) == [(8, b"b"), (9, b"c"), (10, b"d")]
    assert batches.since(10) == [(10, b"d")] and batches.since(11) == []


@pytest.fixture
def publish():
    made = []

    def open_one(name, **options):
        made.append(EventPublisher(f"inproc://{name}", f"inproc://{name}-replay", **options))
        return made[-1]

    yield open_one
    for publisher in made:
        publisher.close()


@pytest.fixture
def subscribe():
    made = []

    def connect(*args, **options):
        made.append(Subscriber(*args, **options))
        return made[-1]

    yield connect
    for each in made:
        each.close()


def test_a_replay_closes_the_gap_that_a_full_queue_left(publish, subscribe):
    publisher = publish("full", max_queue_size=2, topic="kv@pod@model")
    subscriber = subscribe("inproc://full", "inproc://full-replay", topic="kv@pod")
    for number in range(5):
        publisher.publish(batch(BlockRemoved([number], "GPU")))
    publisher.start()
    assert publisher.num_dropped == 3
    topic, number, first = subscriber.receive()
    assert (topic, number) == (b"kv@pod@model", 3)
    assert [event.block_hashes for event in first.events] == [[3]]
    missed = subscriber.replay(0)
    assert [number for number, _ in missed] == [0, 1, 2, 3, 4]
    assert [each.events[0].block_hashes for _, each in missed] == [[0], [1], [2], [3], [4]]
    assert [number for number, _ in subscriber.replay(4)] == [4] and subscriber.replay(5) == []


def test_what_is_not_a_request_for_a_replay_is_ignored(publish, subscribe):
    publisher = publish("bad")
    publisher.start()
    subscriber = subscribe("inproc://bad", "inproc://bad-replay")
    for frames in ([b""], [b"", b"short"], [b"", b"8 bytes!", b"more"]):
        subscriber.replays.send_multipart(frames)
    assert subscriber.replay(0) == []


def test_other_topics_are_not_received(publish, subscribe):
    publisher = publish("topics", topic="b")
    other = subscribe("inproc://topics", topic="a")
    subscriber = subscribe("inproc://topics", topic="b")
    publisher.start()
    publisher.publish(batch(AllBlocksCleared()))
    assert subscriber.receive()[1] == 0
    assert not other.events.poll(0)


def test_a_name_that_utf_8_has_no_form_for_is_sent_as_its_escape(publish, subscribe):
    publisher = publish("names")
    subscriber = subscribe("inproc://names")
    publisher.start()
    publisher.publish(batch(BlockStored([5], None, [1], 1, 1, "GPU", "sql\udc80")))
    assert subscriber.receive()[2].events[0].lora_name == "sql\\udc80"


def test_batches_are_sent_before_the_end(publish, subscribe):
    publisher = publish("end")
    subscriber = subscribe("inproc://end")
    publisher.start()
    for number in range(50):
        publisher.publish(batch(BlockRemoved([number], "GPU")))
    publisher.close()
    publisher.close()
    assert [subscriber.receive()[1] for _ in range(50)] == list(range(50))


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_taken_is_named(name):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        given = {"endpoint": f"inproc://other-than-{name}", "replay_endpoint": None}
        with pytest.raises(EndpointTaken, match="Address already in use") as raised:
            EventPublisher(**given | {name: endpoint})
        assert (raised.value.name, raised.value.endpoint) == (name, endpoint)


def test_an_endpoint_of_a_subscriber_is_connected_to():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.settimeout(20)
        publisher = EventPublisher(f"tcp://127.0.0.1:{bound.getsockname()[1]}")
        try:
            connection, _ = bound.accept()
            with connection:
                assert connection.recv(1) == b"\xff", "the greeting of ZMTP"
        finally:
            publisher.close()
