"""The options of an engine: `EngineOptions`, one flat declaration with the field's names.

Each field carries its type, default, unit and one sentence. The command line, the
checks and `docs/engine_args.md` are made from it. The names that are documented but not built are
in `unbuilt_args.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.config.args.command_line import CommandLineOptions
from quire.config.args.option import Kind, OptionGroup
from quire.config.args.refused_values import LOAD_FORMATS, TOKENIZER_MODES
from quire.config.args.unbuilt_args import UnbuiltArgs
from quire.errors import NotBuiltYet, RequestError, UnknownParameter
from quire.plugins import tables

_MODEL = OptionGroup("Model")
_LOAD = OptionGroup("Loading")
_MEMORY = OptionGroup("Memory")
_SCHEDULE = OptionGroup("Scheduling")
_DRAFTS = OptionGroup("Speculation")
_TOKENS = OptionGroup("Tokenizer and prompts")
_MEDIA = OptionGroup("Media")
_ADAPTERS = OptionGroup("Adapters")
SAMPLING_AND_OUTPUT = OptionGroup("Sampling and output")

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(init=False, repr=False, eq=False)  # EngineArgs has those methods
class EngineOptions(UnbuiltArgs, CommandLineOptions):
    """The fields of `EngineArgs` (engine_args.py), as `resolve()` reads them."""

    serves_several_callers: ClassVar[bool] = False
    """Whether steps are kept short, so that no stream waits long for another one's prompt."""

    model: str | None = _MODEL.text(
        None, "Folder or hub id of the model; None is the small model inside the package."
    )
    served_model_name: str | list[str] | None = _MODEL.names(
        None, "Names that the model answers to; the first is reported. None: `model`."
    )
    dtype: str = _MODEL.text(
        "auto",
        "Type of weights, activations and K/V; auto is the checkpoint's where the CPU suits it.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = _MODEL.text(
        None,
        "Round the weights while loading: int8 (one scale per output) or int4 (one per 32 inputs; "
        "int4_g64 and int4_g128: per 64, 128). Activations are then int8 in products, unless the "
        "name ends with weight_only, which is slower. fp8: e4m3, one scale per output, activations "
        "too; on GPUs. fp8_per_channel and int8_per_channel_weight_only are other names of fp8 and "
        "int8_weight_only. None keeps `dtype`, or what a quantised checkpoint stores, whose name "
        "may be given too.",
        choices=(
            *("fp8", "int8", "int4", "int4_g64", "int4_g128"),
            *("int8_weight_only", "int4_weight_only"),
            *("fp8_per_channel", "int8_per_channel_weight_only"),
            *("awq", "auto_awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "mlx"),
            *("auto-round", "inc"),
            *("gptq", "auto_gptq", "gptq_marlin", "modelopt", "modelopt_fp4"),
            *("mxfp4", "gpt_oss_mxfp4", "hqq", "quark", "torchao", "online"),
        ),
        hint="Use 'int8' or 'int4', which round any checkpoint while it is loaded.",
        flags=("-q",),
    )
    quantization_config: dict[str, Any] | None = _MODEL.mapping(
        None,
        "Rounding of the weights by kind and by name: `linear`, `moe` and `head` with one "
        "of our values of `quantization` each, or null, which keeps them (absent: what "
        "`quantization` says), `targets` with names of modules or expressions (`re:.*`) and such a "
        "value, and `ignore` with those that are kept. With quantization=online it alone says it.",
    )
    model_impl: str = _MODEL.text(
        "auto",
        "Implementation of the model: Quire's own (vllm, quire), that of the transformers library "
        "with Quire's attention and KV cache (transformers), or auto: transformers where Quire "
        "has no family for the architecture.",
        choices=("auto", "vllm", "quire", "transformers"),
        hint="Models of other libraries, as 'terratorch', are not built.",
    )
    runner: str = _MODEL.text(
        "auto",
        "Task of the model: generate texts, or pool prompts into vectors and labels; generate "
        "with convert=embed or classify: both. auto: what its files and its architecture are for.",
        choices=("auto", "generate", "pooling", "draft"),
    )
    convert: str = _MODEL.text(
        "auto",
        "Result of pooling with a model that generates: vectors (embed) or labels (classify). "
        "auto: vectors, with runner=pooling or a pooling module of sentence-transformers.",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: dict[str, Any] | None = _MODEL.mapping(
        None, "Settings of pooling: see docs/pooling.md. None: as the model's files say."
    )
    language_model_only: bool = _MODEL.flag(
        False, "Serve text alone with a model that takes pictures, too: its encoder is not loaded."
    )
    seed: int = _MODEL.integer(
        0, "Start of the seeds of requests that bring none.", minimum=-(2**63), maximum=2**63 - 1
    )
    max_model_len: int | None = _MODEL.size(
        None,
        "Longest prompt and output together; None is the model's own limit, -1 (`auto` on the "
        "command line) the longest that fits in memory.",
        unit="tokens",
        minimum=-1,
        hint="Use None, -1 or a length of at least 1.",
    )
    revision: str | None = _MODEL.text(None, "Branch, tag or commit on the hub.")
    hf_token: str | bool | None = _MODEL.option(
        None, "Access token for the hub; True takes the stored one, False none.", Kind.TOKEN
    )
    hf_overrides: dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]] | None = (
        _MODEL.option(
            {},
            "Changes to config.json before it is read; nested dicts are merged.",
            Kind.OVERRIDES,
            is_optional=True,
        )
    )
    strict_config: bool = _MODEL.flag(
        False,
        "Refuse a config.json with keys that nothing reads, neither here nor in transformers, in "
        "place of a warning that lists them.",
    )
    device: str = _MODEL.text(
        "auto",
        "Device of the engine: cpu, cuda, or auto, which is an NVIDIA GPU that can be used, else "
        "the CPU.",
        choices=("auto", "cpu", "cuda"),
    )
    deterministic: bool = _MODEL.flag(
        False,
        "The same bits for a request whatever else is in its steps: on a GPU with kernels of fixed "
        "shapes, which are slower; on a CPU the native kernels do that anyway.",
    )
    enforce_eager: bool = _MODEL.flag(False, "Run every step without a recorded program.")
    packed_weights_gib: float = _LOAD.number(
        32.0,
        "Most GiB of packed weights in QUIRE_CACHE_DIR that a start maps instead of packing again, "
        "of all models together; the model that was used longest ago makes room. CPU only. 0: none "
        "are kept.",
        unit="GiB",
        minimum=0,
    )
    load_format: str = _LOAD.text(
        "auto",
        "Source of the weights. auto, hf: safetensors files, else Mistral's own (mistral), else "
        "pickles of which only tensors are unpickled (pt). mmap: the same, kept in files that are "
        "mapped, for models larger than memory. sharded_state: what save_sharded_state wrote. "
        "runai_streamer: safetensors through that package. dummy: chance.",
        choices=(
            *("auto", "hf", "safetensors", "pt", "mistral"),
            *("mmap", "sharded_state", "runai_streamer", "dummy"),
        ),
        refused=LOAD_FORMATS,
        added=tables.LOAD_FORMATS,
        hint="Convert other formats to safetensors first.",
    )
    download_dir: str | None = _LOAD.text(
        None, "Folder for downloads; None is the cache of huggingface_hub."
    )
    tokenizer: str | None = _TOKENS.text(
        None, "Folder or hub id of the tokenizer; None: the model's own."
    )
    tokenizer_mode: str = _TOKENS.text(
        "auto",
        "Tokenizer files that are read. hf: tokenizer.json, vocab.json with merges.txt, or "
        "tokenizer.model (SentencePiece or tiktoken); mistral: tekken.json or tokenizer.model.v3 "
        "and its like; auto: those of hf where there are some.",
        choices=("auto", "hf", "mistral"),
        refused=TOKENIZER_MODES,
        hint="Other tokenizer formats are not built: provide a tokenizer.json.",
    )
    tokenizer_revision: str | None = _TOKENS.text(
        None, "Branch, tag or commit of the tokenizer on the hub; None: `revision`."
    )
    skip_tokenizer_init: bool = _TOKENS.flag(
        False, "Load no tokenizer: prompts and outputs are token ids."
    )
    chat_template: str | None = _TOKENS.text(
        None, "Jinja chat template: a file, or the text itself. None: the tokenizer's."
    )
    enable_prompt_embeds: bool = _TOKENS.flag(
        False,
        "Take prompts as embeddings, too: prompt_embeds. Who may send them chooses what no text "
        "can say; leave it out where clients are not trusted.",
    )
    gpu_memory_utilization: float | None = _MEMORY.number(
        None,
        "Share of the memory that is free now for weights, workspace and KV cache, on a CPU too. "
        "None: the KV cache gets half of what weights and workspace leave; on a GPU, 0.9.",
        above=0,
        maximum=1,
        flags=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: int | None = _MEMORY.size(
        None, "Size of the KV cache; overrides gpu_memory_utilization.", unit="bytes", minimum=1
    )
    num_gpu_blocks_override: int | None = _MEMORY.integer(
        None,
        "Blocks of the pool that all KV groups share; overrides every other size of the KV cache.",
        unit="blocks",
        minimum=2,
        hint="One block is never handed out, so that 2 is the smallest pool.",
    )
    block_size: int | None = _MEMORY.integer(
        None, "Tokens in one block of K/V; None: 32.", unit="tokens", minimum=1, maximum=4096
    )
    kv_cache_dtype: str = _MEMORY.text(
        "auto",
        "Type of K/V in memory: auto is `dtype`; int8 rounds each key and value of a head to whole "
        "numbers with a scale of its own, fp8 (on GPUs) to e4m3. int8_per_token_head, fp8_e4m3 and "
        "fp8_per_token_head are other names of the same.",
        choices=(
            *("auto", "float16", "bfloat16", "int8", "int8_per_token_head"),
            *("fp8", "fp8_e4m3", "fp8_per_token_head"),
        ),
        hint="Other types are not built: for half the memory use 'int8' or, on a GPU, 'fp8'.",
    )
    enable_prefix_caching: bool | None = _MEMORY.flag(
        None, "Keep K/V of finished requests for prompts that begin alike; None: yes."
    )
    kv_offloading_size: float | None = _MEMORY.number(
        None,
        "Host memory for K/V that the pool has no room for: what is evicted is copied back when a "
        "prompt begins with it again. None: none, unless kv_transfer_config says so.",
        unit="GiB",
        above=0,
    )
    kv_offloading_backend: str = _MEMORY.text(
        "native",
        "Implementation of the copies of K/V out of the pool.",
        choices=("native", "lmcache"),
    )
    kv_transfer_config: dict[str, Any] | None = _MEMORY.mapping(
        None,
        "Connector that keeps K/V outside of the pool: kv_connector OffloadingConnector (or "
        "SimpleCPUOffloadConnector) with kv_role kv_both, and in kv_connector_extra_config "
        "cpu_bytes_to_use and secondary_tiers (docs/kv_tiers.md); NixlConnector pulls it from "
        "other engines, MultiConnector uses several, and kv_connector_module_path names the "
        "module of a class of your own (docs/kv_connectors.md). ExampleHiddenStatesConnector with "
        "shared_storage_path writes the hidden states of method extract_hidden_states.",
    )
    kv_events_config: dict[str, Any] | None = _MEMORY.mapping(
        None,
        "Events that tell routers what the prefix cache has: enable_kv_cache_events, endpoint, "
        "replay_endpoint, topic and others (docs/kv_events.md).",
    )
    cpu_offload_gb: float = _MEMORY.number(
        0,
        "Memory of a GPU that weights leave free by staying in the host's: layers far apart are "
        "chosen until that much is saved, buffers for their copies counted.",
        unit="GiB",
        minimum=0,
    )
    offload_group_size: int = _MEMORY.integer(
        0,
        "Layers of a group for offloading: the weights of the last ones of each group stay in "
        "host memory, and each step copies them to the GPU before they are used; 0: no groups.",
        unit="layers",
        minimum=0,
    )
    offload_num_in_group: int = _MEMORY.integer(
        1, "Layers of each group that are offloaded.", unit="layers", minimum=1
    )
    offload_prefetch_step: int = _MEMORY.integer(
        1,
        "Buffers on the GPU for offloaded layers: as many are copied ahead of their use.",
        unit="layers",
        minimum=1,
    )
    offload_params: str | Collection[str] | None = _MEMORY.name_set(
        None,
        "Weights of offloaded layers that stay in host memory, by whole segments of their names: "
        "attn, attn.qkv, attn.o, mlp, mlp.up, mlp.down, mlp.experts, mixer. None: all.",
    )
    cpu_threads: int | None = _SCHEDULE.integer(
        None,
        "Threads that compute; None: one for each physical core that this process may use, on one "
        "NUMA node, efficiency cores left out (`quire doctor` shows which).",
        unit="threads",
        minimum=1,
        maximum=1024,
    )
    tensor_parallel_size: int = _SCHEDULE.integer(
        1,
        "Workers that share each layer's heads and widths, on a CPU each in a process of its own "
        "with some of the threads.",
        unit="workers",
        minimum=1,
        maximum=64,
        flags=("-tp",),
    )
    pipeline_parallel_size: int = _SCHEDULE.integer(
        1,
        "Stages of layers, one after the other, each with workers of its own (on a CPU).",
        unit="stages",
        minimum=1,
        maximum=256,
        flags=("-pp",),
    )
    distributed_executor_backend: str | type | None = _SCHEDULE.text(
        None,
        "Executor of the workers: 'uni' one worker in its core's process, 'mp' a process for each "
        "of several, 'external_launcher' the processes that torchrun has started, 'ray' an actor "
        "for each, on any machine of a Ray cluster, or a class of your own (docs/plugins.md); "
        "None: as many workers need.",
        choices=("uni", "mp", "external_launcher", "ray"),
        takes_classes=True,
    )
    nnodes: int = _SCHEDULE.integer(
        1,
        "Machines that share the workers of a model equally; those after the first are started "
        "with --headless.",
        unit="machines",
        minimum=1,
        maximum=256,
        flags=("-n",),
    )
    node_rank: int = _SCHEDULE.integer(
        0,
        "Number of this machine among them; the first is 0.",
        minimum=0,
        maximum=255,
        flags=("-r",),
    )
    master_addr: str = _SCHEDULE.text(
        "127.0.0.1", "The first machine's address, as the others reach it."
    )
    master_port: int = _SCHEDULE.integer(
        29501, "The first machine's port for the others.", minimum=1, maximum=65535
    )
    data_parallel_size: int = _SCHEDULE.integer(
        1,
        "Copies of the engine, each in a process of its own with its share of threads and memory.",
        unit="cores",
        minimum=1,
        maximum=1024,
        flags=("-dp",),
    )
    numa_bind: bool = _SCHEDULE.flag(
        False,
        "Bind each worker's threads to the cores of a NUMA node of its own, by turns; without it "
        "they are spread over the nodes as well, but fewer workers than nodes may share one.",
    )
    numa_bind_nodes: str | list[str] | None = _SCHEDULE.names(
        None, "The NUMA node of each worker, with `numa_bind`."
    )
    numa_bind_cpus: str | list[str] | None = _SCHEDULE.names(
        None, "The logical CPUs of each worker, as 0-3 or 0,2,4-7, with `numa_bind`."
    )
    max_core_restarts: int = _SCHEDULE.integer(
        3,
        "A core process that dies is restarted and its requests continue; the engine gives up "
        "after this many restarts in a row without progress. 0: it dies with its first core.",
        unit="restarts",
        minimum=0,
        maximum=1000,
    )
    spare_core: str = _SCHEDULE.text(
        "after_death",
        "Whether a spare process waits to take a dead core's place: it has imported what takes "
        "longest of a start, and holds its memory.",
        choices=("never", "after_death", "always"),
    )
    data_parallel_size_local: int | None = _SCHEDULE.integer(
        None,
        "Copies that run on this machine; None: all.",
        unit="cores",
        minimum=0,
        maximum=1024,
        flags=("-dpl",),
    )
    data_parallel_start_rank: int | None = _SCHEDULE.integer(
        None,
        "Number of the first copy on this machine; None: 0.",
        minimum=0,
        maximum=1023,
        flags=("-dpr",),
    )
    data_parallel_rank: int | None = _SCHEDULE.integer(
        None,
        "Number of this copy, where load is balanced from outside.",
        minimum=0,
        maximum=1023,
        flags=("-dpn",),
    )
    data_parallel_address: str | None = _SCHEDULE.text(
        None, "The front end's address, at which cores on other machines find it.", flags=("-dpa",)
    )
    data_parallel_rpc_port: int = _SCHEDULE.integer(
        29550,
        "The front end's port for cores on other machines.",
        minimum=1,
        maximum=65535,
        flags=("-dpp",),
    )
    data_parallel_backend: str = _SCHEDULE.text(
        "mp",
        "Launcher of the copies: 'mp' this machine, and others with --headless, or 'ray' machines "
        "of a Ray cluster (docs/deployment.md).",
        choices=("mp", "ray"),
        flags=("-dpb",),
    )
    data_parallel_hybrid_lb: bool = _SCHEDULE.flag(
        False,
        "Serve with this machine's copies only; balance between machines outside.",
        flags=("-dph",),
    )
    data_parallel_external_lb: bool = _SCHEDULE.flag(
        False, "Serve with one copy; balance outside.", flags=("-dpe",)
    )
    data_parallel_multi_port_external_lb: bool = _SCHEDULE.flag(
        False,
        "Have `quire serve` start a server for each copy of this machine, at ports one after the "
        "other; balance outside.",
        flags=("-dpm",),
    )
    enable_expert_parallel: bool = _SCHEDULE.flag(
        False,
        "Spread the experts over the copies, which then step together; else each copy has all.",
        flags=("-ep",),
    )
    max_num_batched_tokens: int | None = _SCHEDULE.size(
        None,
        "Most tokens computed in one step; None: 8192 on a GPU, on a CPU 4096, or 2048 where "
        "several callers are served at once (AsyncEngineArgs, quire serve).",
        unit="tokens",
        minimum=1,
    )
    max_num_seqs: int | None = _SCHEDULE.size(
        None, "Most requests that run at the same time; None: 256.", unit="requests", minimum=1
    )
    enable_chunked_prefill: bool | None = _SCHEDULE.flag(
        None, "Let a long prompt take several steps; None: yes."
    )
    long_prefill_token_threshold: int = _SCHEDULE.size(
        0, "Most tokens of one prompt in one step; 0: no such limit.", unit="tokens", minimum=0
    )
    max_stall_ms: int | None = _SCHEDULE.integer(
        None,
        "Longest time that a step may take while requests that have begun to answer wait for it: "
        "prompts get as many tokens of it as measured speeds allow, but at least half of its time. "
        "If reading the weights takes more than a fifth of 1.2 times this, so many that it takes a "
        "fifth. 0: no bound. None: 250 on engines that serve, unless max_num_batched_tokens is "
        "given.",
        unit="milliseconds",
        minimum=0,
    )
    scheduling_policy: str = _SCHEDULE.text(
        "fcfs",
        "Order of requests: by arrival, or by priority (lower first).",
        choices=("fcfs", "priority"),
    )
    scheduler_cls: str | type | None = _SCHEDULE.option(
        None,
        "A class of your own below quire.scheduling.scheduler.Scheduler, which plans the steps.",
        Kind.CLASS,
    )
    max_num_queued_reqs: int | None = _SCHEDULE.size(
        None,
        "Most unfinished requests of an engine that serves; one more is refused, with a hint when "
        "to try again. None: 16 * max_num_seqs. `LLM` has no such limit.",
        unit="requests",
        minimum=0,
    )
    max_num_queued_tokens: int | None = _SCHEDULE.size(
        None,
        "Most prompt tokens of requests that have no output yet, likewise. None: 4194304.",
        unit="tokens",
        minimum=0,
    )
    async_scheduling: bool | None = _SCHEDULE.flag(
        None,
        "Plan the next step while one is running; None: on a GPU, and not on a CPU, which would do "
        "both.",
    )
    limit_mm_per_prompt: dict[str, Any] | None = _MEDIA.mapping(
        {},
        'Most items of a modality in one prompt, such as {"image": 4}; 999 where nothing is said. '
        'With 0 pictures their encoder is not loaded. The other form, {"image": {"count": 4}}, may '
        "also have sizes, which are for measurements that are not needed here.",
        is_optional=True,
    )
    allowed_media_domains: str | Collection[str] | None = _MEDIA.name_set(
        None,
        "The only hosts that media are fetched from, by their exact names, also after redirects; "
        "None or []: all of the public internet.",
    )
    allowed_local_media_path: str = _MEDIA.text(
        "", "Folder whose files prompts may name as file: URLs; empty: none may."
    )
    mm_processor_kwargs: dict[str, Any] | None = _MEDIA.mapping(
        None,
        "Settings of the model's image processor in place of its file's, flat or under "
        "`images_kwargs`; those of a prompt rule over them.",
    )
    media_io_kwargs: dict[str, Any] | None = _MEDIA.mapping(
        {},
        'Settings for decoding files, by modality: {"image": {"rgba_background_color": [0, 0, '
        "0]}} is the colour under transparent pixels, which is white otherwise.",
        is_optional=True,
    )
    mm_processor_cache_gb: float = _MEDIA.number(
        4.0,
        "Memory of each front end for pictures that are decoded and processed already; 0: none.",
        unit="GiB",
        minimum=0,
        maximum=2**20,
    )
    journal_media_bytes: int = _MEDIA.size(
        256 * 2**20,
        "Memory for the media of live requests as they came, from which they go on after the death "
        "of a core; a request that does not fit is served, and would end with its core.",
        unit="bytes",
        minimum=0,
    )
    enable_mm_embeds: bool = _MEDIA.flag(
        False,
        "Take pictures as the rows that an encoder makes of them, too: image_embeds. Leave it out "
        "where clients are not trusted.",
    )
    ec_transfer_config: dict[str, Any] | None = _MEDIA.mapping(
        None,
        "Connector that keeps outputs of encoders outside of the engine: ec_connector "
        "ECExampleConnector with the folder shared_storage_path in ec_connector_extra_config, and "
        "ec_role, which is ec_producer, ec_consumer or ec_both. A class of one's own has "
        "ec_connector_module_path.",
    )
    interleave_mm_strings: bool = _MEDIA.flag(
        False,
        "For chat templates that know text alone: have pictures stand where they are among a "
        "message's texts, rather than before them all.",
    )
    enable_lora: bool = _ADAPTERS.flag(
        False, "Serve LoRA adapters next to the model: see docs/lora.md."
    )
    max_loras: int = _ADAPTERS.integer(
        1,
        "Most different adapters in one step: as many slots for their weights.",
        unit="adapters",
        minimum=1,
        maximum=4096,
    )
    max_lora_rank: int = _ADAPTERS.integer(
        16,
        "Largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512. Slots have room for "
        "it.",
        minimum=1,
        maximum=512,
    )
    max_cpu_loras: int | None = _ADAPTERS.integer(
        None,
        "Most adapters in host memory, those in slots among them; the one whose last use is "
        "longest ago makes room. None, 0: max_loras.",
        unit="adapters",
    )
    lora_dtype: str = _ADAPTERS.text(
        "auto",
        "Type of an adapter's weights in memory; auto is `dtype`.",
        choices=("auto", "float16", "bfloat16"),
    )
    lora_target_modules: str | list[str] | None = _ADAPTERS.names(
        None,
        "The only modules that adapters may change, by the end of their names as o_proj; None: all "
        "that can be. An adapter with another one is refused.",
    )
    speculative_config: dict[str, Any] | None = _DRAFTS.mapping(
        None,
        "Draft tokens and verify several in one step; answers stay the same. Keys: method (ngram, "
        "suffix, auto, custom_class, draft_model, eagle, eagle3, mtp, medusa), model, "
        "num_speculative_tokens (at most; fewer where they do not pay), and those of each method "
        "(docs/speculation.md).",
        flags=("-sc",),
    )
    spec_method: str | None = _DRAFTS.text(None, "Short for speculative_config['method'].")
    spec_model: str | None = _DRAFTS.text(None, "Short for speculative_config['model'].")
    spec_tokens: int | None = _DRAFTS.integer(
        None, "Short for speculative_config['num_speculative_tokens'].", unit="tokens", minimum=1
    )
    per_request_spec_decode_metrics: str = _DRAFTS.text(
        "none",
        "Report on the drafts of each completion, in its output and in replies: a summary, or "
        "detailed, which adds the numbers of each step.",
        choices=("none", "summary", "detailed"),
    )
    max_logprobs: int = SAMPLING_AND_OUTPUT.integer(
        20, "Most logprobs that a request may ask for; -1: no limit.", minimum=-1
    )
    enable_return_routed_experts: bool = SAMPLING_AND_OUTPUT.flag(
        False,
        "Return, with each completion of a mixture of experts, the experts that its tokens were "
        "sent to in every layer (`routed_experts`).",
    )
    logprobs_mode: str = SAMPLING_AND_OUTPUT.text(
        "raw_logprobs",
        "Take logprobs before (raw) or after penalties, temperature and top-k; or the logits.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    logits_processors: list[str | type] | None = SAMPLING_AND_OUTPUT.option(
        None, "Own logits processors.", Kind.PROCESSORS
    )
    generation_config: str = SAMPLING_AND_OUTPUT.text(
        "auto",
        "Source of default sampling parameters: auto is generation_config.json of the "
        "model, vllm (or quire) nothing, anything else a folder.",
    )
    override_generation_config: dict[str, Any] | None = SAMPLING_AND_OUTPUT.mapping(
        {}, "Default sampling parameters on top of these.", is_optional=True
    )
    stream_interval: int = SAMPLING_AND_OUTPUT.integer(
        1, "Tokens between two outputs of a stream.", unit="tokens", minimum=1
    )
    reasoning_config: dict[str, Any] | None = SAMPLING_AND_OUTPUT.mapping(
        None,
        "Marks of reasoning in this model's outputs, which thinking_token_budget needs: "
        "reasoning_start_str, reasoning_end_str. A server knows it by its --reasoning-parser.",
    )
    otlp_traces_endpoint: str | None = SAMPLING_AND_OUTPUT.text(
        None,
        "Destination of the OpenTelemetry spans of requests: http://host:4318/v1/traces, or "
        "grpc://host:4317. Needs quire[otel].",
    )
    custom_histogram_buckets: dict[str, list[float]] | None = SAMPLING_AND_OUTPUT.mapping(
        None,
        "Bounds of the buckets of histograms on /metrics by family, each above the one before: "
        "request_latency, time_to_first_token, inter_token_latency, iteration_tokens, "
        "request_params_n, request_num_preemptions, request_tokens.",
    )
    profiler_config: dict[str, Any] | None = SAMPLING_AND_OUTPUT.mapping(
        None,
        "Scope and folder of the traces of `start_profile`: profiler ('torch'), "
        "torch_profiler_dir, torch_profiler_with_stack, _use_gzip, _record_shapes, _with_memory, "
        "_with_flops, delay_iterations, max_iterations. None: nothing can be profiled.",
    )
    io_processor_plugin: str | None = SAMPLING_AND_OUTPUT.text(
        None,
        "The plugin of an installed package that makes prompts of data for a model that pools, and "
        "data of their results (docs/plugins.md). None: that of the key in config.json, if any.",
    )
    weight_transfer_config: dict[str, Any] | None = SAMPLING_AND_OUTPUT.mapping(
        None,
        "Transfer of new weights from a trainer: backend, which is 'nccl' (a process group, by "
        "gloo on a CPU), 'ipc' (memory of this host) or the name of a plugin's; snapshots, "
        "whether updated weights are kept in files for a core that restarts "
        "(docs/weight_updates.md). None: none does.",
    )
    worker_cls: str | type = SAMPLING_AND_OUTPUT.text(
        "auto",
        "A class of your own in place of quire.executor.worker.Worker, a subclass of it that every "
        "process of a worker can import, as 'module.Class'; 'auto': Quire's own.",
        takes_classes=True,
    )
    worker_extension_cls: str | None = SAMPLING_AND_OUTPUT.text(
        "",
        "A class of your own as 'module.Class', whose methods workers get: `collective_rpc` calls "
        "them by name, also where the core is another process.",
    )
    structured_outputs_config: dict[str, Any] | None = SAMPLING_AND_OUTPUT.mapping(
        None,
        "Generation of structured outputs: backend ('auto', 'guidance' or 'xgrammar'), "
        "disable_any_whitespace, disable_additional_properties, reasoning_parser (forms begin "
        "after its reasoning), enable_in_reasoning, "
        "compile_time_s (5), compile_memory_mib (1024), max_cached_grammars (256), prepare.",
    )
    aggregate_engine_logging: bool = SAMPLING_AND_OUTPUT.flag(
        False, "Log one line of statistics for all copies in place of one for each."
    )
    disable_log_stats: bool = SAMPLING_AND_OUTPUT.flag(
        False, "Keep no statistics: `get_metrics()` and `RequestOutput.metrics` stay empty."
    )

    @property
    def is_copied(self) -> bool:
        """Whether there are several cores, each in a process of its own."""
        return self.data_parallel_size > 1

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse unknown keywords with our own error, before the generated `__init__` runs."""
        for name, value in kwargs.items():
            if name not in cls.__dataclass_fields__:
                raise _unknown(name, value, list(cls.__dataclass_fields__))
        return super().__new__(cls)


def _unknown(name: str, value: object, known: list[str]) -> RequestError:
    from quire.config.args.foreign_flags import FOREIGN_FLAGS  # a long list, for a mistake

    instead = FOREIGN_FLAGS.get(name.replace("_", "-"))
    if instead is not None:
        return NotBuiltYet(name, value, instead)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else "See docs/engine_args.md for the names."
    return UnknownParameter(name, "the names are the fields of EngineArgs", hint)
