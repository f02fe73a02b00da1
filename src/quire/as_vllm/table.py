"""The table of counterparts: modules of vLLM, as programs import them, and our names for theirs."""

from __future__ import annotations

from functools import cache

from quire.unbuilt_names import UNBUILT_NAMES

ROOT = "vllm"

VERSION = "0.32.0"
"""The release whose names these are, which programs compare with those that they support."""

COMMAND = "vllm.entrypoints.cli.main"
"""The module that the command `vllm` runs."""

REFUSED = ""
"""The home of what can be imported and not called: programs import it whatever they go on to do."""

_PUBLIC = {
    "quire": """LLM SamplingParams PoolingParams RequestOutput CompletionOutput PoolingOutput
        PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput
        ClassificationRequestOutput ScoringOutput ScoringRequestOutput LLMEngine EngineArgs
        AsyncEngineArgs AsyncLLMEngine ModelRegistry PromptType TextPrompt TokensPrompt
        EmbedsPrompt""",
    "quire.as_vllm.table": "__version__=VERSION __version_tuple__=VERSION_TUPLE",
}
_INPUTS = {
    "quire.prompts": """PromptType SingletonPrompt=PromptType TextPrompt TokensPrompt
        EmbedsPrompt""",
    "quire.engine": "StreamingInput",
    "quire.as_vllm.stand_ins": "token_inputs",
    REFUSED: "ExplicitEncoderDecoderPrompt DataPrompt",
}
_ENGINE_ARGS = {"quire": "EngineArgs AsyncEngineArgs"}
_ASYNC_ENGINE = {"quire": "AsyncLLMEngine AsyncLLM"}
_SYNC_ENGINE = {"quire": "LLMEngine"}
_LLM = {"quire": "LLM"}
_NETWORK = {
    "quire.as_vllm.stand_ins": "get_ip get_open_port",
    "quire.as_vllm.addresses": """get_tcp_uri get_distributed_init_method=get_tcp_uri
        is_valid_ipv6_address join_host_port""",
}
_ASYNC = "make_async merge_async_iterators collect_from_async_generator"
_LISTS = "as_list chunk_list is_list_of"
_SIZES = "KiB_bytes MiB_bytes GiB_bytes KB_bytes MB_bytes GB_bytes"
_PROCESSES = "kill_process_tree update_environment_variables"
_CHAT_TEMPLATES = {
    "quire.as_vllm.stand_ins": """resolve_hf_chat_template=resolve_chat_template
        load_chat_template"""
}
_TOKENIZER = {
    "quire.as_vllm.stand_ins": """get_tokenizer cached_get_tokenizer=get_tokenizer
        cached_tokenizer_from_config=tokenizer_of TokenizerLike""",
    "quire.text.tokenizer": "Tokenizer",
}
_ERRORS = {"quire.errors": "EngineDeadError EngineGenerateError"}
_CLIENTS = """AsyncEngineCoreClient EngineCoreClient InprocClient MPClient SyncMPClient
    AsyncMPClient DPAsyncMPClient=AsyncMPClient DPLBAsyncMPClient=AsyncMPClient"""
_BEAMS = {"quire.beam_search": "BeamSearchOutput BeamSearchSequence"}
_EXECUTOR = {"quire.as_vllm.stand_ins": "Executor=ExecutorChoice"}
_PROCESSORS = {
    "quire.runner.sampling": """LogitsProcessor AdapterLogitsProcessor BatchUpdate
        MoveDirectionality RequestLogitsProcessor process_dict_updates"""
}

