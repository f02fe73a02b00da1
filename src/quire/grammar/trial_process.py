"""The process in which grammars are tried: it compiles one after the other, within limits."""

from __future__ import annotations

import resource
import time
from multiprocessing.connection import Connection

import msgspec
import psutil

from quire.errors import EngineError
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.source import GrammarSource
from quire.grammar.trial import TrialAnswer, TrialStart
from quire.grammar.vocabulary import Vocabulary


class GrammarTrial:
    """Compiles grammars as a core would."""

    def __init__(self, start: TrialStart) -> None:
        self._libraries = GrammarLibraries(Vocabulary.read(start.vocabulary), start.backend)
        self._libraries.prepare()
        self._time_s = start.time_s
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + start.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def run(self, source: GrammarSource) -> TrialAnswer:
        """Try one grammar; the kernel ends this process where it takes too long."""
        seconds = int(time.process_time() + self._time_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            self._libraries.compile(source)
        except (EngineError, ValueError) as error:
            return TrialAnswer(str(error))
        return TrialAnswer()


def main(fd: int) -> None:
    """Serve the other end of a pipe until it is closed."""
    pipe = Connection(fd)
    try:
        start = msgspec.msgpack.decode(pipe.recv_bytes(), type=TrialStart)
        try:
            trial = GrammarTrial(start)
        except (EngineError, ImportError) as error:
            pipe.send_bytes(msgspec.msgpack.encode(TrialAnswer(str(error))))
            return
        pipe.send_bytes(msgspec.msgpack.encode(TrialAnswer()))
        while True:
            source = msgspec.msgpack.decode(pipe.recv_bytes(), type=GrammarSource)
            pipe.send_bytes(msgspec.msgpack.encode(trial.run(source)))
    except EOFError:
        return
