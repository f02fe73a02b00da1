"""Groups of a trainer and workers whose processes expect messages of other sizes than come. Gloo by
itself ends the process that has room for less, and takes a shorter message for a whole one.
"""

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.distributed import host_broadcasts
from quire.distributed.trainer_group import PyNcclCommunicator, StatelessProcessGroup
from quire.errors import WeightUpdateError


def in_both(*calls):
    """The results of two processes' calls, of which one may be an error."""

    def done(rank):
        try:
            return calls[rank](both[rank])
        except WeightUpdateError as error:
            return error

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def made(rank):
        group = StatelessProcessGroup.create("127.0.0.1", port, rank, 2, store_timeout=30)
        return PyNcclCommunicator(group, "cpu")

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(made, range(2)))
        return list(pool.map(done, range(2)))


@pytest.fixture(params=["ring", "gloo"])
def way(request, monkeypatch):
    if request.param == "gloo":  # as between hosts
        monkeypatch.setattr(host_broadcasts, "host_id", lambda: secrets.token_bytes(8))
    return request.param


def ones(count):
    return torch.ones(count)


@pytest.mark.parametrize("count", [50, 200, 5_000_000])
def test_a_broadcast_of_another_size_is_refused(way, count):
    received = torch.zeros(100)

    def send(communicator):
        communicator.broadcast(ones(count), 0)
        communicator.destroy()

    _, found = in_both(send, lambda c: c.broadcast(received, 0))
    with pytest.raises(WeightUpdateError, match="out of step|is gone"):
        raise found


def test_tensors_in_another_order_are_refused(way):
    def send(communicator):
        for count in (100, 50):
            communicator.broadcast(ones(count), 0)
        communicator.destroy()

    def receive(communicator):
        for count in (50, 100):
            communicator.broadcast(torch.zeros(count), 0)

    with pytest.raises(WeightUpdateError, match="out of step|is gone"):
        raise in_both(send, receive)[1]


@pytest.mark.parametrize("count", [50, 200])
def test_a_message_of_another_size_is_refused(count):
    _, found = in_both(lambda c: c.send(ones(count), 1), lambda c: c.recv(torch.zeros(100), 0))
    with pytest.raises(WeightUpdateError, match="out of step"):
        raise found


def test_a_sum_of_other_sizes_is_refused_on_both_sides():
    found = in_both(lambda c: c.all_reduce(ones(50)), lambda c: c.all_reduce(ones(200)))
    for error in found:
        with pytest.raises(WeightUpdateError, match="out of step"):
            raise error


def test_messages_of_the_same_sizes_arrive_in_their_order():
    def first(communicator):
        received = torch.zeros(3)
        communicator.recv(received, 1)
        communicator.broadcast(received, 0)
        works = [communicator.start_broadcast(torch.full((4,), i), 1) for i in range(3)]
        for work in works:
            work.wait()
        return communicator.all_reduce(received)

    def second(communicator):
        communicator.send(ones(3) * 2, 0)
        received = torch.zeros(3)
        communicator.broadcast(received, 0)
        for i in range(3):
            communicator.broadcast(torch.full((4,), i), 1)
        return communicator.all_reduce(received)

    for found in in_both(first, second):
        assert found.tolist() == [4.0, 4.0, 4.0]
