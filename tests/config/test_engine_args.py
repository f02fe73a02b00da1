"""`EngineArgs`: the names, their checks and their command line."""

import argparse
import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest
from reference_page import render

from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.command_line import QuireParser, parse_size, rewrite
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import default_of, fields_of, options_of
from quire.config.resolve.resolve import check_args
from quire.environment import read_environment
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, RequestError, UnknownParameter

ROOT = Path(__file__).parents[2]

WIDELY_USED = [
    "model", "served_model_name", "tokenizer", "tokenizer_mode", "trust_remote_code", "dtype",
    "seed", "max_model_len", "quantization", "enforce_eager", "revision", "tokenizer_revision",
    "code_revision", "hf_token", "hf_overrides", "runner", "convert", "pooler_config",
    "skip_tokenizer_init", "enable_prompt_embeds", "max_logprobs", "logprobs_mode",
    "generation_config", "override_generation_config", "logits_processors", "model_impl",
    "enable_sleep_mode", "allowed_local_media_path", "allowed_media_domains", "load_format",
    "download_dir", "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "kv_cache_dtype", "num_gpu_blocks_override", "enable_prefix_caching",
    "prefix_caching_hash_algo", "kv_offloading_size", "kv_offloading_backend", "cpu_offload_gb",
    "max_num_batched_tokens", "max_num_seqs", "max_num_queued_reqs", "max_num_queued_tokens",
    "enable_chunked_prefill", "scheduling_policy", "async_scheduling", "stream_interval",
    "disable_hybrid_kv_cache_manager", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank",
    "data_parallel_rank", "data_parallel_address", "data_parallel_rpc_port",
    "data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "enable_expert_parallel", "distributed_executor_backend", "nnodes", "node_rank",
    "master_addr", "master_port", "disable_custom_all_reduce",
    "worker_extension_cls", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
    "limit_mm_per_prompt", "mm_processor_kwargs", "media_io_kwargs", "mm_processor_cache_gb",
    "language_model_only", "mm_encoder_tp_mode", "speculative_config", "compilation_config",
    "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    "attention_backend", "structured_outputs_config", "reasoning_parser",
    "kv_events_config", "otlp_traces_endpoint", "profiler_config", "disable_log_stats",
    "shutdown_timeout", "aggregate_engine_logging", "fail_on_environ_validation", "tokens_only",
    "chat_template", "long_prefill_token_threshold",
]  # fmt: skip
CONSTRUCTOR = [
    "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params",
    "enable_return_routed_experts", "return_sampling_mask", "attention_config",
    "quantization_config", "spec_method", "spec_model", "spec_tokens",
]  # fmt: skip


def test_every_widely_used_name_and_every_constructor_name_is_known():
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert names >= {*WIDELY_USED, *CONSTRUCTOR}


def test_defaults_pass_their_own_checks():
    check_args(EngineArgs())
    check_args(AsyncEngineArgs())


def test_arguments_are_a_plain_mutable_dataclass():
    args = EngineArgs("some/model", dtype="float32")
    args.seed = 3
    assert EngineArgs(**vars(args)) == args
    assert EngineArgs(**dataclasses.asdict(args)) == args
    assert copy.deepcopy(args) == args
    assert pickle.loads(pickle.dumps(args)) == args
    assert EngineArgs().hf_overrides is not EngineArgs().hf_overrides


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("max_num_seq", "max_num_seqs"),
        ("device_memory_utilization", "gpu_memory_utilization"),
    ],
)
def test_unknown_keyword_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(UnknownParameter, match=re.escape(f"Did you mean '{near}'?")) as caught:
        EngineArgs(**{name: 1})
    assert isinstance(caught.value, TypeError)
    assert name in str(caught.value)


def test_keyword_like_no_name_is_pointed_to_the_page():
    with pytest.raises(UnknownParameter, match=r"docs/engine_args\.md"):
        EngineArgs(qqq=1)


