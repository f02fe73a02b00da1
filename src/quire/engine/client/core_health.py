"""The health of a core: its status for callers, and when it counts as hung and is killed."""

from __future__ import annotations

import time

from quire.engine.client.client import CoreStatus
from quire.engine.client.core_sockets import CoreConnection
from quire.processes.process_state import is_stopped

CHECK_S = 0.5
"""Interval in which a client looks for hung cores, in seconds."""
SILENT_S = 10.0
"""A core without a sign of life for this long is killed."""
LONGEST_TURN_S = 300.0
"""A core whose loop is inside one turn for this long is killed, even if it gives signs of life."""
LONGEST_START_S = 600.0
"""A core of another machine that has joined and is not ready after this long is lost."""
STOPPED_S = 1.2
"""The limit for a silent core whose process is stopped: two heartbeats are missing."""


def status_of(connection: CoreConnection) -> CoreStatus:
    """Return the current status of the core."""
    now, beat, process = time.monotonic(), connection.heartbeat, connection.process
    remote_pid = 0 if connection.ready is None else connection.ready.pid
    return CoreStatus(
        connection.engine_index,
        connection.incarnation,
        pid=remote_pid if process is None else process.pid,
        is_running=not connection.is_dead and (process is None or process.is_running),
        is_started=connection.ready is not None,
        has_work=beat.has_work,
        num_steps=beat.num_steps,
        silent_s=now - connection.last_sign,
        turn_age_s=beat.turn_age_s,
        step_age_s=now - connection.last_step,
    )


def hang_of(connection: CoreConnection, now: float, silent_s: float, longest_turn_s: float) -> str:
    """The reason why a core counts as hung at `now` (of `time.monotonic`), or "" if it does not."""
    quiet_s = now - connection.last_sign
    # nothing of it can be measured here before it has joined
    if not connection.has_joined:
        from quire.engine.data_parallel.handshake import HANDSHAKE_TIMEOUT_MINS

        is_late = quiet_s > HANDSHAKE_TIMEOUT_MINS * 60
        return "it did not come back from its machine" if is_late else ""
    if connection.ready is None:
        # nobody here sees the end of a process on another machine
        is_lost = connection.process is None and quiet_s > LONGEST_START_S
        return f"it was not ready {quiet_s:.0f} s after it had joined" if is_lost else ""
    is_here = connection.process is not None and connection.process.is_here
    # the state of a process is only known on its own machine, and read only when beats are missing
    may_be_stopped = is_here and quiet_s > STOPPED_S
    if quiet_s > silent_s or (may_be_stopped and is_stopped(connection.ready.pid)):
        return f"it gave no sign of life for {quiet_s:.1f} s"
    # beats come from a thread of their own, which a hanging step does not stop
    if connection.heartbeat.turn_age_s > longest_turn_s:
        return f"one turn of its loop took {connection.heartbeat.turn_age_s:.1f} s"
    return ""
