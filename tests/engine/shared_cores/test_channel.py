"""Messages between an API server and the process that owns the cores."""

import asyncio
import pickle
import random
import socket

import msgspec
import numpy as np
import pytest

from quire.encodable import NotEncodable
from quire.engine.client.client import CoreStatus
from quire.engine.client.kept_media import KeptMedia
from quire.engine.frontend.admission import Admission, QueueLimits
from quire.engine.shared_cores.broker import CoreBroker
from quire.engine.shared_cores.broker_client import CoreBrokerClient
from quire.engine.shared_cores.broker_messages import (
    ABORT,
    ADD,
    OUTPUTS,
    REPORT,
    STATUS,
    UTILITY,
    CoreStates,
    ServerReport,
)
from quire.engine.shared_cores.load_board import LoadBoard, Neighbours
from quire.engine.shared_cores.split_outputs import outputs_by_client
from quire.engine.stats.step_stats import FinishedRequestStats, IterationStats, merge_stats
from quire.engine.wire import channel
from quire.engine.wire.channel import Channel
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import (
    CLIENT_SHIFT,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityRequest,
)
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import InvalidParameter, QueueOverflowError
from quire.params import SamplingParams
from quire.step.media import MediaItem
from tests.engine.frontend.async_engines import looped

KIND = b"\x07"


class Ends:
    """Both ends of a channel; `got` is what arrived at the second, whose other end is `raw`."""

    def __init__(self):
        self.got = []
        self.lost = asyncio.Event()

    async def open(self):
        self.raw, theirs = socket.socketpair()
        self.raw.setblocking(False)
        self.channel = await Channel({KIND: (list, self.got.append)}, self.lost.set).open(theirs)
        return self

    async def feed(self, data):
        await asyncio.get_running_loop().sock_sendall(self.raw, data)


async def frames_of(message):
    """What a channel writes for a message."""
    ours, theirs = socket.socketpair()
    channel = await Channel({}, lambda: None).open(theirs)
    channel.send(KIND, message)
    channel.close()
    await channel.wait_closed()
    with ours:
        data = b""
        while part := ours.recv(65536):
            data += part
    return data


@looped
async def test_any_cut_of_the_bytes_gives_the_same_messages():
    array = np.arange(500, dtype=np.int32)
    data = await frames_of([1, "a"]) + await frames_of(["b" * 3000, array]) + await frames_of([])
    rng = random.Random(3)
    for _ in range(20):
        ends = await Ends().open()
        rest = data
        while rest:
            size = rng.choice([1, 2, 7, 100, 5000])
            await ends.feed(rest[:size])
            await asyncio.sleep(0)
            rest = rest[size:]
        ends.raw.close()
        await ends.lost.wait()
        assert ends.got[0] == [1, "a"]
        assert ends.got[1][0] == "b" * 3000
        assert np.array_equal(ends.got[1][1], array)
        assert ends.got[2] == []


def head(kind, num_frames):
    return kind + b"\xff" * 8 + num_frames.to_bytes(4, "little")


@looped
async def test_a_message_with_any_number_of_arrays_arrives():
    arrays = [np.full(300, number % 256, np.uint8) for number in range(2000)]
    ours, theirs = socket.socketpair()
    got, is_lost = [], asyncio.Event()
    near = await Channel({}, lambda: None).open(ours)
    far = await Channel({KIND: (list, got.append)}, is_lost.set).open(theirs)
    near.send(KIND, arrays)
    near.close()
    await asyncio.wait_for(is_lost.wait(), 20)
    await far.wait_closed()
    [arrived] = got
    assert len(arrived) == 2000 and all(map(np.array_equal, arrived, arrays))


@looped
async def test_what_the_other_end_would_not_take_is_refused_and_the_channel_stays(monkeypatch):
    monkeypatch.setattr(channel, "MOST_BYTES", 5000)
    ours, theirs = socket.socketpair()
    got = []
    near = await Channel({}, lambda: None).open(ours)
    far = await Channel({KIND: (list, got.append)}, lambda: None).open(theirs)
    for value, is_strict in (([b"x" * 5000], False), ([2**70], False), (["\ud800"], True)):
        with pytest.raises(NotEncodable):
            near.send(KIND, value, is_strict=is_strict)
    near.send(KIND, ["\ud800"])
    while not got:
        await asyncio.sleep(0)
    assert got == [["\\ud800"]] and near.is_open
    near.abort()
    await far.wait_closed()


class Canary:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Canary()),
        b"\x00" * 64,
        b"\xff" * 64,
        head(KIND, 2**31) + b"\x00" * 8,
        head(KIND, 1) + (2**32 - 1).to_bytes(4, "little") + b"x" * 8,
        head(KIND, 1) + (4).to_bytes(4, "little") + b"\xc1abc",
        head(b"\x55", 1) + (1).to_bytes(4, "little") + b"\x90",
        random.Random(0).randbytes(4096),
    ],
    ids=["pickle", "zeros", "ones", "frames", "length", "payload", "kind", "random"],
)
@looped
async def test_anything_but_a_message_closes_the_channel_and_nothing_else(data):
    ends = await Ends().open()
    await ends.feed(data)
    ends.raw.shutdown(socket.SHUT_WR)
    await asyncio.wait_for(ends.lost.wait(), 20)
    assert ends.got == []
    ends.raw.close()


