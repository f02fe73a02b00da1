"""Messages between a core and a rank."""

import socket
import threading

import pytest

from quire.executor.ranks.link import RankLink


@pytest.fixture
def ends():
    pair = [RankLink(end) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


def received(link):
    return [bytes(frame) for frame in link.receive()]


def test_messages_arrive_in_order_with_their_frames(ends):
    here, there = ends
    assert there.take() is None
    sent = [[b"one"], [b"", b"two", b"x" * 1000], [b"three"]]
    for frames in sent:
        here.send(frames)
    assert [received(there) for _ in sent] == sent


def test_both_ends_may_send_more_than_the_socket_holds_at_once(ends):
    big = [b"a" * 4_000_000, b"b" * 1_000_000]
    other = threading.Thread(target=lambda: [ends[1].send(big), received(ends[1])])
    other.start()
    ends[0].send(big)
    assert received(ends[0]) == big
    other.join(20)
    assert not other.is_alive()


def test_the_end_of_the_other_side_comes_after_its_messages(ends):
    here, there = ends
    here.send([b"last"])
    here.close()
    assert received(there) == [b"last"]
    with pytest.raises(EOFError):
        there.receive()
    with pytest.raises((OSError, EOFError)):
        for _ in range(3):
            there.send([b"x" * 1_000_000])
