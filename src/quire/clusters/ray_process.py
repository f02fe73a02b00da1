"""A process on some machine of a Ray cluster, as its owner sees it.

A Ray actor (hosted_process.py) starts and watches it there. A thread here waits for the actor, so
that nothing waits for Ray in the thread that serves.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.clusters.hosted_process import HostedProcess
from quire.clusters.ray_cluster import new_group
from quire.processes.child_process import completed
from quire.processes.distant_process import DistantProcess, Ending
from quire.processes.start_message import ChildStart

logger = logging.getLogger(__name__)

MOST_CALLS = 4
"""Calls of an actor at a time: one waits for the end of the process."""
RELEASE_S = 1.0
"""Seconds that an owner waits until the cluster has taken back the resources of a process."""
LOOK_S = 2.0
"""Seconds between two looks at whether the machines that a process is to start on live."""
NEW_MACHINE_S = 60.0
"""Seconds that a cluster may take to find room elsewhere once such a machine has died."""


class Room(Protocol):
    """Resources of a process in the cluster. Called by the thread that waits for the process.

    `own`: fields of the start message that are known once they are taken.
    """

    own: Mapping[str, str]

    def take(self) -> tuple[Any, int, Mapping[str, float]] | None:
        """A placement group, the number of the bundle in it, and what of that is used; None: there
        is no machine for it now. It may be taken again once it was given back.
        """
        ...

    def is_lost(self) -> bool:
        """Whether the machines that it was to be on have died, so that it never comes."""
        ...

    def give_back(self) -> None:
        """It is not needed any more. Idempotent."""
        ...


class OwnBundles:
    """`bundles` on one of the machines that `nodes` returns whenever they are taken (none: any;
    None: there is none now), in a placement group of its own. They are the process's, or those of
    the workers that it starts in them.
    """

    def __init__(
        self,
        name: str,
        bundles: Sequence[Mapping[str, float]],
        nodes: Callable[[], Sequence[str] | None],
        *,
        are_workers: bool,
    ) -> None:
        self._name, self._bundles, self._nodes = name, bundles, nodes
        self._are_workers = are_workers
        self._group: Any = None
        self._num_groups = 0
        self._taken: Sequence[str] | None = None
        self.own: Mapping[str, str] = {}

    def take(self) -> tuple[Any, int, Mapping[str, float]] | None:
        self._taken = self._nodes()
        if self._taken is None:
            return None
        self._num_groups += 1
        name = _nth(self._name, self._num_groups)
        self._group = new_group(name, self._bundles, self._taken)
        if self._are_workers:
            self.own = {"ray_group": self._group.id.hex()}
        return self._group, 0, {} if self._are_workers else self._bundles[0]

    def is_lost(self) -> bool:
        return self._nodes() != self._taken

    def give_back(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            ray.util.remove_placement_group(group)


class BundleOf:
    """A bundle of a placement group that somebody else has made."""

    def __init__(self, group: Any, number: int) -> None:
        self._group, self._number = group, number
        self.own: Mapping[str, str] = {}

    def take(self) -> tuple[Any, int, Mapping[str, float]]:
        most = self._group.bundle_specs[self._number]
        used = {name: min(1.0, most[name]) for name in ("CPU", "GPU") if most.get(name)}
        return self._group, self._number, used

    def is_lost(self) -> bool:
        return False

    def give_back(self) -> None:
        """Nothing is ours."""


class RayProcess(DistantProcess):
    """Starts a process in an actor of `kind` once `start` has the message, of which `arguments`
    makes the actor's; as OwnedProcess.

    `placement_s` is how long the cluster may take to have its `room`, which is taken again where it
    is lost before the process has started. `pipe` is closed at the other end when the process has
    ended.
    """

    lost = "closed its connections and had to be killed"

    def __init__(
        self,
        name: str,
        kind: type[HostedProcess],
        arguments: Callable[[Any], Mapping[str, Any]],
        *,
        room: Room,
        placement_s: float,
    ) -> None:
        super().__init__()
        self.pid = 0
        self._name, self._kind, self._arguments = name, kind, arguments
        self._room, self._placement_s = room, placement_s
        self._news = threading.Event()
        self._actor: Any = None
        self._num_actors = 0
        self._thread: threading.Thread | None = None

    def start(self, message: ChildStart, fds: Sequence[int] = ()) -> None:
        """As `OwnedProcess.start`; it takes effect when the cluster has room."""
        assert not fds, "descriptors stay on their machine"
        arguments = self._arguments(completed(message))
        # calls of Ray wait for the cluster, and the owner must not
        self._thread = threading.Thread(
            target=self._run, args=(arguments,), name=self._name, daemon=True
        )
        self._thread.start()

    def ask_to_end(self) -> None:
        if self._actor is not None and self.is_running:
            self._actor.ask_to_end.remote()

    def kill(self) -> None:
        """End it at once for its owner: an actor that does not answer is left to the cluster."""
        self.finish(Ending(-signal.SIGKILL, "was killed by SIGKILL", None))

    def end(self, timeout_s: float) -> None:
        self._ended.wait(max(timeout_s, 0.0))
        self.kill()
        if self._thread is not None:
            self._thread.join(RELEASE_S)
        self.pipe.close()

    def _run(self, arguments: Mapping[str, Any]) -> None:
        """Start the actor, wait for the end of its process, and give back what they had."""
        try:
            self.finish(self._live(arguments))
        except _Killed:
            return
        except _NoRoom as error:
            self.finish(Ending(1, f"found no room in the Ray cluster within {error}", None))
        except RayError as error:
            first = str(error).splitlines()[0].rstrip(".")
            text = f"ended with its Ray actor ({first})"
            self.finish(Ending(1, text, None))
        except Exception as error:  # what Ray raises of itself, such as a cluster that is gone
            self.finish(Ending(1, f"was not started by Ray: {error}", None))
        finally:
            self._release()

    def _live(self, arguments: Mapping[str, Any]) -> Ending:
        began, within_s, since = time.monotonic(), self._placement_s, ""
        while not self._starts(arguments, began + within_s, f"{within_s:g} s{since}"):
            self._release()
            if not since:
                logger.warning("%s: its machine has left the Ray cluster.", self._name)
                began, since = time.monotonic(), " of the loss of its machine"
                within_s = min(within_s, NEW_MACHINE_S)
        future = self._future(self._actor.run.remote())
        while not future.done():
            self._hears(None)
        ending: Ending = future.result()
        return ending

    def _starts(self, arguments: Mapping[str, Any], deadline: float, bound: str) -> bool:
        """Start the process in its room; False: that is lost. Raises _NoRoom after `deadline`."""
        while (room := self._room.take()) is None:
            self._pause(deadline, bound)
        future = self._future(self._new_actor(arguments, *room).wait_for_init.remote())
        while not future.done():
            if self._room.is_lost():
                return False
            self._pause(deadline, bound)
        try:
            self.pid = future.result()
        except RayActorError:
            # it may have died with its machine
            if self._room.is_lost():
                return False
            raise
        return True

    def _new_actor(
        self, arguments: Mapping[str, Any], group: Any, number: int, used: Mapping[str, float]
    ) -> Any:
        self._num_actors += 1
        name = _nth(self._name, self._num_actors)
        actor_class = ray.remote(self._kind)
        self._actor = actor_class.options(
            name=name,
            num_cpus=used.get("CPU", 0),
            num_gpus=used.get("GPU", 0),
            max_concurrency=MOST_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        ).remote(**arguments, own=self._room.own)
        return self._actor

    def _future(self, ref: Any) -> Any:
        """The value of an actor, whose coming is news."""
        future = ref.future()
        future.add_done_callback(lambda _: self._news.set())
        return future

    def _hears(self, timeout_s: float | None) -> bool:
        """Wait for news; False: there were none. Raises _Killed once the owner has killed it."""
        has_news = self._news.wait(timeout_s)
        # before the look at the ending: one that comes after it is news again
        self._news.clear()
        if self._ending is not None:
            raise _Killed
        return has_news

    def _pause(self, deadline: float, bound: str) -> None:
        """Wait until the next look, or for news. Raises _NoRoom after `deadline`."""
        left = deadline - time.monotonic()
        if not self._hears(max(0.0, min(left, LOOK_S))) and left <= LOOK_S:
            raise _NoRoom(bound)

    def finish(self, ending: Ending) -> None:
        super().finish(ending)
        self._news.set()

    def _release(self) -> None:
        try:
            if self._actor is not None:
                ray.kill(self._actor)
            self._room.give_back()
        # the cluster may be gone; it takes back by itself what a dead owner had
        except Exception as error:
            logger.debug("The Ray cluster did not take %s back: %s", self._name, error)


def _nth(name: str, number: int) -> str:
    """A name of its own for each try: the cluster may not have taken back that of the last one."""
    return name if number == 1 else f"{name}_{number}"


class _NoRoom(Exception):
    """The cluster has found no room in time, which the text says."""


class _Killed(Exception):
    """The owner has killed the process."""
