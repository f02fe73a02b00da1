"""The place of this process in a Ray cluster. Ray is not imported, and nothing is started."""

from __future__ import annotations

import sys

import msgspec


class RayPlace(msgspec.Struct, frozen=True):
    """The cluster that the process which makes a plan is connected to, and the placement group that
    it is in, by its number; "": none.
    """

    address: str = ""
    group: str = ""


def current_place() -> RayPlace:
    """The place of this process."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return RayPlace()
    group = ray.util.get_current_placement_group()
    address = ray.get_runtime_context().gcs_address
    return RayPlace(address, "" if group is None else group.id.hex())
