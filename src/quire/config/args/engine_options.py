"""The options of an engine: `EngineOptions`, one flat declaration with the field's names.

Each field carries its type, default, unit and one sentence. The command line (`add_cli_args`), the
checks and `docs/engine_args.md` are made from it. The names that are documented but not built are
in `unbuilt_args.py`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from quire.config.args.command_line import add_options
from quire.config.args.option import Kind, option
from quire.config.args.unbuilt_args import UnbuiltArgs
from quire.errors import UnknownParameter

_MODEL, _LOAD, _MEMORY, _SCHEDULE = "Model", "Loading", "Memory", "Scheduling"
_TOKENS, SAMPLING_AND_OUTPUT = "Tokenizer and prompts", "Sampling and output"


@dataclass
class EngineOptions(UnbuiltArgs):
    """The fields of `EngineArgs` (engine_args.py), as `resolve()` reads them."""

    serves_several_callers: ClassVar[bool] = False
    """Whether steps are kept short, so that no stream waits long for another one's prompt."""

    model: str | None = option(
        None,
        "Folder or hub id of the model; None is the small model inside the package.",
        Kind.TEXT,
        _MODEL,
    )
    served_model_name: str | list[str] | None = option(
        None,
        "Names that the model answers to; the first is reported. None: `model`.",
        Kind.NAMES,
        _MODEL,
    )
    dtype: str = option(
        "auto",
        "Type of weights, activations and K/V; auto is the checkpoint's where the CPU suits it.",
        Kind.TEXT,
        _MODEL,
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = option(
        None,
        "Round the weights while loading: int8 (one scale per output) or int4 (one per 32 inputs; "
        "int4_g64 and int4_g128: per 64, 128). Activations are then int8 in products, unless the "
        "name ends with weight_only, which is slower. fp8: e4m3, one scale per output, activations "
        "too; on GPUs. None keeps `dtype`.",
        Kind.TEXT,
        _MODEL,
        choices=(
            "fp8",
            "int8",
            "int4",
            "int4_g64",
            "int4_g128",
            "int8_weight_only",
            "int4_weight_only",
        ),
        hint="Use 'int8' or 'int4', which round any checkpoint while it is loaded.",
    )
    seed: int = option(
        0,
        "Start of the seeds of requests that bring none.",
        Kind.INTEGER,
        _MODEL,
        minimum=-(2**63),
        maximum=2**63 - 1,
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt and output together; None is the model's own limit, -1 (`auto` on the "
        "command line) the longest that fits in memory.",
        Kind.SIZE,
        _MODEL,
        unit="tokens",
        minimum=-1,
        hint="Use None, -1 or a length of at least 1.",
    )
    revision: str | None = option(None, "Branch, tag or commit on the hub.", Kind.TEXT, _MODEL)
    hf_token: str | bool | None = option(
        None, "Access token for the hub; True takes the stored one.", Kind.TOKEN, _MODEL
    )
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] | None = option(
        {},
        "Changes to config.json before it is read; nested dicts are merged.",
        Kind.OVERRIDES,
        _MODEL,
        is_optional=True,
    )
    device: str = option(
        "auto",
        "Where the engine runs: cpu, cuda, or auto: on an NVIDIA GPU that can be used, else on the "
        "CPU.",
        Kind.TEXT,
        _MODEL,
        choices=("auto", "cpu", "cuda"),
    )
    deterministic: bool = option(
        False,
        "The same bits for a request whatever else is in its steps: on a GPU with kernels of fixed "
        "shapes, which are slower; on a CPU the native kernels do that anyway.",
        Kind.FLAG,
        _MODEL,
    )
    enforce_eager: bool = option(
        False,
        "Run every step without a recorded program.",
        Kind.FLAG,
        _MODEL,
    )
    load_format: str = option(
        "auto",
        "Where weights come from: safetensors files (auto, safetensors) or chance (dummy).",
        Kind.TEXT,
        _LOAD,
        choices=("auto", "safetensors", "dummy"),
        hint="Convert other formats to safetensors first.",
    )
    download_dir: str | None = option(
        None, "Folder for downloads; None is the cache of huggingface_hub.", Kind.TEXT, _LOAD
    )
    tokenizer: str | None = option(
        None, "Folder or hub id of the tokenizer; None: the model's own.", Kind.TEXT, _TOKENS
    )
    tokenizer_mode: str = option(
        "auto",
        "Which tokenizer files are read; both values read the Hugging Face ones.",
        Kind.TEXT,
        _TOKENS,
        choices=("auto", "hf"),
        hint="Other tokenizer formats are not built: provide a tokenizer.json.",
    )
    tokenizer_revision: str | None = option(
        None,
        "Branch, tag or commit of the tokenizer on the hub; None: `revision`.",
        Kind.TEXT,
        _TOKENS,
    )
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts and outputs are token ids.", Kind.FLAG, _TOKENS
    )
    chat_template: str | None = option(
        None,
        "Jinja chat template: a file, or the text itself. None: the tokenizer's.",
        Kind.TEXT,
        _TOKENS,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the memory that is free now for weights, workspace and KV cache, on a CPU too. "
        "None: the KV cache gets half of what weights and workspace leave; on a GPU, 0.9.",
        Kind.NUMBER,
        _MEMORY,
        above=0,
        maximum=1,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache; overrides gpu_memory_utilization.",
        Kind.SIZE,
        _MEMORY,
        unit="bytes",
        minimum=1,
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "Blocks of the pool that all KV groups share; overrides every other size of the KV cache.",
        Kind.INTEGER,
        _MEMORY,
        unit="blocks",
        minimum=2,
        hint="One block is never handed out, so that 2 is the smallest pool.",
    )
    block_size: int | None = option(
        None,
        "Tokens in one block of K/V; None: 32.",
        Kind.INTEGER,
        _MEMORY,
        unit="tokens",
        minimum=1,
        maximum=4096,
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of K/V in memory: auto is `dtype`; int8 rounds each key and value of a head to whole "
        "numbers with a scale of its own, fp8 (on GPUs) to e4m3. int8_per_token_head, fp8_e4m3 and "
        "fp8_per_token_head are other names of the same.",
        Kind.TEXT,
        _MEMORY,
        choices=(
            "auto",
            "float16",
            "bfloat16",
            "int8",
            "int8_per_token_head",
            "fp8",
            "fp8_e4m3",
            "fp8_per_token_head",
        ),
        hint="Other types are not built: for half the memory use 'int8' or, on a GPU, 'fp8'.",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "Keep K/V of finished requests for prompts that begin alike; None: yes.",
        Kind.FLAG,
        _MEMORY,
    )
    cpu_threads: int | None = option(
        None,
        "Threads that compute; None: one for each physical core that this process may use.",
        Kind.INTEGER,
        _SCHEDULE,
        unit="threads",
        minimum=1,
        maximum=1024,
    )
    data_parallel_size: int = option(
        1,
        "Copies of the engine, each in a process of its own with its share of threads and memory.",
        Kind.INTEGER,
        _SCHEDULE,
        unit="cores",
        minimum=1,
        maximum=1024,
        flags=("-dp",),
    )
    max_core_restarts: int = option(
        3,
        "A core process that dies is started anew and its requests go on; the engine is given up "
        "when so many lives in a row brought nothing. 0: it dies with its first core.",
        Kind.INTEGER,
        _SCHEDULE,
        unit="restarts",
        minimum=0,
        maximum=1000,
    )
    spare_core: str = option(
        "after_death",
        "When a spare process waits that takes a dead core's place: it has imported what takes "
        "longest of a start, and holds its memory.",
        Kind.TEXT,
        _SCHEDULE,
        choices=("never", "after_death", "always"),
    )
    data_parallel_size_local: int | None = option(
        None,
        "How many of them run on this machine; None: all.",
        Kind.INTEGER,
        _SCHEDULE,
        unit="cores",
        minimum=0,
        maximum=1024,
        flags=("-dpl",),
    )
    data_parallel_start_rank: int | None = option(
        None,
        "The first of them on this machine; None: 0.",
        Kind.INTEGER,
        _SCHEDULE,
        minimum=0,
        maximum=1023,
        flags=("-dpr",),
    )
    data_parallel_rank: int | None = option(
        None,
        "The one of them that this engine is, balanced from outside.",
        Kind.INTEGER,
        _SCHEDULE,
        minimum=0,
        maximum=1023,
        flags=("-dpn",),
    )
    data_parallel_address: str | None = option(
        None,
        "The front end's address, at which cores on other machines find it.",
        Kind.TEXT,
        _SCHEDULE,
        flags=("-dpa",),
    )
    data_parallel_rpc_port: int = option(
        29550,
        "The front end's port for cores on other machines.",
        Kind.INTEGER,
        _SCHEDULE,
        minimum=1,
        maximum=65535,
        flags=("-dpp",),
    )
    data_parallel_hybrid_lb: bool = option(
        False,
        "Serve with this machine's copies only; balance between machines outside.",
        Kind.FLAG,
        _SCHEDULE,
        flags=("-dph",),
    )
    data_parallel_external_lb: bool = option(
        False, "Serve with one copy; balance outside.", Kind.FLAG, _SCHEDULE, flags=("-dpe",)
    )
    enable_expert_parallel: bool = option(
        False,
        "Spread the experts over the copies, which then step together; else each copy has all.",
        Kind.FLAG,
        _SCHEDULE,
        flags=("-ep",),
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens computed in one step; None: 8192 on a GPU, on a CPU 4096, or 2048 where "
        "several callers are served at once (AsyncEngineArgs, quire serve).",
        Kind.SIZE,
        _SCHEDULE,
        unit="tokens",
        minimum=1,
    )
    max_num_seqs: int | None = option(
        None,
        "Most requests that run at the same time; None: 256.",
        Kind.SIZE,
        _SCHEDULE,
        unit="requests",
        minimum=1,
    )
    enable_chunked_prefill: bool | None = option(
        None, "Let a long prompt take several steps; None: yes.", Kind.FLAG, _SCHEDULE
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most tokens of one prompt in one step; 0: no such limit.",
        Kind.SIZE,
        _SCHEDULE,
        unit="tokens",
        minimum=0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Who runs first: in order of arrival, or by priority (lower first).",
        Kind.TEXT,
        _SCHEDULE,
        choices=("fcfs", "priority"),
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Most unfinished requests of an engine that serves; one more is refused, with a hint when "
        "to try again. None: 16 * max_num_seqs. `LLM` has no such limit.",
        Kind.SIZE,
        _SCHEDULE,
        unit="requests",
        minimum=0,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Most prompt tokens of requests that have no output yet, likewise. None: 4194304.",
        Kind.SIZE,
        _SCHEDULE,
        unit="tokens",
        minimum=0,
    )
    async_scheduling: bool | None = option(
        None,
        "Plan the next step while one is running; None: on a GPU, and not on a CPU, which would do "
        "both.",
        Kind.FLAG,
        _SCHEDULE,
    )
    max_logprobs: int = option(
        20,
        "Most logprobs that a request may ask for; -1: no limit.",
        Kind.INTEGER,
        SAMPLING_AND_OUTPUT,
        minimum=-1,
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "Take logprobs before (raw) or after penalties, temperature and top-k; or the logits.",
        Kind.TEXT,
        SAMPLING_AND_OUTPUT,
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    logits_processors: list[str | type] | None = option(
        None, "Own logits processors.", Kind.PROCESSORS, SAMPLING_AND_OUTPUT
    )
    generation_config: str = option(
        "auto",
        "Where default sampling parameters come from: auto is generation_config.json of the "
        "model, vllm (or quire) nothing, anything else a folder.",
        Kind.TEXT,
        SAMPLING_AND_OUTPUT,
    )
    override_generation_config: dict[str, Any] | None = option(
        {},
        "Default sampling parameters on top of these.",
        Kind.OBJECT,
        SAMPLING_AND_OUTPUT,
        is_optional=True,
    )
    stream_interval: int = option(
        1,
        "Tokens between two outputs of a stream.",
        Kind.INTEGER,
        SAMPLING_AND_OUTPUT,
        unit="tokens",
        minimum=1,
    )
    reasoning_config: dict[str, Any] | None = option(
        None,
        "How this model's outputs mark their reasoning, which thinking_token_budget needs: "
        "reasoning_start_str, reasoning_end_str. A server knows it by its --reasoning-parser.",
        Kind.OBJECT,
        SAMPLING_AND_OUTPUT,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Where OpenTelemetry spans of requests go: http://host:4318/v1/traces, or "
        "grpc://host:4317. Needs quire[otel].",
        Kind.TEXT,
        SAMPLING_AND_OUTPUT,
    )
    profiler_config: dict[str, Any] | None = option(
        None,
        "What `start_profile` traces and where to: profiler ('torch'), torch_profiler_dir, "
        "torch_profiler_with_stack, _use_gzip, _record_shapes, _with_memory, _with_flops, "
        "delay_iterations, max_iterations. None: nothing can be profiled.",
        Kind.OBJECT,
        SAMPLING_AND_OUTPUT,
    )
    structured_outputs_config: dict[str, Any] | None = option(
        None,
        "How outputs are brought into a form: backend ('auto', 'guidance' or 'xgrammar'), "
        "disable_any_whitespace, disable_additional_properties, enable_in_reasoning, "
        "compile_time_s (5), compile_memory_mib (1024), max_cached_grammars (256).",
        Kind.OBJECT,
        SAMPLING_AND_OUTPUT,
    )
    disable_log_stats: bool = option(
        False,
        "Keep no statistics: `get_metrics()` and `RequestOutput.metrics` stay empty.",
        Kind.FLAG,
        SAMPLING_AND_OUTPUT,
    )

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse unknown keywords with our own error, before the generated `__init__` runs."""
        for name in kwargs:
            if name not in cls.__dataclass_fields__:
                raise _unknown(name, list(cls.__dataclass_fields__))
        return super().__new__(cls)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give `parser` a flag for every field; names that are not built are taken too, but not
        shown in the help.
        """
        return add_options(parser, cls)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments from what `argparse` made of the command line; further names in it are left
        alone.
        """
        given = vars(args)
        return cls(
            **{field.name: given[field.name] for field in fields(cls) if field.name in given}
        )


def _unknown(name: str, known: list[str]) -> UnknownParameter:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "See docs/engine_args.md for the names."
    return UnknownParameter(name, "the names are the fields of EngineOptions", hint)
