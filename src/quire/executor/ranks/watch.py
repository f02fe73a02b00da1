"""Notices that a rank has died, is stopped or hangs: while a step runs, and while nothing does.

What counts as hung are the rules for cores (engine/client/core_health.py). A watcher that was late
itself, because the machine stood still, judges nobody by the time that it has missed; nor does
time count in which a rank could have run and others had the machine.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Collection, Sequence

from quire.executor.ranks.board import RankSigns
from quire.processes.owned_process import OwnedProcess
from quire.processes.process_state import ThreadTimes, is_starved, is_stopped, thread_times

LOOK_S = 0.25
"""Seconds between two looks."""
SILENT_S = 10.0
"""A rank without a sign of life for this long is hung."""
LOADING_S = 60.0
"""The limit while models are loaded, where one call may take long in which no thread of the
interpreter runs.
"""
IMPORTING_S = 300.0
"""The limit for the first sign of a process."""
STOPPED_S = 1.2
"""The limit for a silent rank whose process is stopped."""
LONGEST_STEP_S = 300.0
"""Seconds that the ranks may finish nothing of a step before any step has been measured."""
SHORTEST_BOUND_S = 10.0
_SUSPICIOUS_S = 1.0
"""From so many seconds on the threads of a rank are looked at."""
_TIMES = 10
"""They may finish nothing for this many times the longest step, and for more in a step of more
tokens than any so far: a stage without collectives finishes nothing before its whole chunk.
"""


class RankJudge:
    """The state of ranks by looks at their signs. A look counts the time since the last one
    up to twice `LOOK_S`: one that comes later says more of the watcher than of the ranks.
    """

    def __init__(self, size: int) -> None:
        self.longest_step_s: float | None = None
        """The longest step so far; None: none has ended."""
        self.is_loading = True
        """Whether the ranks have not answered yet that they are ready. Set by another thread."""
        self._was_loading = True
        """The same at the last look."""
        self._most_tokens = 1
        """Tokens of the largest step so far."""
        self._step_tokens: int | None = None
        self._beats, self._progress = [-1] * size, [-1] * size
        self._silent_s = [0.0] * size
        self._stuck_s = 0.0

    def look(
        self,
        passed_s: float,
        signs: Sequence[RankSigns],
        collectives: Sequence[int],
        *,
        step_tokens: int | None,
        starved: Collection[int] = (),
    ) -> None:
        """Note the signs of all ranks, and the collectives that each has finished, `passed_s`
        after the last look. `step_tokens`: of the step whose end their core waits for; None: it
        does not. `starved`: ranks that had next to nothing of this time, though they could run.
        """
        counted_s = min(passed_s, 2 * LOOK_S)
        if self._was_loading and not self.is_loading:
            # that they have answered is a sign of life of all
            self._was_loading, self._beats = False, [-1] * len(signs)
        progress = [sign.num_done + count for sign, count in zip(signs, collectives, strict=True)]
        for rank, sign in enumerate(signs):
            # what a rank finishes is a sign of life, too: where others take the machine's time, its
            # thread of signs may get none for long
            is_silent = (sign.beat, progress[rank]) == (self._beats[rank], self._progress[rank])
            own_s = 0.0 if rank in starved else counted_s
            self._silent_s[rank] = self._silent_s[rank] + own_s if is_silent else 0.0
            self._beats[rank] = sign.beat
        # ranks that nobody waits for have nothing to finish
        is_stuck = step_tokens is not None and progress == self._progress
        own_s = 0.0 if starved else counted_s
        self._stuck_s = self._stuck_s + own_s if is_stuck else 0.0
        self._progress, self._step_tokens = progress, step_tokens

    def note_step(self, seconds: float, num_tokens: int) -> None:
        """Note how long a step has taken."""
        self.longest_step_s = max(self.longest_step_s or 0.0, seconds)
        self._most_tokens = max(self._most_tokens, num_tokens)

    def suspects(self) -> list[int]:
        """The ranks that may be found to hang soon."""
        bound_s = 0.0 if self._stuck_s > _SUSPICIOUS_S else _SUSPICIOUS_S
        return [rank for rank, silent_s in enumerate(self._silent_s) if silent_s >= bound_s]

    def verdict(self, is_stopped: Callable[[int], bool]) -> tuple[int, str] | None:
        """The rank that hangs, and why; None: none does. `is_stopped` of a rank."""
        for rank, silent_s in enumerate(self._silent_s):
            bound_s = SILENT_S
            if self._was_loading:
                bound_s = LOADING_S if self._beats[rank] > 0 else IMPORTING_S
            if silent_s > bound_s or (silent_s > STOPPED_S and is_stopped(rank)):
                return rank, f"gave no sign of life for {silent_s:.1f} s"
        bound_s = self._bound_s()
        if self._stuck_s > bound_s:
            # the one that is furthest behind holds up the others in an exchange
            last = self._progress.index(min(self._progress))
            return last, f"and the others have finished nothing of a step for {bound_s:.0f} s"
        return None

    def _bound_s(self) -> float:
        """The seconds that the ranks may finish nothing of the step that they are in."""
        if self.longest_step_s is None:
            return LONGEST_STEP_S
        measured_s = max(SHORTEST_BOUND_S, _TIMES * self.longest_step_s)
        larger = max(1.0, (self._step_tokens or 0) / self._most_tokens)
        return min(measured_s * larger, max(measured_s, LONGEST_STEP_S))


class RankWatch:
    """The thread that watches the processes of ranks, until `close`."""

    def __init__(
        self,
        processes: Sequence[OwnedProcess],
        signs: Callable[[], Sequence[RankSigns]],
        collectives: Callable[[], Sequence[int]],
        step_tokens: Callable[[], int | None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        """`on_failure` gets the first rank that fails, and how; it runs in this thread."""
        self.judge = RankJudge(len(processes))
        self._processes = processes
        self._signs = signs
        self._collectives = collectives
        self._step_tokens = step_tokens
        self._on_failure = on_failure
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Judge nobody any more."""
        self._is_closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        ranks = {process.pipe.fileno(): rank for rank, process in enumerate(self._processes)}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        looked_at = time.monotonic()
        times: dict[int, ThreadTimes] = {}
        while not self._is_closed.is_set():
            ended = poll.poll(LOOK_S * 1000)
            # a process that ends after `close` has not failed
            if self._is_closed.is_set():
                return
            if ended:
                rank = ranks[ended[0][0]]
                self._on_failure(rank, self._processes[rank].exit_words())
                return
            now, before, times = time.monotonic(), times, self._times_of_suspects()
            passed_s = now - looked_at
            self.judge.look(
                *(passed_s, self._signs(), self._collectives()),
                step_tokens=self._step_tokens(),
                starved=[r for r in times if is_starved(before.get(r, {}), times[r], passed_s)],
            )
            looked_at = now
            found = self.judge.verdict(self._is_stopped)
            if found is not None:
                self._on_failure(*found)
                return

    def _times_of_suspects(self) -> dict[int, ThreadTimes]:
        here = [rank for rank in self.judge.suspects() if self._processes[rank].is_here]
        return {rank: thread_times(self._processes[rank].pid) for rank in here}

    def _is_stopped(self, rank: int) -> bool:
        process = self._processes[rank]
        # on another machine the number is that of some other process
        return process.is_here and is_stopped(process.pid)
