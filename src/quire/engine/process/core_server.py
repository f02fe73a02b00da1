"""A core in a process of its own: it takes requests from sockets, steps, and sends columns back.

One thread does all of it: sending is a copy into a queue that ZeroMQ's own thread empties, and
input is read between steps. A second thread sends heartbeats (liveness.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq

from quire.encodable import NotEncodable, text_of, to_msgpack
from quire.engine.control_verbs import perform
from quire.engine.core.core import EngineCore
from quire.engine.counterparts import HasCounterparts
from quire.engine.process.liveness import Vitals
from quire.engine.process.start_message import StartMessage
from quire.engine.unbuilt import UnbuiltProcMethods
from quire.engine.wire.messages import (
    ENGINE_CORE_DEAD,
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    Heartbeat,
    UtilityOutput,
    UtilityRequest,
    handles_in,
)
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.errors import EngineDeadError
from quire.observability.watchdog import Watchdog
from quire.processes.cluster_keys import introduce
from quire.processes.codec import (
    BadMessage,
    CoreHeader,
    Frame,
    FrameOrder,
    MessageDecoder,
    MessageEncoder,
    core_identity,
    has_input,
    read_core_header,
)
from quire.release import __version__
from quire.step.faults import contained

logger = logging.getLogger(__name__)

LINGER_MS = 4000
"""Milliseconds that the last outputs may take to leave a process that ends."""

STALL_S = 60.0
"""A turn of the loop that takes longer is reported with the stacks of all threads. A long prompt
may take tens of seconds on few CPU cores, which is not a stall.
"""
SILENCE_S = 8.0
"""Less than a front end waits for a heartbeat, so that the log of a core that it kills says why."""

_Kind = EngineCoreRequestType


class EngineCoreProc(HasCounterparts, UnbuiltProcMethods):
    """The loop of a core process.

    A message that cannot be decoded ends the request or the call that it is about, and nothing
    else; bytes that are not a message are logged and dropped. An exception in the loop itself ends
    the process: the front end gets ENGINE_CORE_DEAD, and `run` returns exit code 1.
    """

    ENGINE_CORE_DEAD = ENGINE_CORE_DEAD

    def __init__(self, core: EngineCore, message: StartMessage, pipe: socket.socket) -> None:
        self.core = core
        self._message = message
        self._context = zmq.Context(io_threads=1)
        self._identity = core_identity(message.engine_index, message.incarnation)
        self._input = self._connected(zmq.DEALER, message.addresses.input, self._identity)
        self._output = self._connected(zmq.PUSH, message.addresses.output)
        # a second socket, because sockets belong to one thread
        self._heartbeat_output = self._connected(zmq.PUSH, message.addresses.output)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._is_told_to_end = False
        self._executor_failure = ""
        self._poller = self._make_poller()
        self._encoder = MessageEncoder()
        self._order = FrameOrder()
        self._num_sent = 0
        self._decoders: dict[bytes, _Decoding] = {
            _Kind.ADD.value: _decoding(EngineCoreRequest, self.add_request),
            _Kind.ABORT.value: _decoding(list[int], self.abort_requests),
            _Kind.UTILITY.value: _decoding(UtilityRequest, self._serve_utility),
            _Kind.SHUTDOWN.value: _decoding(float, self.request_shutdown),
        }
        self._vitals = Vitals(
            pipe, message.heartbeat_s, self._beat, self._on_end, message.socket_folder
        )
        self._watchdog = Watchdog("The core's loop", STALL_S, silence_s=SILENCE_S)
        self._num_steps = 0
        self._turn_began = 0.0
        self._deadline: float | None = None
        self.on_intake: Callable[[int | None], None] | None = None
        """Called with the handle of each request that is decoded and queued, and None after it."""

    def run(self) -> int:
        """Send READY and serve until told to stop; the exit code of the process."""
        self._say_ready()
        self._vitals.start()
        try:
            self._serve()
        except Exception as error:
            logger.critical("The core's loop failed.", exc_info=error)
            self._say_dead(error)
            return self._exit_code(error)
        finally:
            # first: `destroy` closes the socket that its thread sends on
            self._vitals.close()
            self._watchdog.close()
            self.core.shutdown()
            self._context.destroy(LINGER_MS)
        return 0

    def _exit_code(self, error: Exception) -> int:
        return 1

    def add_request(self, request: EngineCoreRequest) -> None:
        """Give the core a request; while the core is shutting down, end it with an abort."""
        if self._deadline is not None:
            self._end(request.handle, FinishReason.ABORT)
            return
        try:
            self.core.take_in(request)
        except EngineDeadError as error:
            # the front end gives it to the next life of this core, as all others
            self.on_executor_failure(str(error))
        except Exception as error:
            logger.error("Failed to add a request.", exc_info=error)
            text = f"{type(error).__name__}: {text_of(error)}"
            self._end(request.handle, FinishReason.ERROR, text)
        self._report_queue()

    def abort_requests(self, handles: list[int]) -> None:
        self.core.abort_requests(handles)
        self._report_queue()

    def _report_queue(self) -> None:
        """Send statistics where no step's outputs follow, as while the core is paused."""
        if self._message.plan.serving.log_stats and not self.core.has_work:
            self._send(self.core.report())

    def request_shutdown(self, drain_s: float) -> None:
        """Take no more requests; those there are may run for `drain_s`, then they are aborted."""
        self._deadline = time.monotonic() + drain_s

    # the loop

    def _serve(self) -> None:
        while not self._is_over():
            self._wait_for_input()
            self._take_input()
            # only here, since the time spent waiting for input is not part of a turn
            self._turn_began = time.monotonic()
            self._turn()
            self._turn_began = 0.0

    def _turn(self) -> None:
        if self.core.has_work:
            self._num_steps += 1
            self._send(self.core.step())

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        if not self.core.may_end and time.monotonic() < self._deadline:
            return False
        self._end_all()
        return True

    def _end_all(self) -> None:
        live = list(self.core.scheduler.requests)
        self.core.abort_requests(live)
        self._send(EngineCoreOutputs(finished=[Finished(h, FinishReason.ABORT) for h in live]))

    def _has_more_to_do(self) -> bool:
        return self.core.has_work

    def _wait_for_input(self) -> None:
        if not self._has_more_to_do() and self._deadline is None:
            self._poller.poll()

    def _take_input(self) -> None:
        # all that has come, before the next step is planned: an abort saves its work, and requests
        # that came together run together
        while has_input(self._input):
            self._take(self._input.recv_multipart(zmq.NOBLOCK, copy=False))
        # after the messages, so that nothing that was sent before is lost
        if self._executor_failure:
            raise EngineDeadError(self._executor_failure)
        if self._is_told_to_end:
            self._is_told_to_end = False
            if self._deadline is None:
                self.request_shutdown(0.0)

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Serve one message: a repeat is dropped, and one after a gap raises LostFrames."""
        try:
            header = read_core_header(frames[0].bytes)
        except BadMessage as error:
            logger.error("Bytes from the front end that are not a message: %s", error)
            return
        # a front end repeats what it is not sure has come
        if not self._order.accept(header.number):
            return
        if header.kind != _Kind.ADD.value or self.on_intake is None or header.subject < 0:
            self._serve_message(header, frames)
            return
        # around decoding too: a message may kill the process before it is a request
        self.on_intake(header.subject)
        self._serve_message(header, frames)
        self.on_intake(None)

    def _serve_message(self, header: CoreHeader, frames: list[zmq.Frame]) -> None:
        try:
            if header.kind not in self._decoders:
                raise BadMessage("unknown kind of message")
            decoder, serve = self._decoders[header.kind]
            message = decoder.decode(frames[1:])
        except BadMessage as error:
            logger.error("A message from the front end cannot be decoded: %s", error)
            self._refuse(header, error)
        else:
            serve(message)

    def _refuse(self, header: CoreHeader, error: BadMessage) -> None:
        """End what a message that cannot be decoded is about."""
        handle = call_id = header.subject
        if header.kind == _Kind.ADD.value:
            self.core.abort_requests([handle])  # it may have been more input for one that runs
            self._end(handle, FinishReason.ERROR, f"the core cannot decode the request: {error}")
        elif header.kind == _Kind.UTILITY.value:
            self._send_answer(UtilityOutput.of_failure(call_id, error))
        elif header.kind == _Kind.SHUTDOWN.value:
            self.request_shutdown(0.0)

    # what goes out

    def _send(self, outputs: EngineCoreOutputs) -> None:
        """Send a numbered message. One that cannot be encoded ends its requests, and nothing else:
        what goes wrong here would go wrong again after every restart of the core.
        """
        try:
            frames = self._encoded(outputs)
        except NotEncodable as error:
            logger.error("Failed to send outputs.", exc_info=error)
            handles = handles_in(outputs)
            self.core.abort_requests(handles)
            text = f"the output cannot be sent to another process: {error}"
            ends = [Finished(handle, FinishReason.ERROR, None, text) for handle in handles]
            frames = self._encoded(EngineCoreOutputs(finished=ends))
        self._num_sent += 1
        if len(frames) == 1:
            self._output.send(frames[0])
        else:
            self._output.send_multipart(frames, copy=False)

    def _encoded(self, outputs: EngineCoreOutputs) -> list[Frame]:
        message = self._message
        outputs.engine_index, outputs.incarnation = message.engine_index, message.incarnation
        outputs.protocol_version = PROTOCOL_VERSION
        outputs.timestamp = outputs.timestamp or time.monotonic()
        outputs.sequence = self._num_sent + 1
        return self._encoder.encode(outputs)

    def _end(self, handle: int, reason: FinishReason, text: str | None = None) -> None:
        self._send(EngineCoreOutputs(finished=[Finished(handle, reason, None, text)]))

    def _serve_utility(self, request: UtilityRequest) -> None:
        try:
            if self._deadline is not None:
                raise RuntimeError("the engine is shutting down")
            result = perform(self.core, request.method, request.args)
        except EngineDeadError as error:
            # unanswered: the front end asks the next life, or says that this one has died over it
            self.on_executor_failure(str(error))
            return
        except Exception as error:
            self._answer_failure(request, error)
            return
        except BaseException as error:  # of a worker's method that the operator has written
            self._answer_failure(request, contained(error))
            return
        if isinstance(result, Future):
            # calls that wait for a quiet moment of the core must not keep it from having one
            result.add_done_callback(lambda future: self._answer_later(request, future))
        else:
            self._answer(request, result)

    def _answer_later(self, request: UtilityRequest, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self._answer(request, future.result())
        elif isinstance(error, EngineDeadError):
            self.on_executor_failure(str(error))
        else:
            self._answer_failure(request, error)

    def _answer(self, request: UtilityRequest, result: object) -> None:
        self._send_answer(UtilityOutput.of_result(request.call_id, result))

    def _answer_failure(self, request: UtilityRequest, error: BaseException) -> None:
        self._send_answer(UtilityOutput.of_failure(request.call_id, error))

    def _send_answer(self, output: UtilityOutput) -> None:
        self._send(EngineCoreOutputs(utility_output=output))

    def _say_ready(self) -> None:
        message = self._message
        ready = EngineCoreReadyResponse(
            PROTOCOL_VERSION,
            message.engine_index,
            message.incarnation,
            os.getpid(),
            version=__version__,
            is_headless=message.is_headless,
        )
        self._input.send(to_msgpack(ready))

    def _say_dead(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {text_of(error)}"
        self._output.send_multipart([ENGINE_CORE_DEAD, self._identity, text.encode()])

    def _beat(self) -> None:
        """Runs in the thread of `Vitals`, on a socket of its own."""
        began = self._turn_began
        age = time.monotonic() - began if began else 0.0
        self._watchdog.look(age)
        message = self._message
        outputs = EngineCoreOutputs(
            engine_index=message.engine_index,
            incarnation=message.incarnation,
            heartbeat=Heartbeat(
                self._num_steps, self._has_more_to_do(), age, self._num_sent, self._order.num_taken
            ),
            protocol_version=PROTOCOL_VERSION,
        )
        self._heartbeat_output.send(to_msgpack(outputs))

    # sockets and signals

    def _connected(self, kind: int, to: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
        found = self._context.socket(kind)
        found.set_hwm(0)
        found.linger = LINGER_MS
        if identity is not None:
            found.identity = identity
        if self._message.server_key is not None:
            introduce(found, self._message.server_key)
        found.connect(to)
        return found

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._input, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        return poller

    def on_executor_failure(self, reason: str) -> None:
        """Have the loop end the core. Runs in any thread: it sets a flag and wakes the loop."""
        self._executor_failure = reason
        with contextlib.suppress(OSError):
            self._wake.send(_Kind.EXECUTOR_FAILED.value)

    def _on_end(self) -> None:
        """Runs in the thread of `Vitals`: it may only set a flag and wake the loop."""
        self._is_told_to_end = True
        with contextlib.suppress(BlockingIOError):
            self._wake.send(_Kind.WAKEUP.value)


_Decoding = tuple[MessageDecoder[Any], Callable[[Any], None]]


def _decoding(kind: Any, serve: Callable[[Any], None]) -> _Decoding:
    return MessageDecoder(kind), serve
