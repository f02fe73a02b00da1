"""Calls of workers that a rank serves while it computes steps, by a link and a thread of their own:
reading adapters takes as long as many steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from quire.errors import EngineDeadError, RequestError
from quire.executor.ranks.failures import cause_of, failure_of
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import Call, RankAnswer
from quire.executor.worker import Worker
from quire.processes.codec import MessageDecoder, MessageEncoder


class AsideCalls:
    """The core's ends of these links, by rank. Any thread calls; calls run one after the other."""

    def __init__(self, links: Sequence[RankLink]) -> None:
        self._links = list(links)
        self._encoder = MessageEncoder()
        self._decoder = MessageDecoder(RankAnswer)
        self._lock = threading.Lock()
        self._serial = 0

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of all workers; their values by rank. Raises what one of them raises,
        EngineDeadError when one is gone.
        """
        with self._lock:
            self._serial += 1
            frames = self._encoder.encode(Call(self._serial, {}, method, list(args), {}))
            try:
                for link in self._links:
                    link.send(frames)
                answers = [self._decoder.decode(link.receive()) for link in self._links]
            except (OSError, EOFError) as error:
                raise EngineDeadError("A rank is gone.") from error
        failures = {
            rank: answer.failure
            for rank, answer in enumerate(answers)
            if answer.failure is not None
        }
        if failures:
            raise cause_of(failures)
        return [answer.value for answer in answers]

    def read_adapter(self, folder: str) -> int:
        """As `Executor.read_adapter`. Raises RequestError where the ranks have read different
        contents: the files were changed meanwhile.
        """
        numbers = self.call("read_adapter", folder)
        if any(number != numbers[0] for number in numbers):
            raise RequestError(f"The files in {folder} were changed as they were read.")
        (number, *_) = numbers
        assert isinstance(number, int)
        return number


def serve_aside(worker: Worker, link: RankLink) -> None:
    """Serve calls until the core closes its end of the link."""
    encoder, decoder = MessageEncoder(), MessageDecoder(Call)
    with suppress(OSError, EOFError):
        while True:
            task = decoder.decode(link.receive())
            try:
                value = getattr(worker, task.method)(*task.args)
                answer = RankAnswer(task.serial, value=value)
            except Exception as error:
                answer = RankAnswer(task.serial, failure=failure_of(error))
            link.send(encoder.encode(answer))