class Client:
    engine_indices = (0,)

    def __init__(self):
        self.added, self.aborted = [], []

    def add_request(self, request):
        self.added.append(request.handle)

    def abort_requests(self, handles):
        self.aborted += handles

    def core_status(self, engine_index):
        return CoreStatus(engine_index, 1, 1, True, True)


def request(handle):
    return EngineCoreRequest(handle, [1, 2], SamplingParams(), seed=0, arrival_time=0.0)


@looped
async def test_a_server_that_is_lost_takes_its_requests_along_and_no_others():
    client = Client()
    broker = CoreBroker(client, stats=None)
    lost = asyncio.Event()
    servers, received = [], []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        server = await broker.join(broker.new_index(), theirs, lost.set)
        kinds = {
            STATUS: (CoreStates, lambda states: None),
            OUTPUTS: (EngineCoreOutputs, received.append),
        }
        far = await Channel(kinds, lambda: None).open(ours)
        servers.append((server, far))
    (first, far), (second, other) = servers
    for server, end, number in ((first, far, 5), (second, other, 6)):
        end.send(ADD, request((server.client_index << CLIENT_SHIFT) + number))
    while len(client.added) < 2:
        await asyncio.sleep(0)
    far.abort()
    await asyncio.wait_for(lost.wait(), 20)
    assert client.aborted == [(first.client_index << CLIENT_SHIFT) + 5]
    assert list(broker.servers) == [second.client_index]
    # a handle that is not its own is not taken
    other.send(ADD, request((first.client_index << CLIENT_SHIFT) + 7))
    [end] = (await arrival(received)).finished
    assert end.reason is FinishReason.ERROR and "not one of this server" in end.message
    assert len(client.added) == 2 and list(broker.servers) == [second.client_index]
    lost.clear()
    other.abort()
    await asyncio.wait_for(lost.wait(), 20)


async def arrival(received):
    while not received:
        await asyncio.sleep(0)
    return received.pop(0)


@looped
async def test_a_request_or_call_that_cannot_be_decoded_ends_alone():
    client, lost, received = Client(), asyncio.Event(), []
    broker = CoreBroker(client, stats=None)
    ours, theirs = socket.socketpair()
    server = await broker.join(broker.new_index(), theirs, lost.set)
    kinds = {
        STATUS: (CoreStates, lambda states: None),
        OUTPUTS: (EngineCoreOutputs, received.append),
    }
    far = await Channel(kinds, lambda: None).open(ours)
    first = server.client_index << CLIENT_SHIFT
    far.send(ADD, request(first), first)
    poison = msgspec.structs.replace(request(first + 1), arrival_time="x")
    far.send(ADD, poison, first + 1)
    [end] = (await arrival(received)).finished
    assert (end.handle, end.reason) == (first + 1, FinishReason.ERROR)
    assert "cannot be decoded" in end.message and "Expected `float`" in end.message
    more = msgspec.structs.replace(request(first), priority="x", continues=True)
    far.send(ADD, more, first)
    [end] = (await arrival(received)).finished
    assert (end.handle, end.reason) == (first, FinishReason.ERROR)
    assert client.aborted == [first], "it was more input for one that runs"
    far.send(UTILITY, UtilityRequest(9, "sleep", "x"), 9)
    answer = (await arrival(received)).utility_output
    assert answer.call_id == 9 and "Expected `array`" in answer.failure_message
    far.send(ADD, request(first + 2), first + 2)
    while len(client.added) < 2:
        await asyncio.sleep(0)
    assert client.added == [first, first + 2] and not lost.is_set()
    far.abort()
    await asyncio.wait_for(lost.wait(), 20)


@looped
async def test_what_cannot_be_sent_to_the_broker_is_refused_by_name():
    ours, theirs = socket.socketpair()
    client = await CoreBrokerClient.open(ours)
    poison = request(1 << CLIENT_SHIFT)
    poison.params.extra_args = {"a": "\ud800"}
    with pytest.raises(InvalidParameter, match=r"extra_args=.*lone surrogate"):
        client.add_request(poison)
    with pytest.raises(InvalidParameter, match=r"handle=-1 .* as a prompt"):
        client.add_request(request(-1))
    with pytest.raises(InvalidParameter, match=r"collective_rpc=.*64 bits"):
        await client.call(Utility("collective_rpc", ("m", None, [2**70], {})))
    client.shutdown()
    theirs.close()
    await client.wait_closed()


