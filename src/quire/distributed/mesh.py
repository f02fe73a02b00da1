"""The place of a worker among those of a model, and of a core among the copies of an engine, and
where workers of several cores meet that share experts.

The order of ranks, slowest to fastest: copies (dp), stages (pp), workers of a stage (tp). Names of
groups are the reference's: logs and errors show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from quire.distributed.gloo_group import GlooGroup
    from quire.distributed.meeting import Meeting

LONGEST_WAIT_S = 330.0
"""Seconds that a core waits for the others of its lock-step group. The front end notices earlier
that one of them is dead, is stopped, or has been in a turn for more than 300 s, and ends them all.
"""

MESH_GROUPS = ("world", "tp", "pp", "dp", "ep")
"""The names of groups: all workers of a core; those that share layers; those that have one part of
each stage; one worker of each copy; those that share experts.
"""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The sizes of an engine: workers that share a stage's layers, stages, and copies."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """The workers of a core."""
        return self.tp * self.pp

    @property
    def sampling_rank(self) -> int:
        """The worker that draws tokens and answers steps: the first one of the last stage."""
        return self.world_size - self.tp

    def place(self, rank: int, core: int = 0) -> MeshPlace:
        """The place of a worker, by its number in its core."""
        assert 0 <= rank < self.world_size and 0 <= core < self.dp
        return MeshPlace(self, core, rank // self.tp, rank % self.tp)


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The place of one worker: its copy, its stage, and its number among those of the stage."""

    mesh: Mesh
    dp_rank: int
    pp_rank: int
    tp_rank: int

    @property
    def rank(self) -> int:
        return self.pp_rank * self.mesh.tp + self.tp_rank

    @property
    def global_rank(self) -> int:
        """The worker's number among those of all copies."""
        return self.dp_rank * self.mesh.world_size + self.rank

    @property
    def is_driver(self) -> bool:
        """Whether it is the first of its stage."""
        return self.tp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether its stage embeds ids."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether its stage has the head."""
        return self.pp_rank == self.mesh.pp - 1

    @property
    def samples(self) -> bool:
        """Whether it draws tokens and answers steps."""
        return self.rank == self.mesh.sampling_rank

    def group(self, name: str) -> list[int]:
        """The global ranks of its group of this name, in their order. Raises KeyError for a name
        that is not one of MESH_GROUPS.
        """
        mesh = self.mesh
        first = self.dp_rank * mesh.world_size
        stage = range(self.pp_rank * mesh.tp, (self.pp_rank + 1) * mesh.tp)
        return {
            "world": [first + rank for rank in range(mesh.world_size)],
            "tp": [first + rank for rank in stage],
            "pp": [first + pp * mesh.tp + self.tp_rank for pp in range(mesh.pp)],
            "dp": [dp * mesh.world_size + self.rank for dp in range(mesh.dp)],
            "ep": [dp * mesh.world_size + rank for dp in range(mesh.dp) for rank in stage],
        }[name]


class ExpertsPlace(msgspec.Struct, frozen=True):
    """The meeting place of the `num_cores` cores that share experts, as number `core` of them knows
    it: the store at `address` (host:port) or, where all are on one machine, files in `folder`. Each
    life of the cores has a `name` of its own.
    """

    name: str
    core: int
    num_cores: int
    address: str | None = None
    folder: str | None = None

    def open_group(self, worker: int = 0, listener_fd: int | None = None) -> GlooGroup:
        """Wait for the worker of this number in each core. Raises PeersLost where some do not come.
        `listener_fd`: see `meeting`.
        """
        from quire.distributed.gloo_group import GlooGroup  # imports that few processes need

        if self.address is not None:
            return self.meeting(worker, listener_fd).open_gloo()
        assert self.folder is not None, "they are on the front end's machine"
        file = Path(self.folder) / f"{self.name}-{worker}"
        return GlooGroup.of_file(file, self.core, self.num_cores, LONGEST_WAIT_S)

    def meeting(self, worker: int, listener_fd: int | None) -> Meeting:
        """The meeting at the store. This process opens the store on the listening socket
        `listener_fd`, for as long as it keeps the meeting; None: another process does.
        """
        from quire.distributed.meeting import Meeting

        assert self.address is not None, "there is a store"
        host, port = self.address.rsplit(":", 1)
        return Meeting.at(
            *(host, int(port), f"{self.name}-{worker}", self.core, self.num_cores),
            is_host=listener_fd is not None,
            listener_fd=listener_fd,
            timeout_s=LONGEST_WAIT_S,
        )


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The layers of each stage: equal shares, and what is left goes to the stages before the last,
    one each, the later ones first. The last stage never gets one: it has the head.
    """
    each, left = divmod(num_layers, num_stages)
    sizes = [each] * num_stages
    for place in range(left):
        sizes[num_stages - 2 - place] += 1
    return tuple(sizes)
