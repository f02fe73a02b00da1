"""What a core's loop sends: nothing that it cannot send ends it."""

import socket
import tempfile
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import zmq

from quire.engine.process import core_server
from quire.engine.process.core_server import EngineCoreProc
from quire.engine.process.start_message import StartMessage
from quire.engine.wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineZmqAddresses,
    UtilityRequest,
)
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.errors import EngineDeadError, RequestError
from quire.params import SamplingParams
from quire.processes.codec import MessageDecoder

HALF, PLAIN = "a\udc80", "a\\udc80"


class Core:
    """A core that only fails, and notes what is aborted."""

    has_work = True
    may_end = False

    def __init__(self):
        self.aborted = []

    def abort_requests(self, handles):
        self.aborted += handles

    def take_in(self, request):
        raise LookupError(HALF)

    def is_sleeping(self):
        return 2**70

    def get_weight_version(self):
        raise RequestError(HALF)

    def list_loras(self):
        raise SystemExit(HALF)

    def lose(self, *_):
        raise EngineDeadError("QuireWorker-1 was killed by SIGKILL.")


class Loop:
    """The loop of such a core, and the front end's end of its output."""

    def __init__(self, folder):
        self._context = zmq.Context()
        sockets = {"input": zmq.ROUTER, "output": zmq.PULL}
        ends = {name: self._context.socket(kind) for name, kind in sockets.items()}
        for name, end in ends.items():
            end.bind(f"ipc://{folder}/{name}")
        self._ends = ends
        self._output = ends["output"]
        pipe, self._pipe = socket.socketpair()
        addresses = EngineZmqAddresses(*(f"ipc://{folder}/{name}" for name in sockets))
        message = StartMessage(
            plan=SimpleNamespace(serving=SimpleNamespace(log_stats=False)),
            engine_index=0,
            incarnation=1,
            addresses=addresses,
            socket_folder=None,
        )
        self.core = Core()
        self.proc = EngineCoreProc(self.core, message, pipe)

    def received(self):
        assert self._output.poll(20_000)
        return MessageDecoder(EngineCoreOutputs).decode(self._output.recv_multipart())

    def close(self):
        self.proc._context.destroy(0)
        self._context.destroy(0)
        for end in (self._pipe, self.proc._vitals._pipe, self.proc._wake, self.proc._woken):
            end.close()


@pytest.fixture
def loop():
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has 107 characters at most
        made = Loop(folder)
        yield made
        made.close()


def test_outputs_that_cannot_be_sent_end_their_requests_and_nothing_else(loop):
    bad = EngineCoreOutputs(
        handles=[7, 8], token_ids=[1, 2**70], finished=[Finished(9, FinishReason.STOP)]
    )
    loop.proc._send(bad)
    loop.proc._send(EngineCoreOutputs(handles=[6], token_ids=[3]))
    first, second = loop.received(), loop.received()
    assert [end.handle for end in first.finished] == [7, 8, 9] and not first.handles
    text = "the output cannot be sent to another process: it has an int of more than 64 bits"
    assert {(end.reason, end.message) for end in first.finished} == {(FinishReason.ERROR, text)}
    assert loop.core.aborted == [7, 8, 9]
    assert second.handles == [6] and (first.sequence, second.sequence) == (1, 2)


def test_an_error_text_with_a_lone_surrogate_is_sent_as_an_escape(loop, monkeypatch):
    monkeypatch.setattr(core_server.logger, "disabled", True)  # pytest-xdist cannot send such a log
    loop.proc._send(EngineCoreOutputs(finished=[Finished(7, FinishReason.ERROR, None, HALF)]))
    assert loop.received().finished[0].message == PLAIN
    loop.proc.add_request(EngineCoreRequest(5, [1], SamplingParams(), 0, 0.0))
    assert loop.received().finished[0].message == f"LookupError: {PLAIN}"


@pytest.mark.parametrize(
    ("method", "text", "kind"),
    [
        ("is_sleeping", "it has an int of more than 64 bits", "EngineError"),
        ("get_weight_version", PLAIN, "RequestError"),
        ("list_loras", f"SystemExit: {PLAIN}", "CustomCodeFailure"),
        ("no_such", "is not allowed", "InvalidParameter"),
    ],
)
def test_every_call_is_answered(loop, method, text, kind):
    loop.proc._serve_utility(UtilityRequest(3, method, []))
    answer = loop.received().utility_output
    assert (answer.call_id, answer.failure_type) == (3, kind) and text in answer.failure_message


def test_the_last_word_of_a_core_is_sent_whatever_it_is(loop):
    loop.proc._say_dead(LookupError(HALF))
    assert loop._output.poll(20_000)
    assert loop._output.recv_multipart()[2] == f"LookupError: {PLAIN}".encode()


@pytest.mark.parametrize("what", ["a request", "a call", "a call that waits"])
def test_what_comes_while_a_worker_is_lost_is_left_to_the_next_life(loop, what):
    """An answer would end it, though the core is restarted."""
    if what == "a request":
        loop.core.take_in = loop.core.lose
        loop.proc.add_request(EngineCoreRequest(5, [1], SamplingParams(), 0, 0.0))
    else:
        answer = Future()
        loop.core.is_sleeping = loop.core.lose if what == "a call" else lambda: answer
        loop.proc._serve_utility(UtilityRequest(3, "is_sleeping", []))
        answer.set_exception(EngineDeadError("QuireWorker-1 was killed by SIGKILL."))
    with pytest.raises(EngineDeadError, match="QuireWorker-1 was killed"):
        loop.proc._take_input()
    loop.proc._send(EngineCoreOutputs(handles=[6], token_ids=[3]))
    assert loop.received().handles == [6], "nothing was sent before"