@looped
async def test_a_server_knows_which_of_its_requests_with_media_go_on_after_a_death():
    first = 1 << CLIENT_SHIFT

    def pictured(handle, digest):
        item = MediaItem(digest, "image", 1, [(0, 1)], {"pixels": np.zeros(100, np.float32)})
        return msgspec.structs.replace(request(handle), media=PromptMedia([item]))

    received = asyncio.Queue()
    ours, theirs = socket.socketpair()
    types = {ADD: EngineCoreRequest, ABORT: list[int], REPORT: ServerReport}
    kinds = {kind: (type, received.put_nowait) for kind, type in types.items()}
    far = await Channel(kinds, lambda: None).open(theirs)
    client = await CoreBrokerClient.open(ours, KeptMedia(500))
    for handle, digest in enumerate((b"a", b"b", b"a"), first):
        client.add_request(pictured(handle, digest))
    assert [client.survives(first + n) for n in range(3)] == [True, False, True]
    client.abort_requests([first])
    far.send(OUTPUTS, EngineCoreOutputs(finished=[Finished(first + 2, FinishReason.STOP)]))
    await client.get_output()
    client.add_request(pictured(first + 3, b"b"))
    assert client.survives(first + 3), "those that ended have made room"
    said = []
    while len(said) < 4:
        message = await asyncio.wait_for(received.get(), 20)
        if isinstance(message, EngineCoreRequest):
            said.append(message.media.is_kept)
    assert said == [True, False, True, True]
    client.shutdown()
    far.abort()
    await client.wait_closed()


def test_every_call_of_a_server_is_answered_whatever_it_gives():
    class Caller(Client):
        async def call(self, utility):
            result = utility.args[0]
            if isinstance(result, Exception):
                raise result
            return result

    results = [2**70, object(), LookupError("\ud800"), {"a": 1}]

    async def run():
        broker, answers = CoreBroker(Caller(), stats=None), []
        ours, theirs = socket.socketpair()
        server = await broker.join(broker.new_index(), theirs, lambda: None)
        kinds = {
            OUTPUTS: (EngineCoreOutputs, lambda outputs: answers.append(outputs.utility_output)),
            STATUS: (CoreStates, lambda states: None),
        }
        far = await Channel(kinds, lambda: None).open(ours)
        for number, result in enumerate(results):
            await broker.answer(server, UtilityRequest(number, "is_sleeping", [result]))
        while len(answers) < len(results):
            await asyncio.sleep(0)
        far.abort()
        await server.channel.wait_closed()
        return [(answer.call_id, answer.failure_message, answer.result) for answer in answers]

    found = asyncio.run(run())
    assert [call_id for call_id, _, _ in found] == [0, 1, 2, 3]
    assert found[0][1].endswith("it has an int of more than 64 bits.")
    assert "it has a builtins.object: give" in found[1][1]
    assert found[2][1] == "\\ud800" and found[3][1:] == (None, {"a": 1})


def test_columns_of_several_front_ends_are_parted():
    one, two = 1 << CLIENT_SHIFT, 2 << CLIENT_SHIFT
    step = EngineCoreOutputs([one, two, one + 1], [7, 8, 9, 10], [1, 2, 1], timestamp=2.0)
    parts = outputs_by_client(step)
    assert {client: (p.handles, p.token_ids, p.counts) for client, p in parts.items()} == {
        1: ([one, one + 1], [7, 10], [1, 1]),
        2: ([two], [8, 9], [2]),
    }
    alone = EngineCoreOutputs([two], [8])
    assert outputs_by_client(alone)[2] is alone
    assert outputs_by_client(EngineCoreOutputs()) == {}


class Queue:
    num_queued_tokens = 0

    def __init__(self, num_unfinished):
        self.num_unfinished = num_unfinished


def test_what_neighbours_have_counts_for_the_limits():
    board = LoadBoard(3)
    theirs = [Neighbours(board, row) for row in range(3)]
    mine = Admission(Queue(2), QueueLimits(6, 100), neighbours=theirs[1])
    theirs[0].tell(num_requests=2)
    theirs[2].tell(num_requests=1, num_answered=4)
    mine.check(1)
    with pytest.raises(QueueOverflowError, match="5 requests are unfinished"):
        mine.check(2)
    theirs[0].tell(num_requests=0)
    mine.check(3)
    assert theirs[0].load().num_requests == 1 + 5
    assert theirs[0].load().num_answered == 4
    board.close()


def test_figures_survive_the_way():

    step = IterationStats(1.0, 3, num_by_gap={0.25: 2})
    step.finished_requests.append(FinishedRequestStats(FinishReason.STOP, 1.5))
    total = IterationStats(0.5)
    merge_stats(total, step)
    merge_stats(total, step)
    figures = ServerReport([(1, total)], {"max_num_queued_reqs": 2})
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(figures), type=ServerReport)
    assert back == figures
    assert total.num_by_gap == {0.25: 4}
    assert (total.num_generation_tokens, total.num_step_tokens) == (6, 0)
