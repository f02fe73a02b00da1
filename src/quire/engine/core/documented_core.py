"""`EngineCore` as the reference documents it: made from a plan, it is asked by requests' ids."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import msgspec

from quire.config.plan import EnginePlan
from quire.engine.arguments import check_executor_class, require_plan
from quire.engine.core import core
from quire.engine.core.builder import core_parts, open_executor
from quire.engine.counterparts import HasCounterparts
from quire.engine.wire.declared_types import check_message
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import EngineDeadError, InvalidParameter
from quire.lora.request import LoRARequest, check_lora_request
from quire.params import SamplingParams


class DocumentedEngineCore(HasCounterparts, core.EngineCore):
    """A scheduler and an executor for programs that step a core themselves.

    `vllm_config` is the plan, `executor_class` the one that it names, or None. `log_stats` False:
    outputs have no statistics. `executor_fail_callback` is called once when the device has failed.
    Requests are `EngineCoreRequest`s and known by their `request_id`; a parameter that
    `InputProcessor` would have completed (`max_tokens`, `seed`) is completed here.
    """

    def __init__(
        self,
        vllm_config: EnginePlan,
        executor_class: Any = None,
        log_stats: bool = True,
        executor_fail_callback: Callable[[], None] | None = None,
    ) -> None:
        plan = require_plan(vllm_config)
        check_executor_class(executor_class, plan)
        parts = core_parts(plan, open_executor(plan))
        super().__init__(**(parts | {"log_stats": log_stats and plan.serving.log_stats}))
        self.vllm_config = plan
        self._executor_fail_callback = executor_fail_callback

    @property
    def model_executor(self) -> Any:
        """The executor."""
        return self.executor

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[EngineCoreRequest, int]:
        """The request as `add_request` takes it, and its wave, which is 0: nothing is prepared."""
        return request, 0

    def add_request(self, request: EngineCoreRequest, request_wave: int = 0) -> None:
        """Queue a request. Raises InvalidParameter for one without an id, or whose id is in use."""
        name = request.request_id
        if not name or name in self._direct.names.values():
            raise InvalidParameter("request_id", name, "it must be a text that no request has")
        check_message(request)
        params = request.params.clone()
        if isinstance(params, SamplingParams):
            params.limit_output(self.scheduler.config.max_len - len(request.prompt_token_ids))
        super().add_request(msgspec.structs.replace(request, handle=-1, params=params))

    def step(self) -> tuple[dict[int, EngineCoreOutputs], bool]:  # type: ignore[override]
        """Run one step: the outputs by the index of the front end that gets them, which is 0, and
        whether the model was run. ({}, False) where there is nothing to do.
        """
        if not self.has_work:
            return {}, False
        try:
            outputs = super().step()
        except EngineDeadError:
            if self._executor_fail_callback is not None:
                self._executor_fail_callback()
            raise
        was_run = bool(outputs.handles or outputs.started or outputs.parts)
        return {0: outputs}, was_run

    def step_with_batch_queue(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:  # type: ignore[override]
        """The same as `step`, which keeps several steps in flight where the device can."""
        return self.step()

    def post_step(self, model_executed: bool) -> None:
        """Do nothing: `step` takes the drafts, too."""

    def add_lora(self, lora_request: LoRARequest) -> bool:  # type: ignore[override]
        """Read an adapter into host memory. Raises RequestError for one that cannot be used."""
        asked = check_lora_request(lora_request)
        folder = str(asked.folder)
        done: Future[bool] = super().add_lora(
            asked.lora_name, asked.lora_int_id, folder, asked.load_inplace
        )
        while not done.done():
            assert self.adapters is not None, "add_lora refuses engines without adapters"
            self.adapters.wait(0.01)
            for handle, why in self.adapters.poll():
                self._refuse(handle, why)
        return done.result()

    def list_loras(self) -> set[int]:  # type: ignore[override]
        """The ids of the adapters that are in memory."""
        return set(super().list_loras())


EngineCore: TypeAlias = DocumentedEngineCore