_RELOAD = {
    "quire.as_vllm.loaders": """initialize_layerwise_reload finalize_layerwise_reload
        finalize_layerwise_processing"""
}
_TRANSFER_FACTORIES = {
    "quire.as_vllm.registries": "WeightTransferEngineFactory",
    "quire.trainers.senders": "WeightTransferTrainerFactory",
}
_VIEWS = "quire.config.views.engine"
_CONFIGS: dict[str, dict[str, str]] = {
    "vllm": {"quire.config.plan": "VllmConfig=EnginePlan"},
    "model": {
        "quire.config.views.model": "ModelConfig=ModelView",
        "quire.runner.sampling.logprobs": "LogprobsMode",
    },
    "cache": {_VIEWS: "CacheConfig=CacheView"},
    "parallel": {_VIEWS: "ParallelConfig=ParallelView"},
    "scheduler": {_VIEWS: "SchedulerConfig=SchedulerView"},
    "device": {_VIEWS: "DeviceConfig=DeviceView"},
    "load": {_VIEWS: "LoadConfig=LoadView"},
    "observability": {_VIEWS: "ObservabilityConfig=ObservabilityView"},
    "lora": {"quire.config.adapter_plan": "LoRAConfig=AdapterPlan"},
    "pooler": {"quire.config.pooler_config": "PoolerConfig"},
    "profiler": {"quire.config.profiler_config": "ProfilerConfig"},
    "structured_outputs": {"quire.config.structured_outputs_config": "StructuredOutputsConfig"},
    "compilation": {
        "quire.as_vllm.stand_ins": "CompilationMode CUDAGraphMode",
        "builtins": "CompilationConfig=dict",
    },
    "attention": {"builtins": "AttentionConfig=dict"},
    "speculative": {"builtins": "SpeculativeConfig=dict"},
    "reasoning": {"builtins": "ReasoningConfig=dict"},
    "kv_transfer": {"builtins": "KVTransferConfig=dict"},
    "ec_transfer": {"builtins": "ECTransferConfig=dict"},
    "kv_events": {"builtins": "KVEventsConfig=dict"},
    "weight_transfer": {"builtins": "WeightTransferConfig=dict"},
}
"""Modules of `vllm.config`, whose names the package has, too. Those of options are dicts."""

