"""Blocks between a server and a client without engines: whom they serve, and what ends pulls."""

import errno
import time

import msgspec
import pytest
import torch
import zmq

from quire.distributed.peers.client import PeerClient
from quire.distributed.peers.keys import peer_keys
from quire.distributed.peers.messages import NO_READ, FromServer, Gone, Read
from quire.distributed.peers.params import Remote
from quire.distributed.peers.server import PeerServer
from quire.encodable import to_msgpack

SIZE, KEY, BLOCK = 64, (bytes(32), 0), 5
KEYS = peer_keys("words of all engines here")


class Pair:
    """A server with one block under a lease, and a client; both say `roots`."""

    def __init__(self):
        self.roots, self.written = {"server": "root", "client": "root"}, {}
        self.server = PeerServer(
            "127.0.0.1", 0, KEYS, engine_id="one", sizes=[SIZE],
            root=lambda: self.roots["server"], read=lambda group, block, slot: slot.fill_(block),
            lease_s=30.0,
        )  # fmt: skip
        self.client = PeerClient(
            KEYS, sizes=[SIZE], root=lambda: self.roots["client"], write=self._write,
            lease_s=30.0, patience_s=0.4,
        )  # fmt: skip
        self.server.offer("lease", "1", {KEY: BLOCK})

    def _write(self, group, block, slot):
        self.written[block] = torch.unique(slot).item()

    def remote(self, port=None):
        return Remote("127.0.0.1", port or self.server.port, "one", "lease")

    def pull(self, remote=None):
        """The blocks without content after a pull into block 9."""
        self.client.pull("2", remote or self.remote(), [(9, KEY)], None)
        self.client.wait(10.0)
        ((request, missing),) = self.client.take_done()
        assert request == "2"
        return missing


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.client.close()
    made.server.close()


def test_a_block_is_pulled(pair):
    assert pair.pull() == set() and pair.written == {9: BLOCK}


def test_nothing_is_pulled_over_a_connection_from_before_weights_changed(pair):
    assert pair.pull() == set()
    before, pair.roots["client"] = pair.server.num_sent_bytes, None
    assert pair.pull() == {9} and pair.server.num_sent_bytes == before


def test_nobody_is_served_after_weights_changed_who_was_not_welcomed(pair):
    pair.roots["server"] = None
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = KEYS.public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"tcp://127.0.0.1:{pair.server.port}")
    socket.send(to_msgpack(Read(1, "lease", [KEY])))
    assert socket.poll(10_000)
    answer = msgspec.msgpack.decode(socket.recv_multipart()[0], type=FromServer)
    context.destroy(0)
    assert isinstance(answer, Gone) and answer.number == NO_READ
    assert pair.server.num_sent_bytes == 0


def test_a_pull_ends_where_no_more_sockets_are_there(pair, monkeypatch):
    def refuse(kind):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(pair.client._context, "socket", refuse)
    assert pair.pull() == {9}


def test_messages_for_a_peer_that_is_silent_do_not_pile_up(pair):
    silent = pair.remote(port=1)
    for _ in range(12):
        pair.client.hold(silent)
        pair.client.release(silent)
        time.sleep(0.1)
    assert not pair.client._links
