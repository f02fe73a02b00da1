"""Validates grammars in a process that can be killed, before anything else is done for a request.

A grammar that takes too much time or memory, or crashes the library, ends only that process and its
own request. Results are cached.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import msgspec

from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.encodable import to_msgpack
from quire.errors import EngineError, InvalidParameter, LoadError
from quire.grammar.library import in_short
from quire.grammar.source import GrammarSource, source_of, with_defaults
from quire.grammar.vocabulary import VocabularySource
from quire.hardware.task_limits import OVER_TIME
from quire.params import StructuredOutputsParams

logger = logging.getLogger(__name__)

_ROOT = str(Path(__file__).parents[2])
_BOOT = (
    "import sys; sys.path.append(sys.argv[2]); "
    "from quire.grammar.trial_process import main; main(int(sys.argv[1]))"
)
_START_S = 120.0
"""Reading the vocabulary takes one or two seconds; on a machine that does much else, more."""
_WAITING_FACTOR = 4
"""A trial's limit in wall-clock time, as a multiple of its CPU time: the cores are shared."""
_EXIT_S = 10.0
_MAX_VERDICTS = 4096


class TrialStart(msgspec.Struct, frozen=True):
    """The first message to a trial process."""

    vocabulary: VocabularySource
    backend: str
    time_s: float
    memory_bytes: int


class TrialAnswer(msgspec.Struct, frozen=True):
    """The answer to a message: `error` is None if all went well. `unenforced`: see `Form`."""

    error: str | None = None
    unenforced: tuple[str, ...] = ()


class GrammarTrials:
    """Checks whether forms can be served. Threads may share it: one trial runs at a time."""

    def __init__(self, vocabulary: VocabularySource, config: StructuredOutputsConfig) -> None:
        self._start = TrialStart(
            vocabulary, config.backend, config.compile_time_s, config.compile_memory_mib * 2**20
        )
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar trials")
        self._verdicts: OrderedDict[bytes, TrialAnswer] = OrderedDict()
        self._logged: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None
        self._unusable: str | None = None

    def prepare(self) -> None:
        """Start the process now, if the engine's settings say so, in a thread. A process that does
        not start is tried again with the first form.
        """
        if self._config.prepare:
            self._thread.submit(self._prepare)

    def _prepare(self) -> None:
        # nobody waits for this start, and the first form meets the same error
        with self._lock, contextlib.suppress(EngineError):
            self._open()

    def _open(self) -> None:
        """Start the process, unless it runs or its vocabulary cannot be used."""
        if self._process is not None or self._unusable is not None:
            return
        self._process = _TrialProcess()
        try:
            self._process.read(self._start)
        except LoadError as error:
            # kept: another process would read the same vocabulary
            self._process, self._unusable = None, str(error)
        except EngineError:
            self._process = None
            raise

    @property
    def reasoning_parser(self) -> str:
        """The name of the reasoning that forms begin after; "" none."""
        return self._config.reasoning_parser

    def completed(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Complete a request's form with the engine's settings for all forms."""
        return with_defaults(params, self._config)

    def submit(self, params: StructuredOutputsParams) -> Future[None] | None:
        """Run `check` of the completed form in a thread; None if it returns at once."""
        completed = self.completed(params)
        if source_of(completed).digest in self._verdicts:
            return None
        return self._thread.submit(self.check, completed)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidParameter for a form that cannot be served, EngineError if no form can be
        checked.

        A new form takes milliseconds, the first one as long as reading the vocabulary.
        """
        source = source_of(params)
        key = source.digest
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._try(source)
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            verdict = self._verdicts[key]
        if verdict.error is not None:
            name = f"structured_outputs.{params.kind}"
            raise InvalidParameter(name, getattr(params, params.kind), verdict.error)
        if verdict.unenforced and key not in self._logged:
            self._note(key, verdict.unenforced)

    def unenforced(self, params: StructuredOutputsParams) -> tuple[str, ...]:
        """Return pointers to the keywords of a checked form that are annotations."""
        verdict = self._verdicts.get(source_of(self.completed(params)).digest)
        return () if verdict is None else verdict.unenforced

    def _note(self, key: bytes, unenforced: tuple[str, ...]) -> None:
        self._logged[key] = None
        if len(self._logged) > _MAX_VERDICTS:
            self._logged.popitem(last=False)
        logger.warning(
            "A JSON schema has keywords that are not enforced: %s", in_short(", ".join(unenforced))
        )

    def close(self) -> None:
        """End process and thread, and so a trial that is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._unusable = "the engine is shutting down"
        # before the lock, which is a trial's for as long as its process lives
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _try(self, source: GrammarSource) -> TrialAnswer:
        self._open()
        if self._process is None:
            return TrialAnswer(self._unusable)
        limit_s = self._start.time_s
        process = self._process
        try:
            return process.ask(source, limit_s * _WAITING_FACTOR)
        except TimeoutError:
            was_too_slow = True
        except (EOFError, OSError):
            # the kernel's signal for the limit; any other end is memory or a crash of the library
            was_too_slow = process.exit_code() == -OVER_TIME
        self._process = None
        process.end()
        if self._unusable is not None:
            return TrialAnswer(self._unusable)
        if was_too_slow:
            return TrialAnswer(f"compiling it takes more than {limit_s:g} s")
        memory_mib = self._start.memory_bytes >> 20
        return TrialAnswer(
            f"compiling it takes more than {memory_mib} MiB, or makes the compiler fail"
        )


class _TrialProcess:
    """A trial process; it ends when its pipe is closed for any reason."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                # -P: the working directory may have modules of the same names
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), _ROOT],
                stdin=subprocess.DEVNULL,
                # libraries print there what the answer says already
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for its parent, which ends it
            )
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()
        # also where nobody calls `end`: the interpreter's exit runs it
        self._finalizer = weakref.finalize(self, _end, self._pipe, self._process)

    def read(self, start: TrialStart) -> None:
        """Have it read its vocabulary. Raises LoadError for one that grammars cannot use,
        EngineError where the process did not start; both end it.
        """
        try:
            error = self.ask(start, _START_S).error
        except (TimeoutError, EOFError, OSError):
            self.end()
            raise EngineError("The process that tries grammars did not start.") from None
        if error is not None:
            self.end()
            raise LoadError(error)

    def ask(self, message: msgspec.Struct, timeout_s: float) -> TrialAnswer:
        """Send a message and wait for its answer. Raises TimeoutError, EOFError or OSError."""
        self._pipe.send_bytes(to_msgpack(message))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return msgspec.msgpack.decode(self._pipe.recv_bytes(), type=TrialAnswer)

    def exit_code(self) -> int | None:
        """The exit status of a process that closed its end of the pipe; None: it still runs."""
        try:
            return self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Have the thread that waits for an answer meet the end of the pipe."""
        self._process.kill()

    def end(self) -> None:
        """Kill it if it runs."""
        self._finalizer()


def _end(pipe: Connection, process: subprocess.Popen[bytes]) -> None:
    pipe.close()
    process.kill()
    process.wait()