SERVED: dict[str, dict[str, str]] = {
    "vllm": _PUBLIC,
    "vllm.beam_search": _BEAMS,
    "vllm.config": {
        home: " ".join(part[home] for part in _CONFIGS.values() if home in part)
        for home in dict.fromkeys(home for part in _CONFIGS.values() for home in part)
    },
    **{f"vllm.config.{part}": names for part, names in _CONFIGS.items()},
    "vllm.distributed": {"quire.as_vllm.stand_ins": "cleanup_dist_env_and_memory"},
    "vllm.distributed.ec_transfer.ec_connector.base": {
        "quire.distributed.ec_connector": "ECConnectorBase ECConnectorRole ECConnectorMetadata"
    },
    "vllm.distributed.ec_transfer.ec_connector.example_connector": {
        "quire.distributed.ec_connector": "ECExampleConnector"
    },
    "vllm.distributed.ec_transfer.ec_connector.factory": {
        "quire.as_vllm.registries": "ECConnectorFactory"
    },
    "vllm.distributed.kv_events": {
        "quire.distributed.kv_events": """AllBlocksCleared BlockRemoved BlockStored KVCacheEvent
            KVEventBatch"""
    },
    "vllm.distributed.kv_transfer.kv_connector.factory": {
        "quire.as_vllm.registries": "KVConnectorFactory"
    },
    "vllm.distributed.kv_transfer.kv_connector.v1": {
        "quire.distributed.kv_connector.base": "KVConnectorBase_V1 KVConnectorRole SupportsHMA"
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "quire.distributed.kv_connector.base": """KVConnectorBase_V1 KVConnectorRole
            KVConnectorMetadata KVConnectorHandshakeMetadata KVConnectorWorkerMetadata
            SupportsHMA"""
    },
    "vllm.v1.core.kv_cache_manager": {"quire.distributed.kv_connector.views": "KVCacheBlocks"},
    "vllm.v1.core.sched.output": {
        "quire.distributed.kv_connector.views": """SchedulerOutput=StepView NewRequestData
            CachedRequestData"""
    },
    "vllm.v1.outputs": {"quire.distributed.kv_connector.views": "KVConnectorOutput"},
    "vllm.v1.request": {
        "quire.distributed.kv_connector.views": "Request=ConnectorRequest RequestStatus"
    },
    "vllm.forward_context": {"quire.distributed.kv_connector.views": "ForwardContext"},
    "vllm.distributed.parallel_state": {
        "quire.as_vllm.stand_ins": """cleanup_dist_env_and_memory
            destroy_model_parallel=nothing_to_destroy
            destroy_distributed_environment=nothing_to_destroy
            get_pp_group=group_of_one get_tp_group=group_of_one""",
        "quire.distributed.world": "get_world_group",
    },
    "vllm.distributed.device_communicators.pynccl": {
        "quire.distributed.trainer_group": "PyNcclCommunicator"
    },
    "vllm.distributed.utils": {"quire.distributed.trainer_group": "StatelessProcessGroup"},
    "vllm.distributed.weight_transfer": _TRANSFER_FACTORIES,
    "vllm.distributed.weight_transfer.base": {
        "quire.params.weight_transfer": "WeightTransferInitRequest WeightTransferUpdateRequest",
        "quire.executor.weight_transfer.engines": "WeightTransferEngine",
        "quire.trainers.patches": "SparseWeightPatch",
    },
    "vllm.distributed.weight_transfer.factory": _TRANSFER_FACTORIES,
    "vllm.distributed.weight_transfer.ipc_engine": {
        "quire.executor.weight_transfer.memory_engine": """IPCWeightTransferInitInfo=MemoryInitInfo
            IPCWeightTransferUpdateInfo=MemoryUpdateInfo""",
        "quire.trainers.senders": "IPCTrainerInitInfo",
        "quire.trainers.earlier": "IPCTrainerSendWeightsArgs IPCWeightTransferEngine",
    },
    "vllm.distributed.weight_transfer.nccl_common": {
        "quire.executor.weight_transfer.group_engine": "NCCLWeightTransferInitInfo=GroupInitInfo",
        "quire.trainers.earlier": "trainer_init",
    },
    "vllm.distributed.weight_transfer.nccl_engine": {
        "quire.executor.weight_transfer.group_engine": """NCCLWeightTransferInitInfo=GroupInitInfo
            NCCLWeightTransferUpdateInfo=GroupUpdateInfo""",
        "quire.trainers.senders": "NCCLTrainerInitInfo",
        "quire.trainers.earlier": "NCCLTrainerSendWeightsArgs NCCLWeightTransferEngine",
    },
    "vllm.distributed.weight_transfer.sparse_nccl_engine": {
        "quire.executor.weight_transfer.patch_engine": """
            SparseNCCLWeightTransferUpdateInfo=PatchUpdateInfo""",
        "quire.trainers.patches": "SparseNCCLTrainerInitInfo SparseWeightPatch",
    },
    "vllm.distributed.weight_transfer.packed_tensor": {
        "quire.trainers.earlier": "packed_nccl_broadcast_producer"
    },
    "vllm.distributed.weight_transfer.weight_source": {
        "quire.trainers.sources": "ModuleSource ParamMeta WeightSource layerwise_groups"
    },
    "vllm.distributed.weight_transfer.clients": {
        "quire.trainers.clients": """VLLMWeightSyncClient=WeightSyncClient
            HTTPVLLMWeightSyncClient=HTTPWeightSyncClient
            RayVLLMWeightSyncClient=RayWeightSyncClient"""
    },
    "vllm.engine.arg_utils": _ENGINE_ARGS,
    "vllm.engine.async_llm_engine": _ASYNC_ENGINE,
    "vllm.engine.llm_engine": _SYNC_ENGINE,
    "vllm.engine.protocol": {"quire": "EngineClient=AsyncLLM", "quire.engine": "StreamingInput"},
    "vllm.entrypoints.chat_utils": _CHAT_TEMPLATES,
    "vllm.renderers.chat_utils": _CHAT_TEMPLATES,
    "vllm.entrypoints.pooling.utils": {
        "quire.as_vllm.encodings": "MetadataItem build_metadata_items decode_pooling_output"
    },
    "vllm.utils.serial_utils": {
        "quire.as_vllm.encodings": """EMBED_DTYPES ENDIANNESS DTypeInfo=NumberFormat binary2tensor
            tensor2binary tensor2base64"""
    },
    COMMAND: {"quire.cli.main": "main"},
    "vllm.entrypoints.generate.beam_search.utils": _BEAMS,
    "vllm.entrypoints.llm": _LLM,
    "vllm.entrypoints.openai.api_server": {
        "quire.as_vllm.server": """main=api_server run_server build_app init_app_state
            build_async_engine_client build_async_engine_client_from_engine_args"""
    },
    "vllm.entrypoints.openai.cli_args": {
        "quire.as_vllm.server": "make_arg_parser validate_parsed_serve_args"
    },
    "vllm.entrypoints.openai.run_batch": {"quire.as_vllm.server": "main=batch_runner"},
    "vllm.envs": {"quire.as_vllm.envs": "environment_variables"},
    "vllm.plugins.io_processors.interface": {"quire.io_processor": "IOProcessor"},
    "vllm.plugins": {
        "quire.plugins": "load_general_plugins",
        "quire.as_vllm.stand_ins": "load_plugins_by_group",
    },
    "vllm.reasoning": {"quire.as_vllm.parsers": "ReasoningParserManager"},
    "vllm.tool_parsers": {"quire.as_vllm.parsers": "ToolParserManager"},
    "vllm.exceptions": {
        "quire.errors": """VLLMError=EngineError VLLMClientError=RequestError
            VLLMServerError=EngineError VLLMValidationError=RequestError GenerationError
            QueueOverflowError MaxQueuedTokensError EngineDeadError EngineGenerateError
            ProfilerAlreadyActiveError=ProfilerAlreadyActive GracefulHTTPError=CapacityError
            VLLMNotFoundError=AdapterNotFound LoRAAdapterNotFoundError=AdapterNotFound"""
    },
    "vllm.inputs": _INPUTS,
    "vllm.inputs.data": _INPUTS,
    "vllm.inputs.llm": _INPUTS,
    "vllm.logger": {"quire.as_vllm.stand_ins": "init_logger"},
    "vllm.logits_process": {"quire.runner.sampling": "LogitsProcessor=RequestLogitsProcessor"},
    "vllm.logprobs": {"quire.outputs": "Logprob FlatLogprobs PromptLogprobs SampleLogprobs"},
    "vllm.lora.request": {"quire.lora.request": "LoRARequest"},
    "vllm.lora.resolver": {
        "quire.lora.resolver": "LoRAResolver",
        "quire.as_vllm.registries": "LoRAResolverRegistry",
    },
    "vllm.plugins.lora_resolvers.filesystem_resolver": {
        "quire.lora.resolver": "FilesystemResolver=FolderResolver"
    },
    "vllm.model_executor.layers.quantization": {
        "quire.as_vllm.registries": "register_quantization_config"
    },
    "vllm.model_executor.model_loader": {
        "quire.as_vllm.stand_ins": "ShardedStateLoader=ShardedFiles",
        "quire.as_vllm.registries": "register_model_loader",
        "quire.as_vllm.loaders": "DefaultModelLoader=FolderLoader get_model_loader",
    },
    "vllm.model_executor.model_loader.default_loader": {
        "quire.as_vllm.loaders": "DefaultModelLoader=FolderLoader"
    },
    "vllm.model_executor.model_loader.reload": _RELOAD,
    "vllm.model_executor.model_loader.reload.layerwise": _RELOAD,
    "vllm.model_executor.model_loader.utils": {
        "quire.as_vllm.loaders": "process_weights_after_loading"
    },
    "vllm.model_executor.utils": {"quire.as_vllm.processes": "set_random_seed"},
    "vllm.model_executor.models": {"quire": "ModelRegistry"},
    "vllm.model_executor.models.registry": {"quire": "ModelRegistry"},
    "vllm.outputs": {
        "quire.outputs": "CompletionOutput RequestOutput",
        "quire.pooling_outputs": """PoolingOutput PoolingRequestOutput EmbeddingOutput
            EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput
            ScoringRequestOutput""",
    },
    "vllm.platforms": {"quire.as_vllm.stand_ins": "current_platform"},
    "vllm.pooling_params": {"quire.params": "PoolingParams"},
    "vllm.renderers.hf": {"quire.as_vllm.stand_ins": "resolve_chat_template"},
    "vllm.sampling_params": {
        "quire.params": """SamplingParams BeamSearchParams StructuredOutputsParams
            RepetitionDetectionParams RequestOutputKind SamplingType"""
    },
    "vllm.sequence": {"quire.outputs": "Logprob PromptLogprobs SampleLogprobs"},
    "vllm.tokenizers": _TOKENIZER,
    "vllm.transformers_utils.config": {"quire.as_vllm.stand_ins": "get_config"},
    "vllm.transformers_utils.tokenizer": {
        **_TOKENIZER,
        "quire.as_vllm.stand_ins": """get_tokenizer cached_get_tokenizer=get_tokenizer
            cached_tokenizer_from_config=tokenizer_of AnyTokenizer=TokenizerLike""",
    },
    "vllm.usage.usage_lib": {"quire.as_vllm.stand_ins": "UsageContext"},
    "vllm.utils": {
        "quire.config.args.command_line": "FlexibleArgumentParser=QuireParser",
        **_NETWORK,
        "quire.as_vllm.stand_ins": "random_uuid Counter=Numbering get_ip get_open_port",
        "quire.as_vllm.asynchronous": _ASYNC,
        "quire.as_vllm.processes": f"{_PROCESSES} set_random_seed",
        "quire.as_vllm.values": f"{_LISTS} {_SIZES} cdiv round_up resolve_obj_by_qualname",
        "quire.as_vllm.torch_types": "STR_DTYPE_TO_TORCH_DTYPE",
    },
    "vllm.utils.async_utils": {"quire.as_vllm.asynchronous": _ASYNC},
    "vllm.utils.collection_utils": {"quire.as_vllm.values": _LISTS},
    "vllm.multimodal.image": {"quire.as_vllm.pictures": "convert_image_mode"},
    "vllm.multimodal.utils": {
        "quire.as_vllm.pictures": "fetch_image encode_image_base64 encode_image_url"
    },
    "vllm.utils.import_utils": {"quire.as_vllm.values": "resolve_obj_by_qualname"},
    "vllm.utils.math_utils": {"quire.as_vllm.values": "cdiv round_up round_down"},
    "vllm.utils.mem_constants": {"quire.as_vllm.values": _SIZES},
    "vllm.utils.system_utils": {"quire.as_vllm.processes": _PROCESSES},
    "vllm.utils.torch_utils": {
        "quire.as_vllm.processes": "set_random_seed",
        "quire.as_vllm.torch_types": "STR_DTYPE_TO_TORCH_DTYPE",
    },
    "vllm.utils.argparse_utils": {
        "quire.config.args.command_line": "FlexibleArgumentParser=QuireParser"
    },
    "vllm.utils.counter": {"quire.as_vllm.stand_ins": "Counter=Numbering"},
    "vllm.utils.network_utils": _NETWORK,
    "vllm.utils.print_utils": {"quire.as_vllm.stand_ins": "print_embeddings"},
    "vllm.v1.engine": {
        "quire.engine": """EngineCoreEvent EngineCoreEventType EngineCoreOutput EngineCoreOutputs
            EngineCoreReadyResponse EngineCoreRequest EngineCoreRequestType EngineStatusType
            FINISH_REASON_STRINGS FinishReason PauseMode ReconfigureDistributedRequest
            ReconfigureRankType UtilityOutput"""
    },
    "vllm.v1.engine.async_llm": {
        "quire": "AsyncLLM AsyncEngineArgs SamplingParams PoolingParams RequestOutput",
        "quire.engine": "InputStreamError StreamingInput",
    },
    "vllm.v1.engine.core": {
        "quire.engine": """DPEngineCoreActor DPEngineCoreProc EngineCore EngineCoreProc
            HANDSHAKE_TIMEOUT_MINS""",
    },
    "vllm.v1.engine.detokenizer": {
        REFUSED: """IncrementalDetokenizer FastIncrementalDetokenizer
            SlowIncrementalDetokenizer"""
    },
    "vllm.v1.engine.logprobs": {REFUSED: "LogprobsProcessor"},
    "vllm.v1.engine.parallel_sampling": {REFUSED: "ParentRequest"},
    "vllm.v1.engine.core_client": {"quire.engine": _CLIENTS},
    "vllm.v1.engine.coordinator": {"quire.engine": "DPCoordinator DPCoordinatorProc"},
    "vllm.v1.engine.exceptions": _ERRORS,
    "vllm.v1.engine.input_processor": {"quire.engine.frontend.input_processor": "InputProcessor"},
    "vllm.v1.engine.llm_engine": _SYNC_ENGINE,
    "vllm.v1.engine.output_processor": {
        "quire.engine": "RequestOutputCollector",
        "quire.engine.frontend.output_processor": "OutputProcessor",
    },
    "vllm.v1.engine.utils": {
        "quire.engine": "EngineZmqAddresses",
        REFUSED: "CoreEngineProcManager launch_core_engines",
    },
    "vllm.v1.executor": _EXECUTOR,
    "vllm.v1.executor.abstract": _EXECUTOR,
    "vllm.v1.executor.ray_utils": {"quire": "initialize_ray_cluster"},
    "vllm.v1.metrics.loggers": {
        "quire.engine.stats.loggers": """StatLoggerBase AggregateStatLoggerBase LoggingStatLogger
            AggregatedLoggingStatLogger StatLoggerFactory"""
    },
    "vllm.v1.metrics.reader": {
        "quire.observability.metrics": "Counter Gauge Histogram Metric Vector",
    },
    "vllm.v1.metrics.stats": {
        "quire.engine": "SchedulerStats",
        "quire.engine.stats.request_drafts": "RequestSpecDecodeMetrics",
        "quire.engine.stats.step_stats": "FinishedRequestStats IterationStats",
        "quire.outputs": "RequestStateStats",
    },
    "vllm.v1.sample.logits_processor": _PROCESSORS,
    "vllm.v1.sample.logits_processor.builtin": {"quire.runner.sampling": "process_dict_updates"},
    "vllm.v1.sample.logits_processor.interface": _PROCESSORS,
    "vllm.version": {"quire.as_vllm.table": "__version__=VERSION __version_tuple__=VERSION_TUPLE"},
}
"""Module -> our or the standard library's module -> its names; `theirs=ours` where they differ."""

