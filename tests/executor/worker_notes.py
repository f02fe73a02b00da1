"""A worker extension, by its name: `tests.executor.worker_notes.Notes`."""

import os
import sys


class Notes:
    def note(self, text, *, times=1):
        """What the worker was told, and who it is."""
        self.noted = text * times
        return [self.noted, self.rank, str(self.device), os.getpid()]

    def forget(self):
        raise LookupError(f"{self.noted} stays")

    def leave(self):
        sys.exit("no more notes")


class Taken:
    def sleep(self):
        """Workers have such a method already."""


class TakenByInstances:
    facts = None

    def launch(self):
        """Each worker has one of its own."""


not_a_class = Notes().note
