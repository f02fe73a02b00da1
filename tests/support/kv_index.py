"""A subscriber to events of the KV cache, and the index that it rebuilds from them."""

from __future__ import annotations

import msgspec
import zmq

from quire.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

WAIT_MS = 20_000
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """Sockets of a program that follows a core's events. Endpoints are inproc ones, to which a
    subscription is complete at once.
    """

    def __init__(self, endpoint, replay_endpoint=None, topic=""):
        context = zmq.Context.instance()
        self.events = context.socket(zmq.SUB)
        self.events.rcvtimeo = WAIT_MS
        self.events.connect(endpoint)
        self.events.subscribe(topic.encode())
        self.replays = None
        if replay_endpoint is not None:
            self.replays = context.socket(zmq.DEALER)
            self.replays.rcvtimeo = WAIT_MS
            self.replays.connect(replay_endpoint)

    def close(self):
        for each in (self.events, self.replays):
            if each is not None:
                each.close(0)

    def receive(self):
        topic, number, payload = self.events.recv_multipart()
        return topic, int.from_bytes(number, "big"), _DECODER.decode(payload)

    def replay(self, first):
        self.replays.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            empty, _, number, payload = self.replays.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), _DECODER.decode(payload)))


class Index:
    """What a core has, by medium, group and hash, with the parent and the tokens of each block."""

    def __init__(self):
        self.contents, self.next, self.num_stored = {}, 0, 0
        self.events = []

    def follow(self, subscriber, until):
        """Apply batches up to the number `until`, missed ones from a replay."""
        while self.next <= until:
            _, number, batch = subscriber.receive()
            if number > self.next:
                for missed, older in subscriber.replay(self.next):
                    self.apply(missed, older)
            self.apply(number, batch)

    def apply(self, number, batch):
        if number < self.next:
            return
        self.next = number + 1
        for event in batch.events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                self.contents.clear()
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del self.contents[event.medium, event.group_idx, each]
            else:
                self._store(event)

    def _store(self, event: BlockStored):
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for place, each in enumerate(event.block_hashes):
            key = event.medium, event.group_idx, each
            assert key not in self.contents, "what is there is not stored again"
            tokens = tuple(event.token_ids[place * size : (place + 1) * size])
            self.contents[key] = parent, tokens
            self.num_stored += 1
            parent = each

    def prefix(self, each, medium="GPU", group=0):
        """All tokens up to the end of a block."""
        parent, tokens = self.contents[medium, group, each]
        return tokens if parent is None else self.prefix(parent, medium, group) + tokens
