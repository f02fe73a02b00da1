"""The reference's engine, name by name: each is there, or says what to do instead."""

import asyncio

import pytest

import quire.engine
from quire.engine.client.client import CoreStatus, EngineStatusType
from quire.engine.unbuilt import UNBUILT_NAMES, Refused
from quire.errors import NotBuiltYet

NAMES = [
    *("EngineCoreRequest", "EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequestType"),
    *("FinishReason", "UtilityOutput", "ReconfigureDistributedRequest", "ReconfigureRankType"),
    *("EngineCoreEventType", "EngineCoreReadyResponse", "EngineStatusType", "PauseMode"),
    *("EngineCore", "EngineCoreProc", "DPEngineCoreProc", "DPEngineCoreActor"),
    *("ENGINE_CORE_DEAD", "POLLING_TIMEOUT_S", "HANDSHAKE_TIMEOUT_MINS", "DPCoordinator"),
    *("EngineHandshakeMetadata", "EngineZmqAddresses", "EngineCoreClient", "InprocClient"),
    *("MPClient", "SyncMPClient", "AsyncMPClient", "DPAsyncMPClient", "DPLBAsyncMPClient"),
    *("AsyncLLM", "LLMEngine", "RequestOutputCollector", "InputStreamError", "StreamingInput"),
    *("EngineDeadError", "EngineGenerateError"),
]

LORA = "add_lora remove_lora list_loras pin_lora "
CONTROL = (
    "reset_mm_cache reset_prefix_cache reset_encoder_cache sleep wake_up is_sleeping "
    "collective_rpc get_weight_version release_kv_cache_memory get_supported_tasks "
)
METHODS = {
    "LLMEngine": "from_vllm_config from_engine_args add_request step abort_request "
    "get_num_unfinished_requests has_unfinished_requests has_unfinished_requests_dp "
    "start_profile stop_profile get_metrics tokenizer get_tokenizer do_log_stats "
    "do_log_stats_with_interval apply_model set_weight_version " + LORA + CONTROL,
    "AsyncLLM": "from_vllm_config from_engine_args generate encode add_request abort "
    "pause_generation resume_generation is_paused get_tokenizer tokenizer is_tracing_enabled "
    "do_log_stats check_health start_profile stop_profile wait_for_requests_to_drain "
    "scale_elastic_ep is_running is_stopped errored dead_error shutdown check_admission "
    "get_num_unfinished_requests get_num_queued_tokens checkpoint_prepare checkpoint_restore "
    "compute_weight_checksums handle_fault get_status init_weight_transfer_engine "
    "start_weight_update start_draft_weight_update update_weights finish_weight_update "
    "update_weight_version notify_kv_transfer_request_rejected get_kv_event_sources "
    + LORA + CONTROL,
    "EngineCore": "add_request abort_requests execute_model step step_with_batch_queue shutdown "
    "profile execute_dummy_batch save_sharded_state save_tensorized_model pause_scheduler "
    "resume_scheduler is_scheduler_paused set_weight_version preprocess_add_request post_step "
    + LORA + CONTROL,
    "EngineCoreProc": "run_engine_core ENGINE_CORE_DEAD add_request",
    "DPEngineCoreProc": "run_engine_core ENGINE_CORE_DEAD",
    "EngineCoreRequest": "sampling_params prompt_token_ids priority arrival_time cache_salt "
    "data_parallel_rank client_index current_wave resumable",
    "EngineCoreOutput": "new_token_ids new_logprobs finish_reason stop_reason events finished "
    "num_cached_tokens",
    "EngineCoreOutputs": "engine_index outputs timestamp utility_output wave_complete start_wave",
}  # fmt: skip
ALL = [(owner, name) for owner, names in METHODS.items() for name in names.split()]


@pytest.mark.parametrize("name", NAMES)
def test_a_documented_name_is_there_or_says_why_not(name):
    if name not in UNBUILT_NAMES:
        assert getattr(quire.engine, name) is not None
        assert name in quire.engine.__all__
        return
    with pytest.raises(AttributeError, match="does not implement it"):
        getattr(quire.engine, name)


@pytest.mark.parametrize(("owner", "name"), ALL, ids=map(".".join, ALL))
def test_a_documented_member_is_there_or_says_why_not(owner, name):
    kind = getattr(quire.engine, owner)
    found = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
    if isinstance(found, Refused):
        with pytest.raises(NotBuiltYet, match=name):
            getattr(kind, name)(1, two=2)


def test_a_refusal_by_an_awaited_method_comes_before_the_await():
    async def call():
        await quire.engine.AsyncLLM.handle_fault(None, "retry")

    with pytest.raises(NotBuiltYet, match="max_core_restarts"):
        asyncio.run(call())


def test_events_and_states_have_the_numbers_and_words_of_the_reference():
    kinds = quire.engine.EngineCoreEventType
    assert [kind.value for kind in (kinds.QUEUED, kinds.SCHEDULED, kinds.PREEMPTED)] == [1, 2, 3]
    dead = CoreStatus(0, 1, 5, is_running=False, is_started=True)
    well = CoreStatus(0, 1, 5, is_running=True, is_started=True)
    late = CoreStatus(0, 1, 5, is_running=True, is_started=True, silent_s=9.0)
    assert [status.status(5.0) for status in (dead, well, late)] == [
        EngineStatusType.DEAD, EngineStatusType.HEALTHY, EngineStatusType.UNHEALTHY
    ]  # fmt: skip
