"""Experts that are distributed over the cores of a group: tokens are sent to the cores with their
experts and the results back.

Where a core has several workers, each has some of the core's experts, and a group with the workers
of its number in the other cores: a token visits the experts of each number by way of the worker
that has that number in its own core. All workers of a core make the same rounds, one for each task
with tokens, whatever becomes of the task.

The cores step in rounds. In a round every core makes one forward pass; a core with nothing to run
only serves its experts. All exchanges of a round take place on every core, even after failures: a
core whose own pass fails keeps serving until the end of the round, and if an expert fails on
another core's rows, these rows are marked as failed. So a pass can be run again, whole or in parts;
each time is a round of its own, in which the other cores serve.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import PeersLost

logger = logging.getLogger(__name__)

RunExpert = Callable[[int, Tensor], Tensor]
"""Runs the local expert with this index on rows [n, C] -> [n, C]."""

LOOK_S = 0.5
"""Interval in which a waiting core calls `while_waiting`, in seconds."""

_ROWS = 1024
"""Rows that an expert computes before its core is seen to have gone on."""

_UNFINISHED, _ENDING = 1, 2


class Group(Protocol):
    """The cores that share experts; see gloo_group.py. Every call is made by all of them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(
        self, values: Sequence[int], while_waiting: Callable[[], None]
    ) -> list[list[int]]: ...
    def all_to_all(
        self,
        sent: Tensor,
        to_each: list[int],
        from_each: list[int],
        while_waiting: Callable[[], None],
    ) -> Tensor: ...


class Rounds(Protocol):
    """The rounds of a core as its loop has them: its own worker's, or those of its ranks."""

    @property
    def num_rounds(self) -> int:
        """Rounds that this core has begun."""
        ...

    is_ending: bool
    """Whether this core is shutting down; `all_end` is set once every core is."""
    all_end: bool
    while_waiting: Callable[[], None]
    """Called repeatedly while this core waits for the others."""

    def idle_round(self, is_unfinished: bool) -> bool:
        """Make a round without rows of this core; False if no core has rows, so none was begun."""
        ...


