"""A worker extension, by its name: `tests.executor.worker_notes.Notes`."""

import os
import sys

from quire.executor.worker import Worker


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


class OwnWorker(Worker):
    """A worker in place of Quire's."""

    def get_supported_tasks(self):
        return [*super().get_supported_tasks(), "own"]
