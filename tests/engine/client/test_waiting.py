"""The two ways to wait for cores, over cores whose messages are written into a pipe."""

import asyncio
import os
import selectors
import signal
import time
from collections import deque
from concurrent.futures import Future

import pytest

from quire.engine.client.multiprocess import AsyncMPClient, SyncMPClient
from quire.engine.client.pending_calls import PendingCalls
from quire.engine.event_loop import Alarm, loop_factory
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, UtilityOutput
from quire.errors import EngineDeadError, EngineError

ASK = Utility("collective_rpc", timeout_s=0.05)


class Cores:
    """Stands for `RemoteCores`: `arrive` makes `wakeup` readable, `take` finds what has arrived."""

    next_check_s = 0.01
    is_ours = True

    def __init__(self):
        self.wakeup = selectors.DefaultSelector()
        self._pipe = os.pipe()
        self.wakeup.register(self._pipe[0], selectors.EVENT_READ)
        self.calls = PendingCalls()
        self.has_requests, self.is_idle = True, False
        self.num_checks = 0
        self._arrived, self._events = deque(), deque()
        self.between = lambda: None

    def arrive(self, event):
        self._arrived.append(event)
        os.write(self._pipe[1], b"\0")

    def take(self):
        while self._arrived:
            os.read(self._pipe[0], 1)
            event = self._arrived.popleft()
            self.between()
            self._events.append(event)

    def next_output(self):
        event = self._events.popleft() if self._events else None
        if isinstance(event, EngineError):
            raise event
        return event

    def begin_call(self, utility):
        _, future = self.calls.begin(utility, [0])
        return future

    def check_health(self):
        self.num_checks += 1

    def shutdown(self, timeout_s):
        self.wakeup.close()
        for end in self._pipe:
            os.close(end)


@pytest.fixture
def cores():
    return Cores()


def run(main):
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(asyncio.wait_for(main, 60))


def outputs():
    return EngineCoreOutputs([1], [7])


def test_ctrl_c_while_a_call_waits_does_not_lose_messages(cores):
    def press():
        cores.between = lambda: None
        signal.raise_signal(signal.SIGINT)

    client, answer = SyncMPClient(cores), outputs()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cores.between = press
    cores.arrive(answer)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.call(Utility("is_sleeping"))
        assert client.get_output() is answer
    finally:
        signal.signal(signal.SIGINT, before)


def test_cores_of_the_process_that_forked_this_one_are_refused(cores):
    client = SyncMPClient(cores)
    cores.is_ours = False
    for use in (client.get_output, lambda: client.add_request(None), lambda: client.call(ASK)):
        with pytest.raises(EngineError, match="this one was forked from: make a new engine here"):
            use()
    client.abort_requests([1])  # the double has no such method


def test_a_thread_gets_outputs_in_their_order_and_the_death_of_a_core(cores):
    client = SyncMPClient(cores)
    for event in (outputs(), outputs(), EngineDeadError("gone")):
        cores.arrive(event)
    assert [client.get_output().token_ids for _ in range(2)] == [[7], [7]]
    with pytest.raises(EngineDeadError, match="gone"):
        client.get_output()
    client.shutdown()


def test_a_thread_does_not_wait_for_cores_without_work(cores):
    client = SyncMPClient(cores)
    cores.is_idle = True
    assert client.get_output().handles == [] and cores.num_checks == 1, "they are paused"
    cores.has_requests = False
    assert client.get_output().handles == [] and cores.num_checks == 1
    client.shutdown()


def test_a_thread_waits_for_an_answer_no_longer_than_it_wants(cores):
    client = SyncMPClient(cores)
    with pytest.raises(TimeoutError, match=r"collective_rpc was not answered within 0.05 s"):
        client.call(ASK)
    assert not cores.calls._calls
    cores.calls.answer(0, UtilityOutput(1, None, "late"))
    client.shutdown()


def test_an_event_loop_is_woken_by_what_comes(cores):
    async def main():
        client = AsyncMPClient(cores)
        waiting = asyncio.ensure_future(client.get_output())
        while cores.num_checks < 2:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        cores.next_check_s = 100.0
        await asyncio.sleep(0.03)
        cores.arrive(outputs())
        assert (await waiting).token_ids == [7]
        waiting = asyncio.ensure_future(client.get_output())
        await asyncio.sleep(0)
        client.shutdown()
        with pytest.raises(EngineDeadError, match="was closed"):
            await waiting

    run(main())


def test_an_event_loop_waits_for_an_answer_no_longer_than_it_wants(cores):
    async def main():
        client = AsyncMPClient(cores)
        with pytest.raises(TimeoutError, match=r"collective_rpc was not answered within 0.05 s"):
            await client.call(ASK)
        call = asyncio.ensure_future(client.call(Utility("is_sleeping")))
        await asyncio.sleep(0)
        failure = UtilityOutput(2, "the worker waited for too long", None, "TimeoutError")
        cores.calls.answer(0, failure)
        with pytest.raises(TimeoutError, match="the worker waited"):
            await call
        call = asyncio.ensure_future(client.call(Utility("is_sleeping")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert not cores.calls._calls
        client.shutdown()

    run(main())


def test_one_client_serves_one_event_loop_after_the_other(cores):
    client = AsyncMPClient(cores)

    async def main():
        cores.arrive(outputs())
        return (await client.get_output()).token_ids

    assert [run(main()), asyncio.run(main())] == [[7], [7]]
    client.shutdown()


def test_a_call_that_no_core_can_take_is_an_error_at_once(cores):
    cores.begin_call = lambda utility: _failed()
    client = SyncMPClient(cores)
    with pytest.raises(EngineDeadError, match="No engine core"):
        client.call(ASK)
    client.shutdown()


def test_an_alarm_can_be_set_again_while_one_whose_time_has_come_waits_for_its_turn():
    async def main():
        rung = []
        alarm = Alarm(lambda: rung.append(time.monotonic()))
        for delay_s in (0.0, 1e-9, 0.02, 0.0):
            alarm.set(time.monotonic() + delay_s)
        await asyncio.sleep(0.04)
        assert len(rung) == 1, "once, at the earliest of the times"
        alarm.set(time.monotonic() - 1)
        alarm.cancel()
        alarm.set(time.monotonic() + 0.01)
        await asyncio.sleep(0.03)
        assert len(rung) == 2

    run(main())


def _failed():
    future = Future()
    future.set_exception(EngineDeadError("No engine core is left."))
    return future
