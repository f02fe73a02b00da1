"""The connections of a rank to its core and to the other ranks: descriptors that it inherits, or
sockets that it opens itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.distributed.meeting import Meeting
from quire.distributed.mesh import MeshPlace
from quire.distributed.peer_sockets import call
from quire.distributed.shared_group import SharedGroup
from quire.distributed.worker_group import RankGroup
from quire.errors import EngineDeadError
from quire.executor.ranks.board import SIGNS, RankBoard
from quire.executor.ranks.link import RankLink
from quire.executor.ranks.messages import DistantRank, RankStart
from quire.executor.ranks.stage_links import StageLinks

_CONNECT_S = 60.0


class SignsOfLife(Protocol):
    """Signs of a rank's life for its core; any thread gives them."""

    def beat(self) -> None:
        """State that the process runs."""
        ...

    def note_done(self) -> None:
        """State that a task has ended."""
        ...


@dataclass(frozen=True, slots=True)
class RankWiring:
    """The connections of a rank. `aside`: for calls aside of steps. `group`: the workers of its
    stage; None: it has the stage alone. `rejoin(n)` makes the group usable again after n aborts.
    """

    link: RankLink
    aside: RankLink
    stages: StageLinks
    group: RankGroup | None
    rejoin: Callable[[int], None]

    def close(self) -> None:
        self.link.close()
        self.aside.close()
        self.stages.close()


class BoardSigns:
    """Signs on a board that the rank shares with its core."""

    def __init__(self, board: RankBoard, rank: int) -> None:
        self._board, self._rank = board, rank

    def beat(self) -> None:
        self._board.beat(self._rank)

    def note_done(self) -> None:
        self._board.note_done(self._rank)


class SentSigns:
    """Signs that are sent with each beat. Invariant: the numbers never fall."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._num_beats = self._num_done = 0

    def beat(self) -> None:
        """As `SignsOfLife.beat`. Raises EngineDeadError when the core is gone."""
        self._num_beats += 1
        try:
            self.connection.sendall(SIGNS.pack(self._num_beats, self._num_done))
        except OSError as error:
            raise EngineDeadError("The core of this rank is gone.") from error

    def note_done(self) -> None:
        self._num_done += 1


def open_signs(start: RankStart) -> SignsOfLife:
    """The channel of a rank's signs. Raises PeersLost where the core is not reached."""
    if start.distant is not None:
        return SentSigns(call(start.distant.signs, _CONNECT_S))
    return BoardSigns(RankBoard(start.board, start.mesh.world_size), start.rank)


def open_wiring(start: RankStart, place: MeshPlace, dtype: torch.dtype, device: str) -> RankWiring:
    """Connect a rank to its core and the other ranks, which may have to be waited for. Raises
    PeersLost where one of them is not reached.
    """
    if start.distant is not None:
        return _met(start.distant, place, dtype, device)
    group = SharedGroup(start.exchange, place.tp_rank) if place.mesh.tp > 1 else None
    link, aside = _inherited(start.link), _inherited(start.aside)
    assert link is not None and aside is not None, "every rank has these to its core"
    stages = StageLinks(_inherited(start.before), _inherited(start.after), dtype)
    return RankWiring(link, aside, stages, group, lambda number: None)


def _inherited(fd: int) -> RankLink | None:
    if fd < 0:
        return None
    found = socket.socket(fileno=fd)
    # a program that this rank starts would keep the link open after the rank's end
    found.set_inheritable(False)
    return RankLink(found)


def _met(distant: DistantRank, place: MeshPlace, dtype: torch.dtype, device: str) -> RankWiring:
    link = RankLink(call(distant.link, _CONNECT_S))
    aside = RankLink(call(distant.aside, _CONNECT_S))
    mesh = place.mesh
    meeting = Meeting.at(
        distant.address, distant.port, "world", place.rank, mesh.world_size, is_host=False
    )
    stages = open_stages(meeting, place, dtype)
    if mesh.tp == 1:
        return RankWiring(link, aside, stages, None, lambda number: None)
    opened = meeting.among(f"tp {place.pp_rank}", place.group("tp")).open_group(device)
    return RankWiring(link, aside, stages, opened.group, opened.rejoin)


def open_stages(meeting: Meeting, place: MeshPlace, dtype: torch.dtype) -> StageLinks:
    """Connect a rank to those with its number in the stages before and after."""
    tp = place.mesh.tp
    to = None if place.is_last_stage else place.rank + tp
    after, before = meeting.connect(to, None if place.is_first_stage else place.rank - tp)
    return StageLinks(
        None if before is None else RankLink(before),
        None if after is None else RankLink(after),
        dtype,
    )
