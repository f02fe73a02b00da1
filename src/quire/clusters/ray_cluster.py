"""A Ray cluster: joining or starting it, and which of its machines processes are put on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from quire.clusters.ray_place import RayPlace
from quire.environment import protect_new_ray_cluster, ray_asks_for_token, read_ray_environment
from quire.errors import EngineError, InvalidParameter

logger = logging.getLogger(__name__)

PLACEMENT_S = 1800.0
"""Seconds that a placement group may take to get its resources, while a cluster grows for it."""
FIRST_LOOK_S, LONGEST_LOOK_S = 10.0, 160.0

NODE_LABEL = "ray.io/node-id"


class WorkersGroup:
    """The placement group with a bundle for each of `size` workers, whose numbers are `bundles`:
    that of `place`, or a new one. Raises what `initialize_ray_cluster` raises.
    """

    def __init__(self, place: RayPlace, size: int) -> None:
        connect(place.address or None)
        self._is_ours = not place.group
        if self._is_ours:
            self.group = initialize_ray_cluster(_Workers(size))
            self.bundles = list(range(size))
            return
        from ray._raylet import PlacementGroupID  # a handle from a number: Ray has no other way
        from ray.util.placement_group import PlacementGroup

        self.group = PlacementGroup(PlacementGroupID.from_hex(place.group))
        self.bundles = usable_bundles(self.group, size, "CPU")

    def give_back(self) -> None:
        """Remove a group that was made here. Idempotent."""
        if self._is_ours:
            require_ray().util.remove_placement_group(self.group)
        self._is_ours = False


class _Workers:
    """A configuration as far as a group is made for it."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.placement_group: Any = None


class NeedsWorkers(Protocol):
    """The reason for a placement group: the workers of a core."""

    @property
    def world_size(self) -> int: ...


def require_ray() -> ModuleType:
    """The module `ray`. Raises InvalidParameter where it cannot be imported."""
    try:
        import ray
    except ImportError as error:
        hint = "pip install 'quire[ray]', on every machine of the cluster."
        raise InvalidParameter("ray", None, f"it cannot be imported: {error}", hint) from error
    module: ModuleType = ray
    return module


def connect(address: str | None = None) -> None:
    """Connect to the cluster at `address`, by default to that of RAY_ADDRESS or of this machine,
    unless this process is connected already. Where there is none, or with "local", one is started,
    of this machine alone, without a dashboard; who connects to it needs its token
    (RAY_AUTH_MODE=token, which Ray sets itself). Raises EngineError.
    """
    ray = require_ray()
    if ray.is_initialized():
        return
    given = address or read_ray_environment().address
    if given != "local":
        try:
            ray.init(address=given or "auto", log_to_driver=False)
            return
        except ConnectionError as error:
            if given is not None:
                text = f"No Ray cluster answers there: {str(error).splitlines()[0]}"
                raise EngineError(text) from error
    protect_new_ray_cluster()
    logger.warning("There is no Ray cluster: starting one of this machine alone.")
    ray.init(include_dashboard=False, log_to_driver=False)
    if not ray_asks_for_token():
        ray.shutdown()
        text = f"Ray {ray.__version__} starts clusters that anyone may use; 2.60 asks for a token."
        raise EngineError(text)


def own_address() -> str:
    """The address of this machine in the cluster."""
    return str(require_ray().util.get_node_ip_address())


def alive_nodes() -> list[Mapping[str, Any]]:
    """The machines of the cluster, this one first, the others by address."""
    ray = require_ray()
    here = ray.get_runtime_context().get_node_id()
    found = [node for node in ray.nodes() if node["Alive"]]
    return sorted(found, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))


