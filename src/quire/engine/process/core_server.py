"""A core in a process of its own: it takes requests from sockets, steps, and sends columns back.

One thread does all of it: sending is a copy into a queue that ZeroMQ's own thread empties, and
input is looked at between steps. A second thread (liveness.py) says that the process lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from quire.engine.control_verbs import perform
from quire.engine.core.core import EngineCore
from quire.engine.data_parallel.cluster_keys import introduce
from quire.engine.process.liveness import Vitals
from quire.engine.process.start_message import StartMessage
from quire.engine.shared_cores.split_outputs import split_outputs
from quire.engine.unbuilt import UnbuiltProcMethods
from quire.engine.wire.codec import (
    BadMessage,
    FrameOrder,
    MessageDecoder,
    MessageEncoder,
    core_identity,
    has_input,
    read_core_header,
)
from quire.engine.wire.messages import (
    CLIENT_SHIFT,
    ENGINE_CORE_DEAD,
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    Finished,
    FinishReason,
    Heartbeat,
    UtilityOutput,
    UtilityRequest,
)
from quire.observability.watchdog import Watchdog
from quire.release import __version__

logger = logging.getLogger(__name__)

LINGER_MS = 4000
"""How long the last outputs may take to leave a process that ends."""

STALL_S = 60.0
"""A turn of the loop that takes so long is reported with the stacks of all threads. A long prompt
takes tens of seconds on few cores, and is none.
"""
SILENCE_S = 8.0
"""Less than a front end waits for a sign of life, so that a core that it kills has said why."""

_Kind = EngineCoreRequestType


class EngineCoreProc(UnbuiltProcMethods):
    """The loop of a core process. `front_ends` are connected sockets, one pair for each.

    Bytes that are no message are logged and dropped. An exception in the loop itself ends the
    process: the front ends get ENGINE_CORE_DEAD, and `run` gives exit code 1.
    """

    ENGINE_CORE_DEAD = ENGINE_CORE_DEAD

    def __init__(self, core: EngineCore, message: StartMessage, pipe: socket.socket) -> None:
        self.core = core
        self._message = message
        self._context = zmq.Context(io_threads=1)
        addresses = message.addresses
        identity = core_identity(message.engine_index, message.incarnation)
        self._inputs = [self._connected(zmq.DEALER, to, identity) for to in addresses.inputs]
        self._outputs = [self._connected(zmq.PUSH, to) for to in addresses.outputs]
        self._beats = [self._connected(zmq.PUSH, to) for to in addresses.outputs]
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._is_told_to_end = False
        self._poller = self._make_poller()
        self._encoder = MessageEncoder()
        self._orders = [FrameOrder() for _ in self._inputs]
        self._num_sent = [0] * len(self._outputs)
        self._decoders: dict[bytes, _Decoding] = {
            _Kind.ADD.value: _decoding(EngineCoreRequest, self.add_request),
            _Kind.ABORT.value: _decoding(list[int], core.abort_requests),
            _Kind.UTILITY.value: _decoding(UtilityRequest, self._serve_utility),
            _Kind.SHUTDOWN.value: _decoding(float, self.request_shutdown),
        }
        self._vitals = Vitals(pipe, message.heartbeat_s, self._beat, message.socket_folder)
        self._watchdog = Watchdog("The core's loop", STALL_S, silence_s=SILENCE_S)
        self._num_steps = 0
        self._turn_began = 0.0
        self._deadline: float | None = None

    def run(self) -> int:
        """Say READY and serve until told to stop; the exit code of the process."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._say_ready()
        self._vitals.start()
        try:
            self._serve()
        except Exception as error:
            logger.critical("The core's loop failed.", exc_info=error)
            self._say_dead(error)
            return self._exit_code(error)
        finally:
            self._vitals.close()
            self._watchdog.close()
            self.core.shutdown()
            self._context.destroy(LINGER_MS)
        return 0

    def _exit_code(self, error: Exception) -> int:
        return 1

    def add_request(self, request: EngineCoreRequest) -> None:
        """Give the core a request, or answer it: while the core is shutting down with an abort."""
        if self._deadline is not None:
            self._end(request.handle, FinishReason.ABORT)
            return
        try:
            self.core.add_request(request)
        except Exception as error:
            logger.error("Failed to add a request.", exc_info=error)
            text = f"{type(error).__name__}: {error}"
            self._end(request.handle, FinishReason.ERROR, text)

    def request_shutdown(self, drain_s: float) -> None:
        """Take no more requests; those there are may run for `drain_s`, then they are aborted."""
        self._deadline = time.monotonic() + drain_s

    # the loop

    def _serve(self) -> None:
        while not self._is_over():
            self._wait_for_input()
            self._take_input()
            self._turn_began = time.monotonic()
            self._turn()
            self._turn_began = 0.0

    def _turn(self) -> None:
        """One step, if there is anything to do."""
        if self.core.has_work:
            self._num_steps += 1
            self._send(self.core.step())

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        if self._has_more_to_do() and time.monotonic() < self._deadline:
            return False
        self._end_all()
        return True

    def _end_all(self) -> None:
        live = list(self.core.scheduler.requests)
        self.core.abort_requests(live)
        self._send(EngineCoreOutputs(finished=[Finished(h, FinishReason.ABORT) for h in live]))

    def _has_more_to_do(self) -> bool:
        """Is there a reason not to wait for input?"""
        return self.core.has_work

    def _wait_for_input(self) -> None:
        """With nothing else to do, wait for a message."""
        if not self._has_more_to_do() and self._deadline is None:
            self._poller.poll()

    def _take_input(self) -> None:
        """Serve every message that is here."""
        for number, dealer in enumerate(self._inputs):
            while has_input(dealer):
                self._take(number, dealer.recv_multipart(zmq.NOBLOCK, copy=False))
        if self._is_told_to_end:
            self._is_told_to_end = False
            if self._deadline is None:
                self.request_shutdown(0.0)

    def _take(self, front_end: int, frames: list[zmq.Frame]) -> None:
        """Serve one message: a repeat is dropped, and one behind a gap raises LostFrames."""
        try:
            kind, sequence = read_core_header(frames[0].bytes)
            if kind not in self._decoders or len(frames) < 2:
                raise BadMessage("no message begins like this")
            decoder, serve = self._decoders[kind]
            message = decoder.decode(frames[1:])
        except ValueError as error:
            logger.error("Invalid message from front end %d: %s", front_end, error)
            return
        if self._orders[front_end].accept(sequence):
            serve(message)

    # what goes out

    def _send(self, outputs: EngineCoreOutputs) -> None:
        message = self._message
        outputs.engine_index, outputs.incarnation = message.engine_index, message.incarnation
        if len(self._outputs) == 1:
            self._send_to(0, outputs)
            return
        for index, part in split_outputs(outputs, len(self._outputs)):
            self._send_to(index, part)

    def _send_to(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """The one way out of everything that is numbered."""
        outputs.protocol_version = PROTOCOL_VERSION
        self._num_sent[client_index] += 1
        outputs.sequence = self._num_sent[client_index]
        frames = self._encoder.encode(outputs)
        if len(frames) == 1:
            self._outputs[client_index].send(frames[0])
        else:
            self._outputs[client_index].send_multipart(frames, copy=False)

    def _end(self, handle: int, reason: FinishReason, text: str | None = None) -> None:
        outputs = EngineCoreOutputs(finished=[Finished(handle, reason, None, text)])
        outputs.timestamp = time.monotonic()
        if len(self._outputs) == 1 or handle >> CLIENT_SHIFT < len(self._outputs):
            self._send(outputs)  # who alone hears us may speak for others (broker.py)

    def _serve_utility(self, request: UtilityRequest) -> None:
        if not 0 <= request.client_index < len(self._outputs):
            logger.error("Dropping an answer to unknown front end %d.", request.client_index)
            return
        try:
            if self._deadline is not None:
                raise RuntimeError("the engine is shutting down")
            result = perform(self.core, request.method, request.args)
        except Exception as error:
            self._answer_failure(request, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda future: self._answer_later(request, future))
        else:
            self._answer(request, result)

    def _answer_later(self, request: UtilityRequest, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            self._answer(request, future.result())
        else:
            self._answer_failure(request, error)

    def _answer(self, request: UtilityRequest, result: object) -> None:
        output = UtilityOutput(request.call_id, None, result)
        try:
            self._send_utility(request, output)
        except TypeError as error:  # a result that cannot travel
            self._answer_failure(request, error)

    def _answer_failure(self, request: UtilityRequest, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        output = UtilityOutput(request.call_id, text, None, type(error).__name__)
        self._send_utility(request, output)

    def _send_utility(self, request: UtilityRequest, output: UtilityOutput) -> None:
        message = self._message
        outputs = EngineCoreOutputs(
            engine_index=message.engine_index,
            incarnation=message.incarnation,
            utility_output=output,
        )
        self._send_to(request.client_index, outputs)

    def _say_ready(self) -> None:
        config, message = self.core.scheduler.config, self._message
        ready = EngineCoreReadyResponse(
            PROTOCOL_VERSION,
            message.engine_index,
            message.incarnation,
            os.getpid(),
            max_model_len=config.max_model_len,
            num_gpu_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            dtype=message.plan.dtype,
            version=__version__,
            is_headless=message.is_headless,
        )
        for dealer in self._inputs:
            dealer.send(msgspec.msgpack.encode(ready))

    def _say_dead(self, error: Exception) -> None:
        text = "".join(traceback.format_exception_only(error)).strip().encode()
        for output in self._outputs:
            output.send_multipart([ENGINE_CORE_DEAD, self._identity(), text])

    def _identity(self) -> bytes:
        return core_identity(self._message.engine_index, self._message.incarnation)

    def _beat(self) -> None:
        """Runs in the thread of the vitals, on sockets of its own."""
        began = self._turn_began
        age = time.monotonic() - began if began else 0.0
        self._watchdog.look(age)
        message = self._message
        outputs = EngineCoreOutputs(
            engine_index=message.engine_index,
            incarnation=message.incarnation,
            protocol_version=PROTOCOL_VERSION,
        )
        has_work = self._has_more_to_do()
        for index, socket_ in enumerate(self._beats):
            num_sent, num_taken = self._num_sent[index], self._orders[index].num_taken
            outputs.heartbeat = Heartbeat(self._num_steps, has_work, age, num_sent, num_taken)
            socket_.send(msgspec.msgpack.encode(outputs))

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
        for dealer in self._inputs:
            poller.register(dealer, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        return poller

    def _on_sigterm(self, signum: int, frame: object) -> None:
        """Runs between two instructions of the loop: it may only leave a note, and wake it."""
        self._is_told_to_end = True
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")


_Decoding = tuple[MessageDecoder[Any], Callable[[Any], None]]


def _decoding(kind: Any, serve: Callable[[Any], None]) -> _Decoding:
    return MessageDecoder(kind), serve
