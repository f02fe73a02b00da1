"""Blocks between a server and a client without engines: whom they serve, and what ends pulls."""

import errno
import time

import msgspec
import pytest
import torch
import zmq

from quire.distributed.peers.allowed import AllowedPeers
from quire.distributed.peers.client import PeerClient
from quire.distributed.peers.keys import peer_keys
from quire.distributed.peers.messages import NO_READ, FromServer, Gone, Read
from quire.distributed.peers.params import Remote
from quire.distributed.peers.server import LeaseLimits, PeerServer
from quire.encodable import to_msgpack
from quire.errors import InvalidParameter

SIZE, KEY, BLOCK = 64, (bytes(32), 0), 5
KEYS = peer_keys("words of all engines here")


class Pair:
    """A server with one block under a lease, and a client; both say `roots`."""

    def __init__(self):
        self.roots, self.written = {"server": "root", "client": "root"}, {}
        self.server = PeerServer(
            "127.0.0.1", 0, KEYS, engine_id="one", sizes=[SIZE],
            root=lambda: self.roots["server"], read=lambda group, block, slot: slot.fill_(block),
            lease_s=30.0, limits=LeaseLimits(8, 8, 480.0),
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


def frame_socket(pair, context):
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey = KEYS.public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(f"tcp://127.0.0.1:{pair.server.port}")
    return socket


def test_a_frame_larger_than_messages_are_ends_its_connection(pair):
    context = zmq.Context()
    socket = frame_socket(pair, context)
    socket.send(bytes(2 << 20))
    socket.send(to_msgpack(Read(1, "lease", [KEY])))
    try:
        assert pair.pull() == set(), "others are served"
        assert pair.server.num_sent_bytes == SIZE
    finally:
        context.destroy(0)


NAMED = ["decode-1", "10.1.2.3:5600", "[fd00::1]:5600", "10.2.0.0/16"]
ALLOWED = AllowedPeers("peers", NAMED, KEYS)


@pytest.mark.parametrize(
    ("host", "port", "is_taken"),
    [
        ("decode-1", 1, True), ("DECODE-1", 9, True), ("decode-2", 1, False),
        ("10.1.2.3", 5600, True), ("10.1.2.3", 5601, False), ("fd00::1", 5600, True),
        ("10.2.255.1", 80, True), ("10.3.0.1", 80, False), ("127.0.0.1", 22, False),
        ("0x7f000001", 22, False), ("::ffff:10.2.0.1", 80, False), ("10.2.0.1.", 80, False),
    ],
)  # fmt: skip
def test_an_address_is_taken_as_it_was_configured(host, port, is_taken):
    remote = Remote(host, port, "", "lease")
    if is_taken:
        ALLOWED.check(remote, 1, None)
        return
    with pytest.raises(InvalidParameter, match="not among the peers"):
        ALLOWED.check(remote, 1, None)


def test_a_signature_of_another_secret_is_none():
    other = AllowedPeers("peers", [], peer_keys("words of engines elsewhere"))
    remote = Remote("10.9.9.9", 1, "", "lease")
    ALLOWED.check(remote, 7, ALLOWED.signature(remote, 7))
    for signature in (other.signature(remote, 7), ALLOWED.signature(remote, 8)):
        with pytest.raises(InvalidParameter):
            ALLOWED.check(remote, 7, signature)