def shares_of_experts(num_experts: int, num_workers: int) -> list[range]:
    """The experts of each worker of all cores, in the order of the mesh: dp, then tp."""
    bounds = [rank * num_experts // num_workers for rank in range(num_workers + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


class ExpertExchange:
    """One worker's side of the rounds.

    Invariants: between `begin` and `finish` each of `num_layers` layers is passed once, in order;
    after the first PeersLost nothing is exchanged any more.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_experts: int,
        num_layers: int,
        width: int,
        dtype: torch.dtype,
        worker: int = 0,
        num_workers: int = 1,
    ) -> None:
        """`num_layers` with `num_experts` each, for activations [T, width]. `worker`: the number of
        this one among the `num_workers` of its core that share a layer.
        """
        self.num_rounds = 0
        self.is_ending = False
        self.all_end = False
        self.while_waiting: Callable[[], None] = lambda: None
        self.waited_s = 0.0
        """Seconds that this worker has waited for the other cores to begin its rounds."""
        self.note_done: Callable[[], None] = lambda: None
        """Called when an expert has computed some rows: those of other cores may be many more than
        the ones of this worker's own step, by which it would count as hung.
        """
        self.give_up: Callable[[str], None] = lambda reason: None
        """Called when a pass of this worker has failed, before it serves the rest of its round:
        ends the wait of the core's other workers, whose rounds do not end before.
        """
        self._group = group
        self.shares = shares_of_experts(num_experts, group.size * num_workers)
        """The experts of all workers of all cores."""
        self.reached = self.shares[worker::num_workers]
        """The experts of this group by cores, which rows are sent to in this order."""
        self._bounds = [0, *accumulate(map(len, self.reached))]
        self._layers: list[RunExpert] = []
        self._num_layers = num_layers
        self._nothing = torch.empty(0, width, dtype=dtype)
        self._no_counts = [0] * self._bounds[-1]
        self._passed = num_layers
        self._is_broken = False

    @property
    def experts(self) -> range:
        """The experts of this worker."""
        return self.reached[self._group.rank]

    def forget_layers(self) -> None:
        """Remove all experts of this core, so that `add_layer` can add others."""
        self._layers.clear()

    def add_layer(self, run: RunExpert) -> None:
        """Add this core's experts of the next layer."""
        self._layers.append(run)

    # rounds

    def begin(self, is_unfinished: bool) -> bool:
        """Wait for the others and begin a round; False, without a round, if no core has anything
        left to do. Raises PeersLost, as do all methods after this one.
        """
        flags = _UNFINISHED * is_unfinished | _ENDING * self.is_ending
        self.num_rounds += 1
        # with its number: cores in different rounds would give each other rows of different layers
        began = time.monotonic()
        gathered = self._all_gather([self.num_rounds, flags])
        self.waited_s += time.monotonic() - began
        if any(number != self.num_rounds for number, _ in gathered):
            self._is_broken = True
            raise PeersLost(f"The cores are in different rounds: {[n for n, _ in gathered]}.")
        self.all_end = all(found & _ENDING for _, found in gathered)
        goes_on = any(found & _UNFINISHED for _, found in gathered)
        if goes_on:
            self._passed = 0
        return goes_on

    def finish(self) -> None:
        """Serve the remaining layers of the round."""
        while self._passed < self._num_layers and not self._is_broken:
            self._pass(self._nothing, self._no_counts)

    def idle_round(self, is_unfinished: bool) -> bool:
        """Make a round without rows of this core; False if no core has rows, so none was begun."""
        goes_on = self.begin(is_unfinished)
        self.finish()
        return goes_on

    def __call__(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run the next layer's experts on rows [n, C], the first counts[0] of which are for the
        first expert that is reached and so on -> [n, C]. Raises RuntimeError if one failed on them.
        """
        results, failed = self._pass(rows, counts)
        if failed:
            raise RuntimeError(f"the experts of cores {failed} failed on these rows")
        return results

    def _pass(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        """Exchange one layer's rows and results; also returns the ranks that failed on our rows."""
        layer = self._passed
        self._passed += 1
        wanted = self._all_gather(counts)
        bounds, rank = self._bounds, self._group.rank
        # all cores see the same counts, so all leave the exchanges out
        if not any(map(any, wanted)):
            return rows, []
        theirs = [row[bounds[rank] : bounds[rank + 1]] for row in wanted]
        sent = [sum(counts[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        came = [sum(row) for row in theirs]
        arrived = self._all_to_all(rows, sent, came)
        results, failures = self._serve(layer, arrived, theirs)
        # an additional row for each rank reports whether its rows failed
        parts = [
            part
            for found, failed in zip(results.split(came), failures, strict=True)
            for part in (found, found.new_full((1, found.shape[1]), float(failed)))
        ]
        back = self._all_to_all(torch.cat(parts), [n + 1 for n in came], [n + 1 for n in sent])
        found = back.split([n + 1 for n in sent])
        failed_ranks = [rank for rank, part in enumerate(found) if part[-1, 0] != 0]
        return torch.cat([part[:-1] for part in found]), failed_ranks

    # the experts that are here

    def _serve(
        self, layer: int, rows: Tensor, counts: list[list[int]]
    ) -> tuple[Tensor, list[bool]]:
        """Return results for each rank's rows, by rank and expert, and which ranks failed."""
        try:
            return self._run(layer, rows, counts), [False] * len(counts)
        except Exception:
            logger.exception("experts of layer %d failed; each core's rows are tried alone", layer)
        # what fails on rows of one core must not cost the others theirs
        results, failures = torch.zeros_like(rows), [False] * len(counts)
        parts = rows.split([sum(row) for row in counts])
        targets = results.split([sum(row) for row in counts])
        for rank, (part, target) in enumerate(zip(parts, targets, strict=True)):
            try:
                target.copy_(self._run(layer, part, [counts[rank]]))
            except Exception:
                logger.exception("experts of layer %d failed on rows of core %d", layer, rank)
                failures[rank] = True
        return results, failures

    def _run(self, layer: int, rows: Tensor, counts: list[list[int]]) -> Tensor:
        """Run each expert once, on the rows of all ranks: [n, C] -> [n, C]."""
        if not len(rows):
            return rows
        flat = torch.tensor(counts)
        whose = torch.arange(flat.shape[1]).repeat(len(counts))
        order = whose.repeat_interleave(flat.flatten()).argsort(stable=True)
        parts = rows[order].split(flat.sum(0).tolist())
        run = self._layers[layer]
        found: list[Tensor] = []
        for expert, part in enumerate(parts):
            for piece in part.split(_ROWS) if len(part) else ():
                found.append(run(expert, piece))
                self.note_done()
        return torch.empty_like(rows).index_copy_(0, order, torch.cat(found))

    # exchanges

    def _all_gather(self, values: Sequence[int]) -> list[list[int]]:
        try:
            self._require_whole()
            return self._group.all_gather(values, self.while_waiting)
        except PeersLost:
            self._is_broken = True
            raise

    def _all_to_all(self, rows: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        sent = rows.contiguous().view(torch.uint8)
        try:
            self._require_whole()
            found = self._group.all_to_all(sent, to_each, from_each, self.while_waiting)
            return found.view(rows.dtype)
        except PeersLost:
            self._is_broken = True
            raise

    def _require_whole(self) -> None:
        if self._is_broken:
            raise PeersLost("Another core of the group is gone.")
