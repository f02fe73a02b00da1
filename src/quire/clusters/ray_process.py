"""A process on some machine of a Ray cluster, as its owner sees it.

A Ray actor (hosted_process.py) starts and watches it there. A thread here waits for the actor, so
that nothing waits for Ray in the thread that serves.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.clusters.hosted_process import Ending, HostedProcess
from quire.clusters.ray_cluster import new_group
from quire.processes.child_process import completed
from quire.processes.start_message import ChildStart

logger = logging.getLogger(__name__)

MOST_CALLS = 4
"""Calls of an actor at a time: one waits for the end of the process."""
RELEASE_S = 5.0
"""Seconds that the cluster may take to take back the resources of a process."""


class RayProcess:
    """Starts a process in an actor of `kind` once `start` has the message, of which `arguments`
    makes the actor's; as OwnedProcess.

    `bundle` is what it reserves on one of `nodes` (none: any); `placement_s` is how long the
    cluster may take to find room. `pipe` is closed at the other end when the process has ended.
    """

    is_here = False

    def __init__(
        self,
        name: str,
        kind: type[HostedProcess],
        arguments: Callable[[Any], Mapping[str, Any]],
        *,
        bundle: Mapping[str, float],
        nodes: Sequence[str],
        placement_s: float,
    ) -> None:
        self.pipe, self._theirs = socket.socketpair()
        self.pid = 0
        self._name, self._kind, self._arguments = name, kind, arguments
        self._bundle, self._nodes, self._placement_s = bundle, nodes, placement_s
        self._ending: Ending | None = None
        self._ended, self._news = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._actor: Any = None
        self._group: Any = None
        self._thread: threading.Thread | None = None

    def start(self, message: ChildStart) -> None:
        """As `OwnedProcess.start`; it takes effect when the cluster has room."""
        arguments = self._arguments(completed(message))
        self._thread = threading.Thread(
            target=self._run, args=(arguments,), name=self._name, daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._ending is None

    @property
    def exit_code(self) -> int | None:
        return None if self._ending is None else self._ending.code

    def exit_words(self) -> str:
        return "has not ended" if self._ending is None else self._ending.words

    def last_words(self) -> tuple[str, str] | None:
        return None if self._ending is None else self._ending.last_words

    def ask_to_end(self) -> None:
        if self._actor is not None and self.is_running:
            self._actor.ask_to_end.remote()

    def kill(self) -> None:
        """End it at once, as far as its owner is concerned: an actor that does not answer is left
        to the cluster.
        """
        self._finish(Ending(-signal.SIGKILL, "was killed by SIGKILL", None))

    def end(self, timeout_s: float) -> None:
        self._ended.wait(max(timeout_s, 0.0))
        self.kill()
        if self._thread is not None:
            self._thread.join(RELEASE_S)
        self.pipe.close()

    def _run(self, arguments: Mapping[str, Any]) -> None:
        """Start the actor, wait for the end of its process, and give back what they had."""
        try:
            self._finish(self._live(arguments))
        except _Killed:
            return
        except GetTimeoutError:
            what = ", ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
            text = f"got no machine with {what} of the Ray cluster within {self._placement_s:g} s"
            self._finish(Ending(1, text, None))
        except RayError as error:
            first = str(error).splitlines()[0].rstrip(".")
            text = f"ended with its Ray actor ({first})"
            self._finish(Ending(1, text, None))
        except Exception as error:  # what Ray raises of itself, such as a cluster that is gone
            self._finish(Ending(1, f"was not started by Ray: {error}", None))
        finally:
            self._release()

    def _live(self, arguments: Mapping[str, Any]) -> Ending:
        self._group = new_group(self._name, [self._bundle], self._nodes)
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        actor_class = ray.remote(self._kind)
        self._actor = actor_class.options(
            name=self._name,
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            max_concurrency=MOST_CALLS,
            scheduling_strategy=place,
        ).remote(**arguments)
        self.pid = self._get(self._actor.wait_for_init.remote(), self._placement_s)
        ending: Ending = self._get(self._actor.run.remote(), None)
        return ending

    def _get(self, ref: Any, timeout_s: float | None) -> Any:
        """Wait for a value of the actor. Raises GetTimeoutError after `timeout_s`, and _Killed once
        the owner has killed the process.
        """
        future = ref.future()
        future.add_done_callback(lambda _: self._news.set())
        while not future.done() and self._ending is None:
            if not self._news.wait(timeout_s):
                raise GetTimeoutError
            self._news.clear()
        if self._ending is not None:
            raise _Killed
        return future.result()

    def _finish(self, ending: Ending) -> None:
        with self._lock:
            if self._ending is not None:
                return
            self._ending = ending
        self._ended.set()
        self._news.set()
        self._theirs.close()

    def _release(self) -> None:
        """End the actor, and give back its bundle."""
        try:
            if self._actor is not None:
                ray.kill(self._actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        except Exception as error:
            logger.debug("The Ray cluster did not take %s back: %s", self._name, error)


class _Killed(Exception):
    """The owner has killed the process."""
