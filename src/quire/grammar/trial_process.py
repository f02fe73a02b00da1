"""The process in which grammars are tried: it compiles one after the other, within limits."""

from __future__ import annotations

import math
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from quire.encodable import text_of, to_msgpack
from quire.errors import EngineError
from quire.grammar.bits import mask_words
from quire.grammar.libraries import GrammarLibraries
from quire.grammar.library import GrammarError, Matcher
from quire.grammar.source import GrammarSource
from quire.grammar.trial import TrialAnswer, TrialStart
from quire.grammar.vocabulary import Vocabulary
from quire.hardware.task_limits import cpu_time, limit_memory

_NUM_STEPS = 4
_MOST_STEP_S = 0.05
"""The most seconds of computing for one token of one request: all requests of a step wait for it.
"""


class GrammarTrial:
    """Compiles grammars as a core would."""

    def __init__(self, start: TrialStart) -> None:
        vocabulary = Vocabulary.read(start.vocabulary)
        self._vocab_size = len(vocabulary.tokens)
        self._libraries = GrammarLibraries(vocabulary, start.backend)
        # before the limits: reading the vocabulary is not part of a trial
        self._libraries.prepare()
        self._time_s = start.time_s
        limit_memory(start.memory_bytes)

    def run(self, source: GrammarSource) -> TrialAnswer:
        """Try one grammar and the first tokens of a text in it; the kernel ends this process where
        that takes too long.
        """
        try:
            # computing time, since other processes share the cores
            with cpu_time(self._time_s):
                form = self._libraries.compile(source)
                self._follow(form.matcher())
        except (EngineError, ValueError, RecursionError) as error:
            return TrialAnswer(str(error))
        return TrialAnswer(unenforced=form.unenforced)

    def _follow(self, matcher: Matcher) -> None:
        """Take the first steps of a text. Much of a grammar is built only then: raises GrammarError
        for one that proves too large, or whose every step holds up all requests.
        """
        mask = np.zeros((1, mask_words(self._vocab_size)), dtype=np.int32)
        least_s = math.inf
        for _ in range(_NUM_STEPS):
            start = time.process_time()
            matcher.library.fill([(matcher, 0)], mask)
            if matcher.failure is not None:
                raise GrammarError(matcher.failure)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if matcher.has_ended or not len(allowed):
                return
            matcher.consume([int(allowed[len(allowed) // 2])])
            # the fastest of them: one step may do what later ones find done
            least_s = min(least_s, time.process_time() - start)
        if least_s > _MOST_STEP_S:
            raise GrammarError(
                f"each token takes {least_s:.2f} s to be found, and may take {_MOST_STEP_S:g} s"
            )


def main(fd: int) -> None:
    """Serve the other end of a pipe until it is closed."""
    pipe = Connection(fd)
    try:
        start = msgspec.msgpack.decode(pipe.recv_bytes(), type=TrialStart)
        try:
            trial = GrammarTrial(start)
        # ImportError: the library is an optional package
        except (EngineError, ImportError) as error:
            pipe.send_bytes(to_msgpack(TrialAnswer(text_of(error))))
            return
        pipe.send_bytes(to_msgpack(TrialAnswer()))
        while True:
            source = msgspec.msgpack.decode(pipe.recv_bytes(), type=GrammarSource)
            pipe.send_bytes(to_msgpack(trial.run(source)))
    except EOFError:
        return
