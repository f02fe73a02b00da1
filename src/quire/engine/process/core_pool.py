"""The core processes that one process has started: their lives one after the other, their end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire import errors
from quire.config.plan import EnginePlan
from quire.engine.process.core_process import GRACE_S, CoreProcess
from quire.engine.process.start_message import StartMessage
from quire.engine.wire.messages import EngineZmqAddresses
from quire.errors import EngineDeadError, EngineError, LoadError

HEARTBEAT_S = 0.5

SPARE_AFTER_S = 0.5
"""A spare process is started so long after the last start of a core."""


class CoreHost:
    """Starts cores of one plan, restarts them with the next incarnation number, and ends them.

    `first` is a process that was started ahead of its plan, for core `engine_indices[0]`.
    `server_key` is the public key of a front end that is closed to strangers.
    """

    def __init__(
        self,
        plan: EnginePlan,
        addresses: EngineZmqAddresses,
        engine_indices: Sequence[int],
        *,
        data_parallel_size: int = 1,
        socket_folder: Path | None = None,
        first: CoreProcess | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        is_headless: bool = False,
        server_key: bytes | None = None,
    ) -> None:
        self._plan = plan
        self._addresses = addresses
        self._data_parallel_size = data_parallel_size
        self._folder = socket_folder
        self._first = first
        self._heartbeat_s = heartbeat_s
        self._is_headless = is_headless
        self._server_key = server_key
        self.incarnations: dict[int, int] = dict.fromkeys(engine_indices, 0)
        self._spares: list[CoreProcess] = []
        self._started_at = 0.0
        self.processes: dict[int, CoreProcess] = {}
        """The present life of each core; one that was taken away is not here."""

    @property
    def is_lock_step(self) -> bool:
        """Whether the cores share experts, so that they live and die together."""
        return self._plan.enable_expert_parallel

    def resize(self, num_cores: int) -> None:
        """Cores that start from now on share the machine's threads with so many."""
        total = self._plan.num_threads * self._data_parallel_size
        share = max(1, total // num_cores)
        self._plan = msgspec.structs.replace(self._plan, num_threads=share)
        self._data_parallel_size = num_cores

    def start(self, engine_index: int) -> CoreProcess:
        """Begin the next life of a core. Does not wait for it to be ready."""
        old = self.processes.get(engine_index)
        if old is not None:
            old.end(0.0)
        process, self._first = self._first or self._take_spare() or CoreProcess(), None
        self._started_at = time.monotonic()
        self.processes[engine_index] = process
        self.incarnations[engine_index] = self.incarnations.get(engine_index, 0) + 1
        try:
            process.start(self._message(engine_index))
        except BaseException:
            process.end(0.0)
            del self.processes[engine_index]
            self.incarnations[engine_index] -= 1
            raise
        return process

    @property
    def spares(self) -> list[CoreProcess]:
        """The processes that wait to be a core."""
        return [process for process in self._spares if process.is_running]

    def keep_spares(self) -> None:
        """Start a process that will be the next life of a core, if the plan wants one and some time
        has passed since the last start, with which it would compete. To be called now and then
        while all cores are ready.
        """
        if time.monotonic() - self._started_at < SPARE_AFTER_S:
            return
        self._spares = self.spares
        if len(self._spares) < self._num_spares():
            self._spares.append(CoreProcess())
            self._started_at = time.monotonic()

    def _num_spares(self) -> int:
        """Cores that live and die together need one each."""
        wish = self._plan.spare_core
        if wish == "never" or (
            wish == "after_death" and max(self.incarnations.values(), default=0) < 2
        ):
            return 0
        return len(self.processes) if self.is_lock_step else 1

    def _take_spare(self) -> CoreProcess | None:
        spares, self._spares = self.spares, []
        self._spares = spares[1:]
        return spares[0] if spares else None

    def death_of(self, engine_index: int, why: str = "") -> EngineError:
        """The error that tells how a core has ended, whose pipe says that it has."""
        process = self.processes[engine_index]
        words = process.last_words()
        ending = process.exit_words()
        process.end(0.0)
        if words is not None:
            return _error(engine_index, *words, is_first=self.incarnations[engine_index] == 1)
        text = f"Engine core {engine_index} {ending}" + (f" ({why})" if why else "")
        return EngineDeadError(f"{text}.", engine_index=engine_index)

    def end(self, engine_indices: Sequence[int], timeout_s: float = GRACE_S) -> None:
        """Wait until these cores, which were told to, have ended; kill them after `timeout_s`.
        Spares end at once.
        """
        deadline = time.monotonic() + timeout_s
        spares, self._spares = self._spares, []
        for spare in spares:
            spare.end(0.0)
        for engine_index in engine_indices:
            process = self.processes.pop(engine_index, None)
            if process is not None:
                process.end(deadline - time.monotonic())

    def terminate(self) -> None:
        """Tell all cores to end, by signal."""
        for process in self.processes.values():
            process.terminate()

    def _message(self, engine_index: int) -> StartMessage:
        return StartMessage(
            plan=self._plan,
            engine_index=engine_index,
            incarnation=self.incarnations[engine_index],
            addresses=self._addresses,
            socket_folder=None if self._folder is None else str(self._folder),
            heartbeat_s=self._heartbeat_s,
            is_headless=self._is_headless,
            data_parallel_size=self._data_parallel_size,
            server_key=self._server_key,
        )


def _error(engine_index: int, kind: str, text: str, *, is_first: bool) -> EngineError:
    """What kept a core from serving: a LoadError stays one in its first life, the rest is a
    death.
    """
    found = vars(errors).get(kind) if is_first else None
    if isinstance(found, type) and issubclass(found, LoadError):
        return found(text)
    text = f"Engine core {engine_index} could not start: {kind}: {text}"
    return EngineDeadError(text, engine_index=engine_index)
