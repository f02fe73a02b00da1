"""The core processes that this process starts, restarts and ends, and their spares."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from quire import errors
from quire.config.plan import EnginePlan
from quire.engine.process.start_message import StartMessage
from quire.engine.wire.messages import EngineZmqAddresses
from quire.errors import EngineDeadError, EngineError, LoadError
from quire.executor.packed_file import preparation
from quire.processes.child_process import GRACE_S, ChildProcess
from quire.processes.owned_process import OwnedProcess
from quire.tiers.host_memory import HostMemory

logger = logging.getLogger(__name__)

CORE_PROGRAM = "quire.engine.process.core_main"
"""The module of a core process's program."""

SPARE_AFTER_S = 0.5
"""Seconds from the last start of a core to the start of a spare process."""


class CorePool:
    """Starts cores of one plan, restarts them with the next incarnation number, and ends them.

    `first` is a process that was started before its plan was known, for `engine_indices[0]`.
    `server_key` is the public key of a front end that accepts only cores that know the secret.
    `place` makes the process of a core where the cores are not on this machine. `experts` is the
    listening socket at which the first core awaits those that share experts with it.
    """

    def __init__(
        self,
        plan: EnginePlan,
        addresses: EngineZmqAddresses,
        engine_indices: Sequence[int],
        *,
        num_cores: int = 1,
        socket_folder: Path | None = None,
        first: ChildProcess | None = None,
        is_headless: bool = False,
        server_key: bytes | None = None,
        place: Callable[[int, int], OwnedProcess] | None = None,
        experts: socket.socket | None = None,
    ) -> None:
        """`place(engine_index, incarnation)` returns a process that waits for its message."""
        self._place = place
        self._experts = experts
        self._message = StartMessage(
            plan=plan,
            engine_index=-1,
            incarnation=0,
            addresses=addresses,
            socket_folder=None if socket_folder is None else str(socket_folder),
            is_headless=is_headless,
            num_cores=num_cores,
            server_key=server_key,
        )
        self._first = first
        self._spares: list[ChildProcess] = []
        self._started_at = 0.0
        self._memories: dict[int, HostMemory] = {}
        """Host memory for K/V of each core, which outlives its process."""
        self.incarnations: dict[int, int] = dict.fromkeys(engine_indices, 0)
        self.processes: dict[int, OwnedProcess] = {}

    @property
    def is_lock_step(self) -> bool:
        """Whether the cores share experts, so that they step, and restart, together."""
        return self._message.plan.parallel.is_lock_step

    def resize(self, num_cores: int) -> None:
        """Cores that start from now on share this machine's threads with `num_cores` in all. Each
        that is placed elsewhere has the room for its own.
        """
        plan = self._message.plan
        num_threads = plan.parallel.num_threads
        if self._place is None:
            num_threads = max(1, num_threads * self._message.num_cores // num_cores)
        self._message = msgspec.structs.replace(
            self._message,
            plan=plan.changed(num_threads=num_threads),
            num_cores=num_cores,
        )

    def start(self, engine_index: int) -> OwnedProcess:
        """Start the next incarnation of a core. Does not wait until it is ready."""
        old = self.processes.pop(engine_index, None)
        if old is not None:
            old.end(0.0)
        incarnation, plan = self.incarnations.get(engine_index, 0) + 1, self._message.plan
        fds = self._memory_of(engine_index)
        hosts_experts = self._experts is not None and not engine_index
        if self._experts is not None and hosts_experts:
            fds = [*fds, self._experts.fileno()]
        process = self._new_process(engine_index, incarnation)
        self._started_at = time.monotonic()
        try:
            process.start(
                msgspec.structs.replace(
                    self._message,
                    engine_index=engine_index,
                    incarnation=incarnation,
                    preparation=preparation(plan.model, plan.parallel),
                    hosts_experts=hosts_experts,
                ),
                fds,
            )
        except BaseException:
            process.end(0.0)
            raise
        self.processes[engine_index] = process
        self.incarnations[engine_index] = incarnation
        return process

    def _new_process(self, engine_index: int, incarnation: int) -> OwnedProcess:
        if self._place is not None:
            return self._place(engine_index, incarnation)
        # a spare has imported everything, which is most of the time of a restart
        process, self._first = self._first or self._take_spare() or ChildProcess(CORE_PROGRAM), None
        return process

    def _memory_of(self, engine_index: int) -> list[int]:
        """The descriptor of the memory in which a core keeps K/V; none where the plan has none, the
        system cannot share it, or the core or its workers may be on other machines.
        """
        plan = self._message.plan
        tier, parallel = plan.memory.kv_tier, plan.parallel
        is_elsewhere = parallel.spans_machines or parallel.has_ray_workers
        if tier is None or self._place is not None or is_elsewhere:
            return []
        if plan.model.has_files_of_plugin:
            return []  # they may come from anywhere at the next start
        if engine_index not in self._memories:
            num_workers = parallel.mesh.world_size
            self._memories[engine_index] = HostMemory(tier.host_bytes, num_workers)
        return self._memories[engine_index].fds

    def release_memory(self, engine_index: int) -> None:
        """Give up the K/V of a core that does not start again."""
        memory = self._memories.pop(engine_index, None)
        if memory is not None:
            memory.close()

    @property
    def spares(self) -> list[ChildProcess]:
        return [process for process in self._spares if process.is_running]

    def keep_spares(self) -> None:
        """Start a spare process, if the plan asks for one and the last start, with which it would
        compete, is `SPARE_AFTER_S` ago. To be called now and then while all cores are ready.
        """
        if time.monotonic() - self._started_at < SPARE_AFTER_S:
            return
        self._spares = self.spares
        if len(self._spares) < self._num_spares():
            # before the try: one that fails is not repeated at every look
            self._started_at = time.monotonic()
            try:
                self._spares.append(ChildProcess(CORE_PROGRAM))
            except OSError as error:
                logger.debug("No spare process now: %s", error)

    def _num_spares(self) -> int:
        """Number of spares that there should be; cores that restart together need one each."""
        when = self._message.plan.parallel.spare_core
        has_restarted = max(self.incarnations.values(), default=0) > 1
        if (
            self._place is not None
            or when == "never"
            or (when == "after_death" and not has_restarted)
        ):
            return 0
        return len(self.processes) if self.is_lock_step else 1

    def _take_spare(self) -> ChildProcess | None:
        self._spares = self.spares
        return self._spares.pop(0) if self._spares else None

    def death_of(self, engine_index: int, why: str = "") -> EngineError:
        """The error that says how a core's process, which has ended, has ended."""
        process = self.processes[engine_index]
        words = process.last_words()
        ending = process.exit_words()
        process.end(0.0)
        if words is not None:
            return _error(engine_index, *words, is_first=self.incarnations[engine_index] == 1)
        text = f"Engine core {engine_index} {ending}" + (f" ({why})" if why else "")
        return EngineDeadError(f"{text}.", engine_index=engine_index)

    def end(self, timeout_s: float = GRACE_S) -> None:
        """Wait until all cores have ended; kill them after `timeout_s`, and spares at once."""
        deadline = time.monotonic() + timeout_s
        while self._spares:
            self._spares.pop().end(0.0)
        while self.processes:
            _, process = self.processes.popitem()
            process.end(deadline - time.monotonic())
        for engine_index in list(self._memories):
            self.release_memory(engine_index)
        if self._experts is not None:
            self._experts.close()

    def ask_to_end(self) -> None:
        """Have all cores abort their requests and end."""
        for process in self.processes.values():
            process.ask_to_end()


def _error(engine_index: int, kind: str, text: str, *, is_first: bool) -> EngineError:
    """The error of a core's start: a LoadError at first as it is, else the core's death."""
    found = vars(errors).get(kind) if is_first else None
    if isinstance(found, type) and issubclass(found, LoadError):
        return found(text)
    text = f"Engine core {engine_index} could not start: {kind}: {text}"
    return EngineDeadError(text, engine_index=engine_index)