@pytest.mark.parametrize(
    "given",
    [
        {"decode_context_parallel_size": 2},
        {"decode_context_parallel_size": True},
        {"fully_sharded_loras": True},
        {"code_revision": "main"},
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name_with_advice(given):
    (name,) = given
    with pytest.raises(NotBuiltYet) as caught:
        check_args(EngineArgs(**given))
    text = str(caught.value)
    assert text.startswith(f"{name}={given[name]!r} is not allowed: this release")
    assert text.endswith(options_of(EngineArgs)[name].hint)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "neutral",
    [
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        {"distributed_executor_backend": "uni", "runner": "generate", "convert": "none"},
        {"compilation_config": 0, "optimization_level": 0},
        {"limit_mm_per_prompt": None, "mm_processor_kwargs": {}, "skip_mm_profiling": True},
        {"cpu_offload_gb": 0.0, "model_impl": "vllm"},
    ],
    ids=str,
)
def test_neutral_values_change_nothing_and_pass(neutral):
    check_args(EngineArgs(**neutral))


@pytest.mark.parametrize(
    ("given", "error", "part"),
    [
        ({"dtype": "int8"}, InvalidParameter, "one of auto, half"),
        ({"quantization": "aqlm"}, InvalidParameter, "Use 'int8' or 'int4'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, InvalidParameter, "use 'int8' or, on a GPU, 'fp8'"),
        ({"dtype": 16}, InvalidType, "one of auto, half"),
        ({"max_num_seqs": 0}, InvalidParameter, "an integer >= 1"),
        ({"max_num_seqs": 2.0}, InvalidType, "an integer"),
        ({"max_num_seqs": True}, InvalidType, "an integer"),
        ({"max_num_batched_tokens": "8k"}, InvalidType, "an integer"),
        ({"max_model_len": -2}, InvalidParameter, ">= -1"),
        ({"gpu_memory_utilization": 0}, InvalidParameter, "> 0 and <= 1"),
        ({"gpu_memory_utilization": 1.01}, InvalidParameter, "<= 1"),
        ({"gpu_memory_utilization": float("nan")}, InvalidType, "a number"),
        ({"block_size": -16}, InvalidParameter, ">= 1"),
        ({"stream_interval": 0}, InvalidParameter, ">= 1"),
        ({"long_prefill_token_threshold": -1}, InvalidParameter, ">= 0"),
        ({"num_gpu_blocks_override": 1}, InvalidParameter, "never handed out"),
        ({"kv_cache_memory_bytes": 0}, InvalidParameter, ">= 1"),
        ({"max_logprobs": -2}, InvalidParameter, ">= -1"),
        ({"seed": None}, InvalidType, "an integer"),
        ({"seed": 2**64}, InvalidParameter, "an integer"),
        ({"load_format": "ggml"}, InvalidParameter, "Convert other formats"),
        ({"load_format": "gguf"}, NotBuiltYet, "safetensors files of the same model"),
        ({"tokenizer_mode": "custom"}, InvalidParameter, "tokenizer.json"),
        ({"tokenizer_mode": "slow"}, NotBuiltYet, "use 'auto'"),
        ({"scheduling_policy": "lifo"}, InvalidParameter, "fcfs, priority"),
        ({"logprobs_mode": "logits"}, InvalidParameter, "raw_logits"),
        ({"enable_prefix_caching": 1}, InvalidType, "True or False, or None"),
        ({"served_model_name": []}, InvalidType, "list of strings"),
        ({"hf_overrides": [1]}, InvalidType, "a dict"),
        ({"hf_token": 1}, InvalidType, "True for the token"),
        ({"logits_processors": [3]}, InvalidType, "module:Class"),
        ({"model": 3}, InvalidType, "a string"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(given, error, part):
    (name,) = given
    with pytest.raises(error, match=re.escape(part)) as caught:
        check_args(EngineArgs(**given))
    assert str(caught.value).startswith(f"{name}=")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RequestError)


def test_a_path_is_a_string():
    check_args(EngineArgs(model=Path("/some/folder"), chat_template=Path("/t.jinja")))


def parse(*words):
    return EngineArgs.from_cli_args(EngineArgs.add_cli_args(QuireParser()).parse_args(words))


def test_command_line_without_flags_gives_the_defaults():
    assert parse() == EngineArgs()
    plain = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert EngineArgs.from_cli_args(plain.parse_args([])) == EngineArgs()


def test_every_name_is_a_flag():
    parser = EngineArgs.add_cli_args(QuireParser())
    for field in fields_of(EngineArgs):
        assert "--" + field.name.replace("_", "-") in parser._option_string_actions, field.name


def test_flags_of_each_form():
    args = parse(
        *("--model", "m", "--max_model_len", "8K", "--max-num-batched-tokens=2k"),
        *("--no-enable-prefix-caching", "--enable-chunked-prefill", "--disable-log-stats"),
        *("--served-model-name", "a", "b", "--gpu-memory-utilization", "0.5", "--hf-token"),
        *("--hf-overrides.rope_scaling.factor", "2.0", "--hf-overrides.a=x"),
        *("--hf-overrides", '{"rope_scaling": {"rope_type": "linear"}}', "-tp", "1"),
        *("--override-generation-config", '{"temperature": 0.5}', "--seed", "-1"),
    )
    assert (args.model, args.max_model_len, args.max_num_batched_tokens) == ("m", 8192, 2000)
    assert (args.enable_prefix_caching, args.enable_chunked_prefill) == (False, True)
    assert args.disable_log_stats and args.hf_token is True
    assert args.served_model_name == ["a", "b"]
    assert args.hf_overrides == {"rope_scaling": {"factor": 2.0, "rope_type": "linear"}, "a": "x"}
    assert args.override_generation_config == {"temperature": 0.5}
    assert (args.tensor_parallel_size, args.seed) == (1, -1)
    check_args(args)


def test_what_is_not_built_is_refused_on_the_command_line_too():
    for words in (["--enable-eplb"], ["--code-revision", "main"], ["--watermark", "0.5"]):
        with pytest.raises(NotBuiltYet):
            check_args(parse(*words))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("auto", -1),
        ("-1", -1),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["1.5", "1.5K", "k", "8 kb", "", "1e3", "0x10"])
def test_texts_that_are_not_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-model-len", "long"],
        ["--hf-overrides", "{"],
        ["--hf-overrides", "[1]"],
        ["--no-such-flag"],
        ["--seed"],
    ],
    ids=str,
)
def test_usage_errors_are_one_line_and_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_words_that_are_not_flags_are_left_alone():
    words = ["generate", "a_b.c", "--stop=a_b.c", "-x_y", "--", "--a_b.c", "1"]
    assert rewrite(words) == words


def test_the_reference_page_is_up_to_date():
    page = (ROOT / "docs" / "engine_args.md").read_text(encoding="utf-8")
    assert page == render(), "run PYTHONPATH=src python tools/reference_page.py docs/engine_args.md"


def test_every_option_has_a_sentence_and_a_default_of_its_kind():
    for field in fields_of(EngineArgs):
        option = field.metadata["option"]
        assert option.help and "|" not in option.help + option.hint
        assert option.is_built or option.hint.endswith(".")
        assert default_of(field) is not None or option.is_optional


def test_environment_is_a_table_with_types():
    read = read_environment({"QUIRE_DEBUG": "1", "OMP_NUM_THREADS": "3,1", "QUIRE_CACHE_DIR": "/c"})
    assert (read.debug, read.thread_limit, str(read.cache_dir)) == (True, 3, "/c")
    empty = read_environment({"HOME": "/h"})
    assert (empty.debug, empty.thread_limit, empty.unknown) == (False, None, ())
    assert read_environment({"QUIRE_DEBGU": "1"}).unknown == ("QUIRE_DEBGU",)


@pytest.mark.parametrize(
    "given", [{"QUIRE_DEBUG": "yes"}, {"OMP_NUM_THREADS": "0"}, {"OMP_NUM_THREADS": "two"}], ids=str
)
def test_environment_of_another_form_is_refused(given):
    with pytest.raises(InvalidParameter):
        read_environment(given)
