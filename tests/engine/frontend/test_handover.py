"""Streams between two servers without sockets: each token once, each end once, whatever fails."""

import random

import numpy as np
import pytest

from quire.distributed.peers.params import PARAMS
from quire.engine.client.handed_over import HandedOver
from quire.engine.client.journal import CoreJournal
from quire.engine.frontend.taken_over import TakenOver
from quire.engine.wire.handover import ALIVE, HandedStream, Origin, Unpacker, packed
from quire.engine.wire.messages import (
    CLIENT_SHIFT,
    AdapterRef,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
)
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.params import PoolingParams, SamplingParams
from quire.processes.codec import BadMessage, MessageDecoder, MessageEncoder
from quire.step.columns import LogprobColumns

TRANSFER = {"do_remote_prefill": True, "remote_host": "127.0.0.1"}


class Supervised:
    """Journals of a core, and what is asked of it."""

    def __init__(self):
        self.journal = CoreJournal(2)
        self.outputs, self.taken_back = [], []

    def entries(self):
        yield from self.journal.entries.items()

    def release(self, handle):
        entry = self.journal.entries.get(handle)
        if entry is None:
            return None
        self.journal.drop(handle)
        return 2, entry

    def take_back(self, entry):
        [request] = entry.resumed(2)
        self.taken_back.append(request)
        self.journal.add(request)

    def deliver(self, outputs):
        self.outputs.append(outputs)


def request(handle, **more):
    params = more.pop("params", None) or SamplingParams(extra_args={"mine": 1})
    return EngineCoreRequest(handle, [1, 2, 3], params, seed=9, **more)


def outputs(handle, ids, end=None, **more):
    finished = [] if end is None else [Finished(handle, end, message="text")]
    return EngineCoreOutputs([handle] if ids else [], ids, [len(ids)] if ids else None, finished,
                             **more)  # fmt: skip


@pytest.fixture
def scene():
    supervised, closed, announced = Supervised(), [], []
    handed = HandedOver(supervised, lambda: announced.append(1))
    supervised.journal.add(request(5))
    started = [Started(5, 0, 1.0)]
    supervised.journal.take(outputs(5, [10, 11], started=started))

    def give(handle=5, transfer=None):
        return handed.give(handle, transfer, lambda: closed.append(handle))

    return supervised, handed, give, closed


def test_a_stream_goes_with_the_tokens_that_its_client_has(scene):
    supervised, handed, give, _ = scene
    sent = give(transfer=TRANSFER)
    assert sent.output_token_ids == [10, 11] and sent.seed == 9
    assert sent.params.extra_args == {"mine": 1, PARAMS: TRANSFER}
    assert not supervised.journal.entries and 5 in handed and give() is None
    again = outputs(77 << CLIENT_SHIFT, [12], started=[Started(77, 3, 5.0)], timestamp=1.0)
    handed.take(5, again)
    handed.take(5, outputs(77, [13], FinishReason.LENGTH))
    first, last = supervised.outputs
    assert (first.handles, first.token_ids, first.engine_index) == ([5], [12], 2)
    assert first.started == [], "it was told already"
    assert [end.handle for end in last.finished] == [5] and len(handed) == 0
    handed.take(5, outputs(77, [14], FinishReason.LENGTH))
    handed.take_back([5])
    assert len(supervised.outputs) == 2 and not supervised.taken_back, "it has ended, once"


def test_what_fails_elsewhere_goes_on_here_after_the_last_token(scene):
    supervised, handed, give, closed = scene
    give()
    handed.take(5, outputs(1, [12]))
    handed.take_back([5])
    [back] = supervised.taken_back
    assert back.output_token_ids == [10, 11, 12] and back.params.extra_args == {"mine": 1}
    handed.take(5, outputs(1, [13]))
    assert len(supervised.outputs) == 1 and not closed, "what comes late is dropped"
    assert 5 in supervised.journal.entries


def test_a_refusal_of_the_other_server_is_not_the_streams_end(scene):
    supervised, handed, give, _ = scene
    give()
    handed.take(5, outputs(1, [], FinishReason.ERROR))
    assert not supervised.outputs and supervised.taken_back[0].output_token_ids == [10, 11]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_tokens_before_the_other_server_gave_up_are_not_computed_again(scene, reason):
    supervised, handed, give, closed = scene
    give()
    handed.take(5, outputs(1, [12], reason))
    [last] = supervised.outputs
    assert last.token_ids == [12] and not last.finished and not closed
    assert supervised.taken_back[0].output_token_ids == [10, 11, 12] and len(handed) == 0


def test_streams_of_a_drain_that_failed_are_all_sent_again(scene):
    supervised, handed, give, _ = scene
    supervised.journal.add(request(6))
    give()
    handed.send_again([5, 6, 7])
    assert [each.handle for each in supervised.taken_back] == [5, 6] and len(handed) == 0
    assert supervised.taken_back[0].output_token_ids == [10, 11]


def test_a_client_that_leaves_closes_the_connection(scene):
    supervised, handed, give, closed = scene
    give()
    handed.abort([4, 5])
    handed.abort([5])
    handed.take(5, outputs(1, [12]))
    assert closed == [5] and not supervised.outputs and not supervised.taken_back


