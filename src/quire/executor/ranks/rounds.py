"""The rounds of cores that share experts: a worker's side, and that of a core of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.distributed.expert_exchange import ExpertExchange, Group
from quire.executor.worker_config import WorkerConfig
from quire.models import read_spec
from quire.models.spec import PipelineStage

if TYPE_CHECKING:
    from quire.executor.ranks.multiproc import MultiprocExecutor


def exchange_of(
    config: WorkerConfig, group: Group, worker: int = 0, stage: PipelineStage | None = None
) -> ExpertExchange:
    """Make a worker's side of the rounds. `worker`: its number in its stage; `group`: the workers
    of this number in all cores; `stage` None: it has all layers.
    """
    decoder = read_spec(config.model.hf_config)
    blocks = decoder.blocks if stage is None else decoder.blocks[stage.first : stage.last]
    # of the whole model: a stage may have no mixture
    first = next(block.experts for block in decoder.blocks if block.experts is not None)
    return ExpertExchange(
        group,
        num_experts=first.experts,
        num_layers=sum(block.experts is not None for block in blocks),
        width=first.latent or decoder.dim,
        dtype=config.torch_dtype,
        worker=worker,
        num_workers=config.parallel.mesh.tp,
    )


class RoundsOfRanks:
    """The rounds that the ranks of a core make, all of them alike: one for each step with tokens
    that they are given, and one for each call of `idle_round`. As `Rounds`.
    """

    def __init__(self, executor: MultiprocExecutor) -> None:
        self.is_ending = self.all_end = False
        self._executor = executor
        self._num_idle = 0

    @property
    def num_rounds(self) -> int:
        return self._executor.num_steps + self._num_idle

    @property
    def while_waiting(self) -> Callable[[], None]:
        return self._executor.while_waiting or (lambda: None)

    @while_waiting.setter
    def while_waiting(self, function: Callable[[], None]) -> None:
        self._executor.while_waiting = function

    def idle_round(self, is_unfinished: bool) -> bool:
        """As `Rounds.idle_round`. Raises PeersLost."""
        self._num_idle += 1
        found = self._executor.idle_round(is_unfinished, self.is_ending)
        # each rank meets those of its number in the other cores, and all of a core say the same
        assert all(each == found[0] for each in found), "the ranks of a core are in one round"
        goes_on, self.all_end = found[0]
        return goes_on
