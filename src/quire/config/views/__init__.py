"""The plan by the nested names of the reference: `vllm_config.model_config.max_model_len`.

A view reads the plan each time and holds nothing of its own, so that every fact stays in one place.
What a view lacks, and what is assigned to one, is an AttributeError that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.adapter_plan import AdapterPlan
from quire.config.views.engine import (
    CacheView,
    DeviceView,
    LoadView,
    ObservabilityView,
    ParallelView,
    SchedulerView,
    SpeculativeView,
)

if TYPE_CHECKING:
    from quire.config.profiler_config import ProfilerConfig
    from quire.config.structured_outputs_config import StructuredOutputsConfig
    from quire.config.views.model import ModelView
    from quire.tiers.kv_events_config import KVEventsConfig, KVEventsPlan
    from quire.tiers.kv_transfer_config import KVTransferConfig


class PlanViews:
    """The views of `EnginePlan`, which inherits them."""

    __slots__ = ()

    if not TYPE_CHECKING:  # or every name would be one that the plan has

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"vllm_config has no {name!r}: a plan has parts, and explain() shows their fields.",
                name=name,
                obj=self,
            )

    @property
    def model_config(self) -> ModelView:
        """The model: its names, sizes and types."""
        from quire.config.views.model import ModelView  # reads descriptions of models

        return ModelView(self)

    @property
    def cache_config(self) -> CacheView:
        """The KV cache."""
        return CacheView(self)

    @property
    def parallel_config(self) -> ParallelView:
        """Number and place of cores and workers."""
        return ParallelView(self)

    @property
    def scheduler_config(self) -> SchedulerView:
        """Bounds of a step."""
        return SchedulerView(self)

    @property
    def device_config(self) -> DeviceView:
        """The device that computes."""
        return DeviceView(self)

    @property
    def load_config(self) -> LoadView:
        """Source of the weights."""
        return LoadView(self)

    @property
    def observability_config(self) -> ObservabilityView:
        """Destination of traces."""
        return ObservabilityView(self)

    @property
    def lora_config(self) -> AdapterPlan | None:
        """Settings of LoRA adapters; None: they are not served."""
        plan: Any = self
        adapters: AdapterPlan | None = plan.adapters
        return adapters

    @property
    def speculative_config(self) -> SpeculativeView | None:
        """Source of draft tokens; None: there are none."""
        plan: Any = self
        return None if plan.speculation is None else SpeculativeView(self)

    @property
    def structured_outputs_config(self) -> StructuredOutputsConfig:
        """Settings of structured outputs."""
        plan: Any = self
        found: StructuredOutputsConfig = plan.sampling.structured_outputs
        return found

    @property
    def profiler_config(self) -> ProfilerConfig | None:
        """Scope of `start_profile`; None: nothing can be profiled."""
        plan: Any = self
        found: ProfilerConfig | None = plan.parallel.profiler
        return found

    @property
    def kv_transfer_config(self) -> KVTransferConfig | None:
        """The connector of K/V; None: there is none."""
        plan: Any = self
        found: KVTransferConfig | None = plan.memory.kv_connector
        return found

    @property
    def kv_events_config(self) -> KVEventsConfig | None:
        """The settings of events of the KV cache; None: they are not published."""
        plan: Any = self
        events: KVEventsPlan | None = plan.memory.kv_events
        return None if events is None else events.config
