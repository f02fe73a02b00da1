"""The attributes and methods by which programs look into an engine, the same for both faces."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.plan import EnginePlan
from quire.engine.counterparts import HasCounterparts
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.output_processor import OutputProcessor
from quire.errors import EngineError
from quire.observability.metrics import Metric
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.config.views.model import ModelView


class EngineAttributes(HasCounterparts):
    """Attributes of `LLMEngine` and `AsyncLLM` that name their parts."""

    front_end: FrontEnd[Any]
    _is_logging: bool

    @property
    def vllm_config(self) -> EnginePlan:
        """The engine's plan, with its present cores. Raises EngineError where it has none."""
        plan = self.front_end.plan
        if plan is None:
            raise EngineError("The engine was made without a plan.")
        return plan

    def _note_cores(self) -> None:
        plan = self.front_end.plan
        if plan is None:
            return
        indices = sorted(self.front_end.client.engine_indices)
        old = plan.parallel
        here = (i for i in indices if i in old.data_parallel_ranks or i >= old.data_parallel_size)
        self.front_end.plan = plan.changed(
            data_parallel_size=len(indices), data_parallel_ranks=tuple(here)
        )

    @property
    def model_config(self) -> ModelView:
        """The part of the plan about the model."""
        return self.vllm_config.model_config

    @property
    def log_stats(self) -> bool:
        """Whether statistics are logged, and `get_metrics()` has them."""
        return self._is_logging

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when the engine was made without one."""
        return self.front_end.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError when the engine was made without one."""
        return self.front_end.require_tokenizer()

    def get_num_unfinished_requests(self) -> int:
        """The number of unfinished completions (a request with n=3 counts three times)."""
        return self.front_end.outputs.num_unfinished

    def get_metrics(self) -> list[Metric]:
        """Totals since the start, and the queues. Raises EngineError when statistics are off."""
        if not self._is_logging:
            raise EngineError("Statistics are off: make the engine with disable_log_stats=False.")
        return self.front_end.stats.metrics()

    @property
    def input_processor(self) -> InputProcessor:
        """Checks and completes requests."""
        return self.front_end.inputs

    @property
    def output_processor(self) -> OutputProcessor:
        """Makes outputs of the core's steps."""
        return self.front_end.outputs

    @property
    def engine_core(self) -> Any:
        """The client of the cores."""
        return self.front_end.client

    @property
    def io_processor(self) -> None:
        """Always None: plugins process data in `LLM.encode` and in a server's /pooling."""

    @property
    def renderer(self) -> NoReturn:
        """Raise AttributeError: prompts are rendered by functions."""
        raise AttributeError(
            "There is no renderer: use engine.get_tokenizer() and its apply_chat_template, "
            "LLM.chat, or input_processor.process_inputs.",
            name="renderer",
            obj=self,
        )

    def __del__(self) -> None:
        """End the cores of an engine that nothing refers to any more."""
        # an engine whose start has failed has no front end; while the interpreter ends, the modules
        # that a shutdown needs may be gone
        if "front_end" in vars(self) and not sys.is_finalizing():
            self.front_end.shutdown()
