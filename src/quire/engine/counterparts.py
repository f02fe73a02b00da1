"""Documented attributes of the engine's classes that are not there, and what stands in their place.

Reading one raises AttributeError with that sentence. Methods that are there and refuse are in
unbuilt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

_STATS = "Statistics are in the stat loggers of the engine, and in get_metrics()."
_PLAN = "Read it from the plan: vllm_config of the engine."
_QUEUES = "The core's one thread takes from its sockets between steps; there are no queues."
_WAVES = "Waves are counted by the coordinator (DPCoordinator) and the core's own loop."
_MEDIA = "There are no media to keep."
_SOCKETS = "Sockets and processes belong to the client's `remote`; use core_status(engine_index)."
_ENGINE = "Call the method of that name of the engine, which asks every core."
_AWAIT = "Await call(Utility(...)) of the client, or the method of that name of AsyncLLM."
_FAULTS = "Cores that die are restarted without being asked: max_core_restarts."
_CONNECTOR = "There is no KV connector to ask."
_VERBS = (
    *("get_supported_tasks", "profile", "reset_mm_cache", "reset_prefix_cache"),
    *("reset_encoder_cache", "sleep", "release_kv_cache_memory", "wake_up", "is_sleeping"),
    *("execute_dummy_batch", "set_weight_version", "get_weight_version", "add_lora"),
    *("remove_lora", "list_loras", "pin_lora", "save_sharded_state", "collective_rpc"),
)
_AWAITED = (
    *_VERBS,
    *("pause_scheduler", "resume_scheduler", "is_scheduler_paused", "compute_weight_checksums"),
)
_CLIENT: dict[str, str] = {
    **dict.fromkeys(_VERBS, _ENGINE),
    **{f"{name}_async": _AWAIT for name in _AWAITED},
    "get_output_async": "Await get_output() of an AsyncMPClient.",
    "add_request_async": "Call add_request, which never waits.",
    "abort_requests_async": "Call abort_requests, which never waits.",
    "make_client": "Use LLMEngine or AsyncLLM, or launch_front_end of quire.engine.launcher.",
    "make_async_mp_client": "Use AsyncLLM, or launch_front_end of quire.engine.launcher.",
    "get_kv_event_sources": "The endpoints are those of kv_events_config.",
    "handle_fault": _FAULTS,
    "get_status": "Use core_status(engine_index).",
    "prepare_elastic_ep": "Call scale_elastic_ep of AsyncLLM.",
    "commit_elastic_ep": "Call scale_elastic_ep of AsyncLLM.",
}
_PROCESS_CLIENT: dict[str, str] = {
    **_CLIENT,
    **dict.fromkeys(
        ("ctx", "resources", "input_socket", "stats_update_address", "core_engine"), _SOCKETS
    ),
    "vllm_config": _PLAN,
    "encoder": "Each socket has an encoder of its own: MessageEncoder, of quire.processes.",
    "decoder": "Each socket has a decoder of its own: MessageDecoder of quire.processes.",
    "core_engines": "Use engine_indices.",
    "engine_ranks_managed": "Use engine_indices.",
    "engines_running": "Use core_status(engine_index).has_work.",
    "utility_results": "call(Utility(...)) gives the answer.",
    "outputs_queue": "Use get_output().",
    "output_queue_thread": "Outputs are taken where get_output() is called.",
    "ensure_alive": "Every method raises EngineDeadError where the engine is dead.",
    "start_engine_core_monitor": "Processes are watched as soon as they start.",
    "is_dp": "Use len(engine_indices) > 1.",
    "client_count": "An engine has one front end; quire serve --api-server-count starts several.",
    "client_index": "An engine has one front end; quire serve --api-server-count starts several.",
    "call_utility": "Use call(Utility(method, args)) of quire.engine.wire.control_calls.",
    "call_utility_async": "Await call(Utility(method, args)).",
    "call_utility_all_async": "Await call(Utility(method, args)), which asks every core.",
    "call_utility_consensus_async": "Await call(Utility(method, args)), which asks every core.",
    "get_core_engine_for_request": "Use engine_of(handle).",
    "current_wave": _WAVES,
    "lb_engines": "Loads are in the client's `remote`; use core_status(engine_index).",
    "eep_scaling_cache": "Call scale_elastic_ep of AsyncLLM.",
    "first_req_sock_addr": _WAVES,
    "first_req_send_socket": _WAVES,
}

COUNTERPARTS: Mapping[str, Mapping[str, str]] = {
    "EngineCore": {
        "available_gpu_memory_for_kv_cache": "The plan has it: num_blocks, and block_size.",
        "structured_output_manager": "Grammars are compiled by the core itself.",
        "use_spec_decode": "Read vllm_config.speculation, which is None without drafts.",
        "check_for_draft_tokens": "Read vllm_config.speculation, which is None without drafts.",
        "mm_receiver_cache": _MEDIA,
        "is_mm_encoder_only": _MEDIA,
        "is_pooling_model": "Read vllm_config.pooler, which is None for models that generate.",
        "batch_queue": "step() keeps several steps in flight where the device can.",
        "batch_queue_size": "Read vllm_config.max_steps_in_flight.",
        "request_block_hasher": "Keys of blocks are computed by the scheduler.",
        "step_fn": "Call step().",
        "async_scheduling": "Read vllm_config.max_steps_in_flight, which is above 1 then.",
        "aborts_queue": "Call abort_requests.",
        "get_kv_cache_group_metadata": "Read executor.facts.kv_groups.",
        "log_error_detail": "A failed step is logged by itself.",
        "capture_iteration_details": _STATS,
        "compute_weight_checksums": "Compare the files of the checkpoint.",
    },
    "EngineCoreProc": {
        "addresses": "It is a part of the message that the process was started with.",
        "input_queue": _QUEUES,
        "output_queue": _QUEUES,
        "output_thread": _QUEUES,
        "engine_index": "It is a part of the message that the process was started with.",
        "engines_running": "Read core.has_work.",
        "shutdown_state": "Call request_shutdown(drain_s); run() returns when it is over.",
        "tensor_ipc_receiver": _MEDIA,
        "has_coordinator": _WAVES,
        "frontend_stats_publish_address": _STATS,
        "publish_dp_lb_stats": _STATS,
        "last_counts": _STATS,
        "process_input_queue_block": _QUEUES,
        "enable_fault_tolerance": _FAULTS,
        "ft_sentinel": _FAULTS,
        "startup_handshake": "The launcher sends a StartMessage, and run() answers with READY.",
        "has_work": "Read core.has_work.",
        "is_running": "run() returns when it is over; a client asks core_status(engine_index).",
        "run_busy_loop": "Call run().",
        "process_input_sockets": _QUEUES,
        "process_output_sockets": _QUEUES,
        **dict.fromkeys(
            ("pause_scheduler", "resume_scheduler", *_VERBS), "Call the method of `core`."
        ),
        "step": "run() steps; call core.step() where it does not run.",
        "shutdown": "Call request_shutdown(drain_s).",
        # of DPEngineCoreProc
        "prefill_schedule_interval": "Every core schedules prompts in each step.",
        "dp_sync_interval": "Cores that share experts meet in every step.",
        "step_counter": _WAVES,
        "current_wave": _WAVES,
        "pending_pause": "Read core.is_scheduler_paused().",
        "ignore_start_dp_wave": _WAVES,
        "eep_scaling_state": "Call scale_elastic_ep of AsyncLLM, which adds and ends whole cores.",
        "barrier": "Cores that share experts meet in every step.",
        "reinitialize_distributed": "Call scale_elastic_ep of AsyncLLM.",
        "commit_prepared_elastic_ep": "Call scale_elastic_ep of AsyncLLM.",
    },
    "EngineAttributes": {
        "observability_config": "Read vllm_config.observability_config.",
        "scheduler_config": "Read vllm_config.scheduler_config.",
        "external_launcher_dp": "Processes of a launcher beyond those of one model are copies of "
        "the engine, which know nothing of each other.",
        "should_execute_dummy_batch": "Cores that share experts do that in their processes.",
        "logger_manager": _STATS,
        "dp_group": "Cores that share experts are processes of their own.",
        "log_requests": "Requests are logged by servers: enable_log_requests.",
        "admission_stats": "Call get_num_unfinished_requests() and get_num_queued_tokens().",
        "output_handler": "Streams are fed by a task of their own; check_health() says how it is.",
        "profiler": "Call start_profile() and stop_profile().",
    },
    "InputProcessor": {
        **dict.fromkeys(
            ("vllm_config", "model_config", "cache_config", "lora_config", "scheduler_config"),
            _PLAN,
        ),
        "speculative_config": _PLAN,
        "structured_outputs_config": _PLAN,
        "observability_config": _PLAN,
        "diffusion_config": "Models that generate by diffusion are not built.",
        "validate_logits_processors_params": "process_inputs does that.",
        "generation_config_fields": "Call get_default_sampling_params() of LLM.",
        "renderer": "Chats are rendered by render_chat of quire.text.chat.",
        "supports_mm_inputs": _MEDIA,
        "mm_encoder_cache_size": _MEDIA,
        "skip_prompt_length_check": "The length of a prompt is always checked.",
        "process_inputs_async": "Call process_inputs, which never waits.",
        "get_tokenizer": "Read tokenizer.",
        "resolve_watermarking": "Watermarks are not built.",
        "apply_watermarking": "Watermarks are not built.",
        "inject_into_mm_cache": _MEDIA,
        "assign_request_id": "process_inputs gives a request its id.",
    },
    "OutputProcessor": {
        "log_stats": "Read log_stats of the engine.",
        "tokenizer": "Read tokenizer of the engine.",
        "stream_interval": "Read vllm_config.stream_interval.",
        "parent_requests": "Completions of one request are joined in its group.",
        "external_req_ids": "Call unfinished_ids().",
        "lora_states": _STATS,
        "tracing_enabled": "Await is_tracing_enabled() of AsyncLLM.",
        "admission_stats": "Read num_unfinished and num_queued_tokens.",
        "has_request": "Call handle_of(internal_id).",
        "propagate_error": "Call fail_all(error).",
        "abort_requests": "Call abort of the engine's front_end.",
        "add_request": "Call add_request of the engine.",
        "process_outputs": "Call process(outputs).",
        "update_scheduler_stats": _STATS,
        "do_tracing": "Spans are sent where requests end.",
    },
    "RequestOutputCollector": {
        "aggregate": "put joins deltas where the request asked for them.",
        "output": "Call get_nowait().",
        "ready": "Await get().",
    },
    "InprocClient": {**_CLIENT, "dp_engines_running": "Cores that share experts are processes."},
    "MPClient": {**_PROCESS_CLIENT, "dp_engines_running": _WAVES},
}
"""Class -> its documented attributes that are not there -> what to do instead."""


class _Counterpart:
    """Stands for a documented attribute that objects lack; one that has it keeps its own."""

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def __get__(self, instance: object, owner: type) -> NoReturn:
        text = f"{owner.__name__} has no attribute {self._name!r}. {self._hint}"
        raise AttributeError(text, name=self._name, obj=instance)


class HasCounterparts:
    """Says what stands in the place of a documented attribute that the class lacks.

    A `__getattr__` would make every attribute that is there slower to read, self's own too.
    """

    __slots__ = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for kind in cls.__mro__:
            for name, hint in COUNTERPARTS.get(kind.__name__, {}).items():
                own = _attribute(cls, name)
                setattr(cls, name, _Counterpart(name, hint) if own is None else own)


def _attribute(cls: type, name: str) -> Any:
    """The class's attribute, of whichever base; None for a counterpart or nothing."""
    found = (vars(base)[name] for base in cls.__mro__ if name in vars(base))
    return next((each for each in found if not isinstance(each, _Counterpart)), None)
