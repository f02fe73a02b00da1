"""Notices lost messages that leave no gap in the numbers, since none followed them."""

from __future__ import annotations

from quire.engine.wire.messages import Heartbeat
from quire.processes.codec import LostFrames

BEAT_S = 0.5


class Overdue:
    """Notices that a message which is known to have been sent has not arrived for too long."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._number = 0
        self._since = 0.0

    def check(self, num_sent: int, num_taken: int, now: float) -> None:
        """Compare the counts of messages sent and received at the time `now` (seconds). Raises
        LostFrames when a message that had been sent `patience_s` ago has not arrived.
        """
        if num_taken >= self._number:
            self._number, self._since = num_sent, now
        elif now - self._since > self._patience_s:
            raise LostFrames(f"message {num_taken + 1} has not come for {now - self._since:.1f} s")


class DeliveryMonitor:
    """Compares the counts of messages in a core's heartbeats with our own.

    Time counts only while the receiver reads its input, so a message that waits to be read is not
    lost.
    """

    def __init__(self, patience_s: float) -> None:
        self._outputs, self._inputs = Overdue(patience_s), Overdue(patience_s)
        self._our_looks_s = self._its_looks_s = 0.0
        self._beat_at = 0.0

    def look(self, beat: Heartbeat, num_taken: int, passed_s: float) -> None:
        """We have read our input for `passed_s` more seconds. Raises LostFrames."""
        self._our_looks_s += passed_s
        self._outputs.check(beat.num_sent, num_taken, self._our_looks_s)

    def note_beat(self, before: Heartbeat, beat: Heartbeat, num_sent: int, now: float) -> None:
        """Take a heartbeat that arrived at `now`. A core reads its input between steps, and while
        it has no work. Raises LostFrames.

        Heartbeats that are read at once had been waiting: together they count as one.
        """
        passed_s, self._beat_at = min(BEAT_S, now - self._beat_at), now
        if beat.num_steps != before.num_steps or not beat.has_work:
            self._its_looks_s += passed_s
            self._inputs.check(num_sent, beat.num_taken, self._its_looks_s)
