"""The documented names that this release does not implement, with the values at which they change
nothing.

A call that was written for the reference engine passes these names at such values; it works here.
Any other value is refused by name. When a feature is built, its name moves from here to
`EngineArgs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.args.foreign_defaults import ForeignArgs
from quire.config.args.option import unbuilt

_ONE_CONTEXT = "Each worker has the whole context; tensor_parallel_size shares the heads."
_LANGUAGE_ONLY = "Adapters change the language model alone; leave it out."
_NO_MODEL_CODE = "Quire never runs code from a model folder; leave it out."
_SERVER = "It is for servers: give it to `quire serve`."
_NO_COMPILER = (
    "Steps are recorded or captured at start, whatever is given; enforce_eager=True turns it off."
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class UnbuiltArgs(ForeignArgs):
    """Names of `EngineArgs` that are accepted at their neutral value only; `resolve()` checks."""

    # Model
    trust_remote_code: bool = unbuilt(
        False, "leave to run code of the model folder, which is never needed", _NO_MODEL_CODE, True
    )
    code_revision: str | None = unbuilt(None, "revision of that code", _NO_MODEL_CODE)
    enable_sleep_mode: bool = unbuilt(
        False,
        "give device memory back while asleep",
        "sleep() needs no preparation here: True and False are the same.",
        True,
    )
    return_sampling_mask: bool = unbuilt(
        False, "return the tokens that sampling left possible", "Ask for logprobs instead."
    )
    config_format: str = unbuilt(
        "auto", "who wrote config.json", "It is found: Mistral's files and Hugging Face's.", "hf"
    )
    hf_config_path: str | None = unbuilt(
        None, "folder of config.json", "Use hf_overrides to change config.json."
    )
    disable_sliding_window: bool = unbuilt(
        False, "cut the context to the window", "Give max_model_len instead."
    )
    disable_cascade_attn: bool = unbuilt(
        False, "read shared prefixes per request", "There is no other way: leave it out.", True
    )
    # Files
    use_tqdm_on_load: bool = unbuilt(
        True, "show a bar while weights are loaded", "There is no bar: leave it out.", False
    )
    model_loader_extra_config: dict[str, Any] | None = unbuilt(
        {}, "options of one loader", "The load formats have none.", None
    )
    safetensors_load_strategy: str | None = unbuilt(
        None, "how safetensors files are read", "They are mapped into memory.", "lazy"
    )
    max_parallel_loading_workers: int | None = unbuilt(
        None, "workers that load at a time", "Workers load at the same time: leave it out."
    )
    # Memory
    kv_sharing_fast_prefill: bool = unbuilt(
        False, "skip layers that share K/V in prefill", "Leave it out."
    )
    prefix_caching_hash_algo: str = unbuilt(
        "sha256",
        "hash of the block keys",
        "Block keys are SHA-256, which cannot be made to collide.",
        "sha256_cbor",
        only_tunes=True,
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    )
    # Scheduler
    disable_hybrid_kv_cache_manager: bool | None = unbuilt(
        None, "treat all layers as one KV group", "Sliding-window layers free their blocks.", False
    )
    disable_chunked_mm_input: bool = unbuilt(
        False, "keep media in one step", "Leave it out: answers are the same in chunks.", True
    )
    # Parallel and distributed
    disable_custom_all_reduce: bool = unbuilt(False, "no own all-reduce", "Leave it out.", True)
    decode_context_parallel_size: int = unbuilt(1, "devices per context in decodes", _ONE_CONTEXT)
    prefill_context_parallel_size: int = unbuilt(1, "devices per context in prefills", _ONE_CONTEXT)
    enable_eplb: bool = unbuilt(
        False, "move experts by their load", "enable_expert_parallel spreads experts evenly."
    )
    # LoRA
    fully_sharded_loras: bool = unbuilt(False, "split adapters between devices", "Leave it out.")
    default_mm_loras: dict[str, str] | None = unbuilt(None, "adapters by media", _LANGUAGE_ONLY, {})
    enable_tower_connector_lora: bool = unbuilt(False, "adapters of encoders", _LANGUAGE_ONLY)
    specialize_active_lora: bool = unbuilt(
        False, "graphs by the number of adapters", "Steps without adapters have their own already."
    )
    enable_mixed_moe_lora_format: bool = unbuilt(
        False, "several stored forms of experts", "Each model has the form that docs/lora.md names."
    )
    enable_moe_shared_loras: bool = unbuilt(
        False, "one adapter for all experts", "Give each expert its own."
    )
    max_lora_cls_labels: int | None = unbuilt(
        None, "most labels of an adapter's head", "It has as many as the model's own."
    )
    # Media
    skip_mm_profiling: bool = unbuilt(
        False,
        "measure no media at start",
        "Rows of encoders have memory of their own, which is known without: True and False are "
        "the same.",
        True,
    )
    mm_encoder_tp_mode: str = unbuilt("weights", "how the encoder is split", "Leave it out.")
    # Compilation, kernels
    compilation_config: Any = unbuilt(
        None,
        "compilation and graphs",
        _NO_COMPILER,
        *range(4),
        {},
        *({"mode": mode} for mode in range(4)),
        flags=("-cc",),
        only_tunes=True,
    )
    optimization_level: int | None = unbuilt(
        None,
        "how much is compiled at start",
        _NO_COMPILER,
        *range(4),
        flags=("-O",),
        only_tunes=True,
    )
    cudagraph_capture_sizes: list[int] | None = unbuilt(
        None, "sizes of graphs", _NO_COMPILER, [], only_tunes=True
    )
    max_cudagraph_capture_size: int | None = unbuilt(
        None, "largest graph", _NO_COMPILER, 0, only_tunes=True
    )
    attention_backend: str | None = unbuilt(
        None,
        "library of the attention",
        "The provider is chosen by what it supports.",
        only_tunes=True,
    )
    attention_config: dict[str, Any] | None = unbuilt(
        None,
        "settings of the attention",
        "The provider is chosen by what it supports.",
        {},
        flags=("-ac",),
        only_tunes=True,
    )
    renderer_num_workers: int = unbuilt(
        1,
        "threads that render prompts",
        "Prompts are rendered in the API server: --api-server-count.",
    )
    # Transfer, observation
    additional_config: dict[str, Any] | None = unbuilt(
        {}, "options of other platforms", "It belongs to other platforms: leave it out.", None
    )
    reasoning_parser: str | None = unbuilt(
        None,
        "split reasoning from the answer",
        "Split the text after generation; structured_outputs_config={'reasoning_parser': ...} has "
        "forms begin after a reasoning.",
        "",
    )
    enable_trace_replay: bool = unbuilt(
        False,
        "let requests give their output",
        "Requests may do so in any case: SamplingParams.trace_decode_token_ids.",
        only_tunes=True,
    )
    shutdown_timeout: int = unbuilt(0, "seconds to drain", _SERVER)
    fail_on_environ_validation: bool = unbuilt(
        False, "refuse unknown environment variables", "`quire doctor` lists unknown ones."
    )
    tokens_only: bool = unbuilt(False, "serve token ids only", _SERVER)
