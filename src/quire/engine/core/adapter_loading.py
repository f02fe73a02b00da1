"""Folders of LoRA adapters that are to be read, and the thread that reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any

from quire.engine.core.adapter_folders import ReadAdapter, read_unchanged
from quire.engine.wire.messages import AdapterRef
from quire.scheduling.request import Request

_READ_AT_ONCE = 2
"""Adapters stay in memory from when they are read until the core's loop takes them in."""


class AdapterLoading:
    """A folder that is to be read, and what waits for it: the prerequisite of requests."""

    def __init__(self, folder: str, wait: Callable[[float], None]) -> None:
        self.folder = folder
        self.future: Future[ReadAdapter] | None = None
        """The result of reading; None until its turn has come."""
        self.is_ready = False
        self.wait = wait
        """Blocks until some folder is read, at most for the given seconds."""
        self.requests: list[tuple[Request, AdapterRef]] = []
        self.calls: list[tuple[Future[bool], AdapterRef]] = []
        self.pins: set[int] = set()
        """Ids among those of `calls` that are to be pinned."""
        self.wanted: set[int] = set()
        """Adapters that were here, for which the scheduler has a slot."""
        self.dropped: set[int] = set()
        """Adapters that left host memory while it was read."""

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()


class AtOnce(Executor):
    """Runs what it is given in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class FolderReader:
    """Reads folders, in a thread or at once: by turns one that a slot waits for, and the one that
    has waited longest. `read` gives the number of a folder's contents. Iterating gives what was
    not taken.
    """

    def __init__(self, read: Callable[[str], int], *, is_aside: bool = True) -> None:
        self._read = read
        self._is_aside = is_aside
        self._loadings: dict[str, AdapterLoading] = {}
        self._thread: Executor | None = None
        self._num_begun = 0

    def __iter__(self) -> Iterator[AdapterLoading]:
        return iter(self._loadings.values())

    def load(self, folder: str) -> AdapterLoading:
        """Have a folder read, or join those that wait for it."""
        if folder not in self._loadings:
            self._loadings[folder] = AdapterLoading(folder, self.wait)
        return self._loadings[folder]

    def take(self, folder: str | None = None) -> AdapterLoading | None:
        """Remove and return one that has been read (None: of any folder), if there is one; the
        others stay here, to be told what has left the memory meanwhile.
        """
        for loading in self._loadings.values():
            if loading.is_done and folder in (None, loading.folder):
                return self._loadings.pop(loading.folder)
        return None

    def begin(self) -> None:
        """Begin to read what may be read now."""
        waiting = [each for each in self._loadings.values() if each.future is None]
        room = _READ_AT_ONCE - (len(self._loadings) - len(waiting))
        for _ in range(min(room, len(waiting))):
            if self._thread is None:
                aside = partial(ThreadPoolExecutor, 1, thread_name_prefix="adapters")
                self._thread = aside() if self._is_aside else AtOnce()
            self._num_begun += 1
            loading = waiting[0]
            # by turns, so that neither kind waits until all of the other are read
            if self._num_begun % 2:
                loading = next((each for each in waiting if each.wanted), loading)
            waiting.remove(loading)
            loading.future = self._thread.submit(read_unchanged, self._read, loading.folder)

    def wait(self, timeout_s: float) -> None:
        """Block until some folder is read, at most for `timeout_s`; not at all if none is."""
        self.begin()
        futures = [each.future for each in self._loadings.values() if each.future is not None]
        if futures:
            wait_for(futures, timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