def test_streams_that_are_more_than_a_message_stay(scene):
    supervised, handed, _, _ = scene
    for handle, more in enumerate(
        [
            {"adapter": AdapterRef("a", 1, "/a")},
            {"resumable": True},
            {"params": PoolingParams(task="embed")},
            {
                "params": SamplingParams(
                    extra_args={"kv_transfer_params": {"do_remote_decode": True}}
                )
            },
            {"params": SamplingParams(extra_args={"kv_transfer_params": {"remote_decoder": {}}})},
        ],
        10,
    ):
        supervised.journal.add(request(handle, **more))
    assert handed.candidates() == [5]


class Client:
    def __init__(self):
        self.added, self.aborted = [], []

    def add_request(self, request):
        if request.seed < 0:
            raise ValueError("no")
        self.added.append(request)

    def abort_requests(self, handles):
        self.aborted += handles


def test_outputs_are_cut_into_those_of_others_and_the_rest():
    client, got = Client(), {1: [], 2: []}
    taken = TakenOver(client)
    step = outputs(3, [1])
    assert taken.without(step) is step
    first = taken.begin(request(8), got[1].append)
    second = taken.begin(request(8), got[2].append)
    with pytest.raises(ValueError, match="no"):
        taken.begin(EngineCoreRequest(8, [1], seed=-1), got[1].append)
    assert [each.handle for each in client.added] == [first, second] and first != second
    assert first < 2**63 and len(taken) == 2
    ones = np.ones((4, 1), np.int32)
    values = ones.astype(np.float32)
    columns = LogprobColumns([0, 1, 2, 3], ones, values, ones[:, 0], [1] * 4)
    stats = SchedulerStats(num_running_reqs=3)
    ends = [Finished(second, FinishReason.STOP)]
    own = taken.without(
        EngineCoreOutputs(
            [3, first, second], [1, 2, 3, 4], [1, 2, 1], ends, logprobs=columns, stats=stats
        )
    )
    assert (own.handles, own.token_ids, own.stats) == ([3], [1], stats)
    assert own.logprobs.index == [0]
    [one], [two] = got.values()
    assert one.token_ids == [2, 3] and two.token_ids == [4] and one.stats is None
    assert two.finished == ends and len(taken) == 1
    taken.end(second)
    taken.end(first)
    assert client.aborted == [first], "what has ended is not aborted"
    late = outputs(first, [5], stats=stats)
    taken.begin(request(8), got[1].append)
    rest = taken.without(late)
    assert (rest.handles, rest.stats, len(got[1])) == ([], stats, 1), "what comes late is dropped"


def test_alone_in_a_step_streams_of_others_leave_the_statistics():
    taken, got = TakenOver(Client()), []
    handle = taken.begin(request(8), got.append)
    stats = SchedulerStats(num_running_reqs=1)
    own = taken.without(outputs(handle, [1], stats=stats))
    assert own.handles == [] and own.stats is stats and got[0].token_ids == [1]
    taken.fail_all()
    assert got[1] is None and len(taken) == 0


def test_a_receiver_that_fails_ends_its_own_stream_alone(caplog):
    client, got = Client(), []
    taken = TakenOver(client)

    def fails(part):
        raise ValueError("the receiver's own")

    broken, last = (taken.begin(request(8), fails) for _ in range(2))
    good = taken.begin(request(8), got.append)
    ends = [Finished(last, FinishReason.STOP)]
    own = taken.without(EngineCoreOutputs([3, broken, last, good], [1, 2, 3, 4], None, ends))
    assert own.handles == [3] and [part.token_ids for part in got] == [[4]]
    assert client.aborted == [broken], "the other one has ended by itself"
    assert len(taken) == 1 and len(caplog.records) == 2
    taken.begin(request(8), fails)
    taken.fail_all()
    assert got[1] is None and len(taken) == 0 and client.aborted == [broken]


def test_messages_come_out_of_a_body_however_it_is_cut():
    big = np.arange(500, dtype=np.float32)
    messages = [
        HandedStream(1, Origin("a", "b"), request(3)), HandedStream(1, Origin("", "")),
    ]  # fmt: skip
    body = b"".join([ALIVE, *(packed(MessageEncoder().encode(m)) for m in messages)])
    body += packed(MessageEncoder().encode([big]))
    draw = random.Random(1)
    for _ in range(20):
        unpacker, found, at = Unpacker(), [], 0
        while at < len(body):
            step = draw.choice([1, 3, 40, 5000])
            found += unpacker.feed(body[at : at + step])
            at += step
        assert found[0] == [] and len(found) == 4 and len(found[3]) == 2
        decoder = MessageDecoder(HandedStream)
        assert [decoder.decode(found[1]), decoder.decode(found[2])] == messages


@pytest.mark.parametrize("body", [b"\xff" * 8, b"\x01\x00\x00\x00\xff\xff\xff\xff"])
def test_bodies_that_would_take_all_memory_are_refused(body):
    with pytest.raises(BadMessage):
        list(Unpacker().feed(body))
