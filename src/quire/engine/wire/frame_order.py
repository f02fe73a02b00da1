"""Whether messages come as they were sent: each once, none missing, none late for ever."""

from __future__ import annotations


class LostFrames(Exception):
    """Something that was sent has not come: the two sides do not know the same any more."""


class FrameOrder:
    """The receiving end of one sender's messages, whose numbers count from 1."""

    def __init__(self) -> None:
        self.num_taken = 0

    def accept(self, number: int) -> bool:
        """Whether the message with this number is news; False for a repeat, which is to be dropped.

        Raises LostFrames when one before it is missing.
        """
        if number <= self.num_taken:
            return False
        if number > self.num_taken + 1:
            raise LostFrames(f"message {number} came behind message {self.num_taken}")
        self.num_taken = number
        return True


class Overdue:
    """Tells when what is known to have been sent has not come for too long: the last message before
    a silence leaves no gap.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._number = 0
        self._since = 0.0

    def check(self, num_sent: int, num_taken: int, now: float) -> None:
        """By now so many were sent, and so many have come. Raises LostFrames when one that had been
        sent `patience_s` ago has not.
        """
        if num_taken >= self._number:
            self._number, self._since = num_sent, now
        elif now - self._since > self._patience_s:
            raise LostFrames(f"message {num_taken + 1} has not come for {now - self._since:.1f} s")