def nodes_for_cores(
    size: int, size_local: int | None, bundle: Mapping[str, float]
) -> dict[int, Sequence[str]]:
    """The machines, by id, that each of `size` cores may be put on; none: any.

    With `size_local`, and unless QUIRE_RAY_DP_PACK_STRATEGY is fill, each machine gets exactly so
    many, this one the first, and those that are too small none. Raises InvalidParameter where the
    cluster is too small.
    """
    settings = read_ray_environment()
    rooms = _rooms(bundle)
    if not size_local or settings.pack_strategy == "fill":
        if sum(rooms.values()) < size:
            raise _too_small(size, bundle, sum(rooms.values()))
        return {rank: list(rooms) if settings.node_ips else () for rank in range(size)}
    first = next(iter(rooms.values()), size_local)
    if first < size_local:
        allowed = f"the first machine has room for {first} cores"
        raise InvalidParameter("data_parallel_size_local", size_local, allowed)
    fitting = [node for node, room in rooms.items() if room >= size_local]
    if len(fitting) * size_local < size:
        raise _too_small(size, bundle, len(fitting) * size_local)
    return {rank: [fitting[rank // size_local]] for rank in range(size)}


class CoreMachines:
    """The machines of `nodes_for_cores`, which are chosen again as they die. Of any thread.

    Ray lists a machine for some 20 s after its death: cores may have been given one that is dead.
    """

    def __init__(self, size: int, size_local: int | None, bundle: Mapping[str, float]) -> None:
        self._chosen = nodes_for_cores(size, size_local, bundle)
        is_fill = read_ray_environment().pack_strategy == "fill"
        self._num_each, self._bundle = 0 if is_fill else size_local or 0, bundle
        self._lock = threading.Lock()

    def of(self, rank: int) -> Sequence[str] | None:
        """The machines, by id, that a core may be put on; none: any; None: all of them have died,
        and there is no other now.

        Cores that were on one machine stay on one, which has no other cores of the engine.
        """
        with self._lock:
            mine = self._chosen.get(rank, ())
            if not mine:
                return ()
            rooms = _rooms(self._bundle)
            if any(node in rooms for node in mine):
                return mine
            taken = {node for nodes in self._chosen.values() for node in nodes}
            least = max(self._num_each, 1)
            free = [node for node, room in rooms.items() if room >= least and node not in taken]
            if not free:
                return None
            new = free[:1] if self._num_each else free
            for other, nodes in self._chosen.items():
                if nodes == mine:
                    self._chosen[other] = new
            return new


def _rooms(bundle: Mapping[str, float]) -> dict[str, int]:
    """The room for bundles of each machine that may be used, by id, this one first."""
    allowed = read_ray_environment().node_ips
    return {
        node["NodeID"]: _room(node["Resources"], bundle)
        for node in alive_nodes()
        if not allowed or node["NodeManagerAddress"] in allowed
    }


def _room(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """The bundles that a machine has room for when nothing else runs there."""
    return min(int(resources.get(name, 0.0) // amount) for name, amount in bundle.items())


def _too_small(size: int, bundle: Mapping[str, float], room: int) -> InvalidParameter:
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    allowed = f"the machines of the Ray cluster have room for {room} cores of {each} each"
    return InvalidParameter("data_parallel_size", size, allowed)


def new_group(
    name: str,
    bundles: Sequence[Mapping[str, float]],
    nodes: Sequence[str] = (),
    strategy: str = "STRICT_PACK",
) -> Any:
    """A placement group of `bundles` on one of `nodes` (none: any), which gets them later."""
    selector = {NODE_LABEL: f"in({','.join(nodes)})"} if nodes else {}
    return require_ray().util.placement_group(
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        name=name,
        bundle_label_selector=[selector] * len(bundles) if nodes else None,
    )


def initialize_ray_cluster(
    parallel_config: NeedsWorkers,
    ray_address: str | None = None,
    require_gpu_on_driver: bool = True,
) -> Any:
    """Connect to Ray, or start it, and give the workers of a core a placement group.

    That is `parallel_config.placement_group`, if there is one, else the current one of the actor or
    task that calls, else a new one whose first bundle is on this machine. It has one bundle for
    each worker: with a GPU, if the cluster has any, else with a CPU. Returns the group, which
    becomes `parallel_config.placement_group` where that can be set.

    Raises InvalidParameter where Ray cannot be imported or a group has too few bundles,
    RuntimeError (EngineError) where this machine has none of them or they are not there within half
    an hour.
    """
    ray = require_ray()
    connect(ray_address)
    size = parallel_config.world_size
    device = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    group = getattr(parallel_config, "placement_group", None)
    group = group or ray.util.get_current_placement_group()
    if group is not None:
        usable_bundles(group, size, device)
    else:
        here = alive_nodes()[0]
        is_bound = require_gpu_on_driver or device == "CPU"
        if is_bound and not here["Resources"].get(device):
            allowed = f"this machine has no {device} in the Ray cluster"
            raise InvalidParameter("require_gpu_on_driver", require_gpu_on_driver, allowed)
        # every machine has a resource of its own name: a small part of it binds the first bundle to
        # this one
        first = {device: 1.0, f"node:{own_address()}": 0.001} if is_bound else {device: 1.0}
        bundles = [first, *({device: 1.0} for _ in range(size - 1))]
        group = new_group("", bundles, strategy="PACK")
        wait_for_group(group)
    try:
        parallel_config.placement_group = group  # type: ignore[attr-defined]
    except AttributeError:
        logger.debug("The configuration is a plan, which does not change: the group is returned.")
    return group


def usable_bundles(group: Any, size: int, device: str) -> list[int]:
    """The bundles of a placement group for `size` workers, in their order: those that
    QUIRE_RAY_BUNDLE_INDICES names, or the first with a `device`. Raises InvalidParameter.
    """
    given = read_ray_environment().bundle_indices
    amounts = [bundle.get(device, 0.0) for bundle in group.bundle_specs]
    if given is None:
        if any(amount > 1 for amount in amounts) and device == "GPU":
            raise InvalidParameter("placement_group", amounts, "at most one GPU in a bundle")
        given = tuple(place for place, amount in enumerate(amounts) if amount > 0)[:size]
        if len(given) < size:
            allowed = f"{size} workers need {size} bundles with a {device}, and it has {len(given)}"
            raise InvalidParameter("placement_group", group.bundle_specs, allowed)
    elif len(given) != size or max(given) >= len(amounts):
        allowed = f"one bundle of {len(amounts)} for each of {size} workers"
        raise InvalidParameter("QUIRE_RAY_BUNDLE_INDICES", ",".join(map(str, given)), allowed)
    return list(given)


def wait_for_group(group: Any, timeout_s: float = PLACEMENT_S) -> None:
    """Wait until a group has its resources; after `timeout_s` remove it and raise EngineError."""
    ray = require_ray()
    deadline, look_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    ready = group.ready()
    while True:
        left = deadline - time.monotonic()
        done, _ = ray.wait([ready], timeout=max(0.0, min(look_s, left)))
        if done:
            return
        if time.monotonic() >= deadline:
            ray.util.remove_placement_group(group)
            text = f"The Ray cluster did not have {group.bundle_specs} within {timeout_s:g} s."
            raise EngineError(text)
        logger.info("Waiting for %s of the Ray cluster.", group.bundle_specs)
        # each look is a line in the log
        look_s = min(2 * look_s, LONGEST_LOOK_S)