MODULES = frozenset(
    module.rsplit(".", cut)[0] for module in SERVED for cut in range(module.count(".") + 1)
)
"""All of them, with the packages that they are in."""

PROGRAMS = {
    COMMAND: "import sys; from quire.cli.main import main; sys.exit(main())",
    "vllm.entrypoints.openai.api_server": (
        "import sys; from quire.as_vllm.server import api_server; sys.exit(api_server())"
    ),
    "vllm.entrypoints.openai.run_batch": (
        "import sys; from quire.as_vllm.server import batch_runner; sys.exit(batch_runner())"
    ),
}
"""Modules -> the function that `python -m` runs."""

VERSION_TUPLE = tuple(int(part) for part in VERSION.split("."))

_ONE_ENGINE = "There is one engine, with a scheduler and workers of its own."
_REASONS = {
    ROOT: "Names of vLLM's inside have no counterpart.",
    "vllm.assets": "vLLM's samples of pictures, sounds and films are downloads of its own.",
    "vllm.attention": "The provider of attention is chosen by what it supports.",
    "vllm.benchmarks": "Use quire bench.",
    "vllm.collect_env": "Use quire doctor.",
    "vllm.compilation": "Nothing is compiled.",
    "vllm.config": "Options are fields of EngineArgs, given by name or as a dict.",
    "vllm.device_allocator": "sleep and wake_up need no preparation.",
    "vllm.distributed.kv_transfer": "Connectors of K/V are written against "
    "vllm.distributed.kv_transfer.kv_connector.v1.base; kv_transfer_config names them.",
    "vllm.distributed.weight_transfer": "The parts of weight transfers with a counterpart are in "
    "docs/weight_updates.md.",
    "vllm.distributed": "Workers of a model exchange through quire.distributed.",
    "vllm.engine.metrics": "Stat loggers are in vllm.v1.metrics.loggers.",
    "vllm.entrypoints": "The server is one program: quire serve, or run_server and build_app of "
    "vllm.entrypoints.openai.api_server.",
    "vllm.entrypoints.openai.protocol": "Bodies of requests are JSON as OpenAI's client sends it.",
    "vllm.envs": "Its variables are those of docs/compatibility.md; others mean nothing here.",
    "vllm.v1.engine.detokenizer": "Texts are made by IncrementalDetokenizer of "
    "quire.text.detokenizer.",
    "vllm.v1.engine.logprobs": "Log-probabilities are in RequestOutput and CompletionOutput.",
    "vllm.v1.engine.parallel_sampling": "Completions of one request are joined by the engine.",
    "vllm.exceptions": "What is raised is in quire.errors.",
    "vllm.forward_context": "Models are described, not programmed: see docs/models.md.",
    "vllm.model_executor": "Models are described, not programmed: see docs/models.md.",
    "vllm.multimodal": "Of its parts, fetch_image and those that encode pictures have a "
    "counterpart; sounds and films are not served.",
    "vllm.plugins": "The groups of plugins are in docs/plugins.md.",
    "vllm.profiler": "Use LLM.start_profile and stop_profile.",
    "vllm.reasoning": "The formats of reasoning are in docs/tools_and_reasoning.md.",
    "vllm.sampling_params.GuidedDecodingParams": "It is StructuredOutputsParams.",
    "vllm.tool_parsers": "The formats of tool calls are in docs/tools_and_reasoning.md.",
    "vllm.tracing": "Use the option otlp_traces_endpoint.",
    "vllm.utils": "Of the helpers, those have a counterpart that have nothing to do with vLLM's "
    "own inside.",
    "vllm.v1": _ONE_ENGINE,
    "vllm.v1.core": "The scheduler has no parts to replace.",
    "vllm.v1.metrics": "Metrics are read with get_metrics(), at /metrics, or by a StatLoggerBase "
    "of your own.",
    "vllm.v1.worker": "The worker has no parts to replace; worker_extension_cls adds methods to "
    "it.",
    "vllm.worker": "The worker has no parts to replace; worker_extension_cls adds methods to it.",
}
"""Reasons for missing names, by their beginning; the longest beginning counts."""


@cache
def names_of(module: str) -> dict[str, tuple[str, str]]:
    """The names of a module: theirs -> (our module, our name)."""
    return {
        theirs: (home, ours or theirs)
        for home, names in SERVED.get(module, {}).items()
        for theirs, _, ours in (name.partition("=") for name in names.split())
    }


def why_missing(name: str) -> str:
    """A sentence about a module or a name that has no counterpart."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    reasons = (_REASONS[each] for each in beginnings if each in _REASONS)
    instead = UNBUILT_NAMES.get(parts[-1]) or next(reasons, "")
    return " ".join(f"Quire has no {name}. {instead} docs/compatibility.md has the list.".split())
