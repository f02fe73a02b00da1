"""`EnginePlan`: what `resolve()` decided; nothing is automatic and every value has its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from quire.config.adapter_plan import AdapterPlan
from quire.config.hidden_states import HiddenStatesPlan
from quire.config.kv_pool_size import gib
from quire.config.offload import Offload
from quire.config.plan_parts import (
    MediaPlan,
    MemoryPlan,
    ModelPlan,
    ParallelPlan,
    SamplingPlan,
    ServingPlan,
)
from quire.config.profiler_config import ProfilerConfig
from quire.config.speculation import SpeculationPlan
from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.config.views import PlanViews
from quire.models.pooling.spec import PoolerSpec
from quire.scheduling.settings import StepsPlan
from quire.tiers.plan import KVTierPlan


class EnginePlan(PlanViews, msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine is built from, in parts. Frozen; the builder hands each component the
    part that is named after its concern. `model_config` and the like show it by the reference's
    nested names (config/views/).

    `adapters` None: none are served; `speculation` None: no tokens are drafted; `media` None:
    prompts are text alone. `reasons` has an
    entry for every field shown by `explain()`; `notes` are messages for the user.
    """

    model: ModelPlan
    parallel: ParallelPlan
    memory: MemoryPlan
    steps: StepsPlan
    speculation: SpeculationPlan | None
    adapters: AdapterPlan | None
    media: MediaPlan | None
    sampling: SamplingPlan
    serving: ServingPlan
    reasons: dict[str, str]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: dict[str, Any], reasons: dict[str, str], notes: Sequence[str]) -> Self:
        """The plan of values that have names of their own, whatever part they stand in."""
        parts: dict[str, Any] = {
            part: kind(**{f: values[f] for f in kind.__struct_fields__}) for part, kind in PARTS
        }
        whole = {name: values[name] for name in WHOLE}
        return cls(**parts, **whole, reasons=reasons, notes=tuple(notes))

    def changed(self, **values: Any) -> Self:
        """The plan with other values of decisions. Raises KeyError for one that no part has."""
        parts: dict[str, Any] = {}
        for part, kind in PARTS:
            own = {name: values.pop(name) for name in kind.__struct_fields__ if name in values}
            if own:
                parts[part] = msgspec.structs.replace(getattr(self, part), **own)
        if unknown := values.keys() - set(WHOLE):
            raise KeyError(f"no part of a plan has {', '.join(sorted(unknown))}")
        return msgspec.structs.replace(self, **parts, **values)

    def explain(self, width: int = 120) -> str:
        """A table of every decision: name, value, reason."""
        shown = [(name, _short(value), self.reasons[name]) for name, value in self.decided()]
        names, values = (max(len(row[i]) for row in shown) for i in (0, 1))
        indent = " " * (names + values + 4)
        lines = [
            textwrap.fill(
                f"{name:{names}}  {value:{values}}  {reason}",
                width=max(width, len(indent) + 30),
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name, value, reason in shown
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) + "\n"

    def decided(self) -> list[tuple[str, object]]:
        """The fields that are decisions, in order, with their values."""
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        parts = dict(PARTS)
        return [
            found
            for name, value in fields
            if name not in ("reasons", "notes")
            for found in (_fields(value) if name in parts else [(name, value)])
            if found[0] not in NOT_SHOWN
        ]


PARTS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("model", ModelPlan),
    ("parallel", ParallelPlan),
    ("memory", MemoryPlan),
    ("steps", StepsPlan),
    ("sampling", SamplingPlan),
    ("serving", ServingPlan),
)
"""The fields of a plan that are always there and have decisions for fields."""

WHOLE = ("speculation", "adapters", "media")
"""The fields of a plan that are one decision each; None: the engine has no such part."""

NOT_SHOWN = (
    "hf_config", "generates", "pooler_config", "embedding_size", "lowers_input", "prompts",
    "launched", "rank", "ray", "length_buckets",
)  # fmt: skip
"""Fields that are long, or that follow from `pooler`, the model's files or the environment."""


def _fields(part: msgspec.Struct) -> list[tuple[str, object]]:
    return [(name, getattr(part, name)) for name in part.__struct_fields__]


def _short(value: object) -> str:
    """A value in at most 40 characters."""
    if isinstance(value, dict):
        text = " ".join(f"{k}={v}" for k, v in value.items()) or "none"
    elif isinstance(value, PoolerSpec):
        text = f"{value.tasks[0]} by {' and '.join(value.poolings)}"
    elif isinstance(value, SpeculationPlan):
        text = f"{value.method}, up to {value.num_tokens}"
    elif isinstance(value, HiddenStatesPlan):
        text = value.folder
    elif isinstance(value, ProfilerConfig):
        text = value.torch_profiler_dir
    elif isinstance(value, AdapterPlan):
        text = str(value)
    elif isinstance(value, KVTierPlan):
        text = gib(value.host_bytes) + (" and a folder" if value.disk is not None else "")
    elif isinstance(value, Offload):
        text = f"{len(value.layers)} layers"
    elif isinstance(value, StructuredOutputsConfig):
        text = value.backend
    elif isinstance(value, tuple):
        text = " ".join(str(item) for item in value) or "none"
    elif value is None or isinstance(value, bool):
        text = "none" if value is None else "yes" if value else "no"
    else:
        text = str(value)
    text = " ".join(text.split())
    # the end of a path says more than its beginning
    return text if len(text) <= 40 else "..." + text[-37:]
