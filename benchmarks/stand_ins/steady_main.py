"""The program of a core process whose model costs nothing: all of the engine but the runner.

The scheduler, the sockets and the journal are the real ones; every row that samples gets the next
of some random ids. What is left is what the engine itself costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from quire.config.plan import EnginePlan
from quire.engine.core.core import EngineCore
from quire.engine.process.core_main import core_program
from quire.params import RequestParams
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import SchedulerConfig
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan
from quire.step.result import StepResult

_NUM_IDS = 4096


class SteadyStep:
    """A step that has run already."""

    def __init__(self, step_id: int, token_ids: list[int]) -> None:
        self._result = StepResult(step_id, token_ids)

    def sample(self, mask: GrammarMask | None = None) -> None:
        """The ids are there."""

    def drafts(self, row: int, count: int) -> list[int]:
        """There are none."""
        return []

    def result(self) -> RunnerOutput:
        """They are these."""
        return RunnerOutput(self._result)


class SteadyExecutor:
    """Gives ids below 256 to every row that samples."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self._ids = [draw.randrange(256) for _ in range(2 * _NUM_IDS)]

    def launch(self, plan: StepPlan) -> SteadyStep:
        """Run a plan."""
        start = plan.step_id * 31 % _NUM_IDS
        return SteadyStep(plan.step_id, self._ids[start : start + len(plan.sampled_rows)])

    def needs_host_ids(self, params: RequestParams) -> bool:
        """Nothing is scheduled ahead."""
        return False

    def read_adapter(self, folder: str) -> int:
        """There is no model to adapt."""
        raise NotImplementedError

    def check_adapter(self, folder: str) -> None:
        """There is no model to adapt."""
        raise NotImplementedError

    def drop_adapter(self, number: int) -> None:
        """There is none."""

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """There is no worker."""
        return []

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """There is no worker to lose."""

    def shutdown(self) -> None:
        """Do nothing: there is no memory to release."""


def build_steady_core(plan: EnginePlan, *, group: object = None) -> EngineCore:
    """A core with the plan's scheduler and no model."""
    assert group is None, "there are no experts"
    config = SchedulerConfig(
        steps=plan.steps,
        max_len=plan.model.max_model_len,
        key_size=plan.memory.block_size,
        num_blocks=plan.memory.num_blocks,
        shares_blocks=plan.memory.enable_prefix_caching,
    )
    return EngineCore(Scheduler(config), SteadyExecutor(), log_stats=plan.serving.log_stats)


PROGRAM = core_program(build_steady_core)
