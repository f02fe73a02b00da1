"""Whether the last messages before a silence have come: they leave no gap to be noticed by."""

from __future__ import annotations

from quire.engine.wire.frame_order import Overdue
from quire.engine.wire.messages import Heartbeat

BEAT_S = 0.5


class DeliveryMonitor:
    """Compares what a core's heartbeats say of the messages between it and us with what we know.

    Time counts only while the receiving side looks, so a message that lies unread is not lost.
    """

    def __init__(self, patience_s: float) -> None:
        self._outputs, self._inputs = Overdue(patience_s), Overdue(patience_s)
        self._our_looks_s = self._its_looks_s = 0.0
        self._beat_at = 0.0

    def look(self, beat: Heartbeat, num_taken: int, passed_s: float) -> None:
        """We have taken in all there was, as we have for `passed_s`. Raises LostFrames."""
        self._our_looks_s += passed_s
        self._outputs.check(beat.num_sent, num_taken, self._our_looks_s)

    def note_beat(self, before: Heartbeat, beat: Heartbeat, num_sent: int, now: float) -> None:
        """A core looks at its input between steps, and while it has no work. Raises LostFrames.

        Beats that we find in a heap are old: together they count as one.
        """
        passed_s, self._beat_at = min(BEAT_S, now - self._beat_at), now
        if beat.num_steps != before.num_steps or not beat.has_work:
            self._its_looks_s += passed_s
            self._inputs.check(num_sent, beat.num_taken, self._its_looks_s)
