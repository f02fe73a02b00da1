"""What `resolve()` knows about the model and about the machine: numbers, gathered elsewhere.

Gathering reads files and asks the operating system (`quire.engine.facts`); these values can also be
written by hand, which is how the decisions are tested for machines that nobody has at hand.
"""

from __future__ import annotations

from typing import Any

import msgspec


class KVGroupFacts(msgspec.Struct, frozen=True):
    """One group of layers that share block ids. `window` in tokens, None: the whole context."""

    kind: str
    window: int | None
    num_layers: int


class ModelLength(msgspec.Struct, frozen=True):
    """How long a model's contexts may get: at most `limit` tokens, `default` unless asked; None
    when nothing says.
    """

    limit: int | None
    default: int | None
    source: str


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, in numbers.

    `kv_values_per_token`: elements of K and V that one token takes in one group, which is the same
    for all groups, and `kv_vectors_per_token` how many keys and values of a head they are.
    `num_experts` of a layer, 0 in a dense model; `num_expert_parameters` of those of all layers
    together. `widest`: elements of the widest activation of one
    token, for the workspace.
    """

    name: str
    folder: str
    tokenizer_folder: str | None
    architecture: str
    model_type: str
    checkpoint_dtype: str
    hf_config: dict[str, Any]
    num_parameters: int
    num_layers: int
    hidden_size: int
    widest: int
    num_experts: int = 0
    num_expert_parameters: int = 0
    vocab_size: int
    kv_groups: tuple[KVGroupFacts, ...]
    kv_values_per_token: int
    kv_vectors_per_token: int
    length: ModelLength
    generation_config: dict[str, Any] = {}
    generation_config_source: str = ""
    chat_template: str | None = None
    chat_template_source: str = ""


class GpuFacts(msgspec.Struct, frozen=True):
    """An NVIDIA GPU; `free_memory_bytes` as it is now."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    total_memory_bytes: int
    free_memory_bytes: int

    @property
    def has_fp8(self) -> bool:
        """Whether it has instructions that widen and multiply 8-bit floats (e4m3): Ada, Hopper and
        later.
        """
        return self.capability >= (8, 9)


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as this process may use it.

    `num_cores`: physical cores that the process may run on (affinity and container quota counted).
    `free_memory_bytes`: what can be taken now without swapping, inside the container's limit.
    `thread_limit`: set by the environment. `features`: names of CPU features that change a
    decision, such as avx512_bf16. `gpu_missing`: why there is no `gpu`. `torch_cuda`: the CUDA
    release that torch is built for. `device`: where an engine runs, whose memory is then the one
    meant here (config/resolve_device.py).
    """

    cpu_name: str
    num_cpus: int
    num_cores: int
    features: tuple[str, ...]
    total_memory_bytes: int
    free_memory_bytes: int
    memory_limit_source: str = "the machine"
    thread_limit: int | None = None
    device: str = "cpu"
    gpu: GpuFacts | None = None
    gpu_missing: str = "none was looked for"
    torch_cuda: str | None = None

    @property
    def has_fast_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16 in hardware."""
        if self.device == "cuda":
            return True
        return not {"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"}.isdisjoint(self.features)

    @property
    def has_fast_float16(self) -> bool:
        """Whether the device multiplies float16 in hardware."""
        if self.device == "cuda":
            return True
        return not {"avx512_fp16", "amx_fp16", "asimdhp"}.isdisjoint(self.features)
