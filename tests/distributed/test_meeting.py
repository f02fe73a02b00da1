"""Processes that meet at a store form groups, by what they have in common."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from quire.distributed import meeting as module
from quire.distributed.meeting import Meeting
from quire.distributed.network_workers import NetworkWorkers
from quire.distributed.peer_sockets import PeerListener, call
from quire.distributed.shared_group import SharedGroup
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import PeersLost
from quire.hardware.native import find_native

native, _ = find_native()
on_linux = pytest.mark.skipif(
    native is None or not hasattr(os, "memfd_create"), reason="needs native code on Linux"
)


def on_all(work, size, timeout_s=20.0):
    """work(meeting) of each process, in threads that do not know that they are in one."""
    store = distributed.HashStore()
    meetings = [Meeting(store, rank, size, timeout_s=timeout_s) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return [f.result(60) for f in [pool.submit(work, each) for each in meetings]]


def test_each_gets_what_all_have_as_often_as_they_meet():
    def work(meeting):
        first = meeting.exchange(f"a{meeting.rank}".encode())
        part = meeting.among(f"part {meeting.rank % 2}", [meeting.rank % 2, meeting.rank % 2 + 2])
        return first, part.exchange(f"b{meeting.rank}".encode()), meeting.exchange(b"c")

    for rank, found in enumerate(on_all(work, 4)):
        own = [f"b{rank % 2}".encode(), f"b{rank % 2 + 2}".encode()]
        assert found == ([b"a0", b"a1", b"a2", b"a3"], own, [b"c"] * 4)


def test_one_who_does_not_come_is_not_waited_for_any_longer():
    with pytest.raises(PeersLost, match="did not come"):
        Meeting(distributed.HashStore(), 0, 2, timeout_s=0.2).exchange(b"")


@on_linux
def test_processes_of_one_host_share_memory_and_those_of_several_a_network(monkeypatch):
    def work(meeting):
        opened = meeting.open_group()
        found = opened.group.gather(torch.tensor([meeting.rank + 7]))
        with pytest.raises(ExchangeAborted):
            if meeting.rank:
                opened.group.abort("no more")
            opened.group.gather(torch.zeros(2))
        meeting.exchange(b"all are out")
        opened.rejoin(1)
        meeting.exchange(b"all are in")
        again = opened.group.broadcast(torch.tensor([meeting.rank + 5]))
        opened.rejoin(1)  # which is no news, so that it may come at any time
        meeting.exchange(b"all have it")
        opened.close()
        return type(opened.group), found.tolist(), again.tolist()

    assert on_all(work, 3) == [(SharedGroup, [[7, 8, 9]], [5])] * 3
    monkeypatch.setattr(module, "host_id", lambda: threading.current_thread().name.encode())
    assert on_all(work, 3) == [(NetworkWorkers, [[7, 8, 9]], [5])] * 3


def test_each_connects_to_the_next():
    def work(meeting):
        last = meeting.size - 1
        to = meeting.rank + 1 if meeting.rank < last else None
        after, before = meeting.connect(to, meeting.rank - 1 if meeting.rank else None)
        if after is not None:
            with after:
                after.sendall(b"from %d" % meeting.rank)
        if before is None:
            return None
        with before:
            return before.recv(20)

    assert on_all(work, 3) == [None, b"from 0", b"from 1"]


def test_who_does_not_know_the_token_is_sent_away():
    listener = PeerListener("127.0.0.1", 20.0)
    port = int.from_bytes(listener.told[:2], "little")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        with call(listener.told, 20.0) as friend, listener.accept() as found:
            friend.sendall(b"hello")
            assert found.recv(5) == b"hello"
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read
            assert stranger.recv(1) == b""
    listener.close()
