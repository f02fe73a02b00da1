"""LoRA adapters that an engine serves: their number, their size, and where they are kept."""

from __future__ import annotations

import msgspec


class AdapterPlan(msgspec.Struct, frozen=True):
    """The adapters of an engine that has them enabled.

    `max_loras` slots in the memory of the model hold what one step can compute with;
    `max_cpu_loras` adapters, those in slots among them, are kept in the memory of the host.
    `lora_dtype` is the name of a torch dtype: that of a and b. `target_modules`: the only modules
    that may be changed, by the end of their names; None: all that support it.
    """

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dtype: str
    target_modules: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.max_loras} of rank {self.max_lora_rank} in {self.lora_dtype}"


def num_slots(adapters: AdapterPlan | None) -> int:
    """The adapters that a step can compute with."""
    return 0 if adapters is None else adapters.max_loras
