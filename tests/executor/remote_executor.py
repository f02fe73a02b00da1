"""An executor whose worker is in another process: every plan, mask and result crosses as frames.

`RemoteExecutor.recorded` keeps what was sent and what came back, as bytes, so that `play` can run
the same steps again in a new process.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from quire.config.plan import EnginePlan
from quire.engine.core.builder import worker_config
from quire.executor.backends import find_executor
from quire.params import RequestParams
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.step.columns import RunnerOutput
from quire.step.faults import RowFailures
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan


class Launch(msgspec.Struct, tag=True, frozen=True):
    """Start a step."""

    plan: StepPlan


class Sample(msgspec.Struct, tag=True, frozen=True):
    """Sample the oldest step that has not been sampled."""

    mask: GrammarMask | None


class Read(msgspec.Struct, tag=True, frozen=True):
    """Read the oldest step that has not been read."""


class Asked(msgspec.Struct, tag=True, frozen=True):
    """Whether requests with these parameters need their ids on the host."""

    params: RequestParams


Call = Launch | Sample | Read | Asked


class Reply(msgspec.Struct, frozen=True):
    """What became of a call; `failed` are rows that cannot run."""

    output: RunnerOutput | None = None
    failed: dict[int, str] = {}
    answer: bool = False


def write(file: Any, frames: list[Any]) -> None:
    for frame in (len(frames).to_bytes(4, "little"), *frames):
        data = bytes(frame)
        file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def read(file: Any) -> list[bytes]:
    def one() -> bytes:
        size = file.read(8)
        if len(size) < 8:
            raise EOFError("the other process is gone")
        return file.read(int.from_bytes(size, "little"))

    return [one() for _ in range(int.from_bytes(one(), "little"))]


class RemoteExecutor:
    """The executor of a plan in a process of its own."""

    def __init__(self, plan: EnginePlan) -> None:
        self._encoder, self._decoder = MessageEncoder(), MessageDecoder(Reply)
        self.recorded: list[tuple[list[bytes], list[bytes]]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.executor.remote_executor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        write(self._process.stdin, self._encoder.encode(plan))

    def call(self, call: Call) -> Reply:
        return self._decoder.decode(self.send([bytes(f) for f in self._encoder.encode(call)]))

    def send(self, frames: list[bytes]) -> list[bytes]:
        """Send a call as it was recorded, and return the reply's frames."""
        write(self._process.stdin, frames)
        reply = read(self._process.stdout)
        self.recorded.append((frames, reply))
        return reply

    def launch(self, plan: StepPlan) -> RemoteStep:
        failed = self.call(Launch(plan)).failed
        if failed:
            raise RowFailures(failed)
        return RemoteStep(self)

    def needs_host_ids(self, params: RequestParams) -> bool:
        return self.call(Asked(params)).answer

    def collective_rpc(self, method: Any, args: Any, kwargs: Any) -> list[Any]:
        return []

    def shutdown(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


class RemoteStep:
    def __init__(self, executor: RemoteExecutor) -> None:
        self._executor = executor

    def sample(self, mask: GrammarMask | None = None) -> None:
        self._executor.call(Sample(mask))

    def result(self) -> RunnerOutput:
        output = self._executor.call(Read()).output
        assert output is not None
        return output


def serve(source: Any, sink: Any) -> None:
    """Run the calls that come, until the caller closes its end."""
    plan = MessageDecoder(EnginePlan).decode(read(source))
    executor = find_executor(plan.parallel)(worker_config(plan), platform=None, exchange=None)
    encoder, decoder = MessageEncoder(), MessageDecoder(Call)
    launched, sampled = [], []
    while True:
        try:
            call = decoder.decode(read(source))
        except EOFError:
            break
        reply = Reply()
        match call:
            case Launch(plan=step):
                try:
                    launched.append(executor.launch(step))
                except RowFailures as failures:
                    reply = Reply(failed=failures.errors)
            case Sample(mask=mask):
                sampled.append(launched.pop(0))
                sampled[-1].sample(mask)
            case Read():
                reply = Reply(output=sampled.pop(0).result())
            case Asked(params=params):
                reply = Reply(answer=executor.needs_host_ids(params))
        write(sink, encoder.encode(reply))
    executor.shutdown()


if __name__ == "__main__":
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # what the engine prints is not a reply
    serve(sys.stdin.buffer, out)
