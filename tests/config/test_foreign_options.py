"""Options of other engines: readable, accepted where they change nothing, refused by name else."""

import argparse
import logging

import msgspec
import pytest

from quire import EngineArgs
from quire.config.args.foreign_defaults import DEFAULTS, TUNING
from quire.config.plan_parts import ServingPlan
from quire.errors import InvalidParameter, NotBuiltYet


def warnings_of(caplog, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="quire.config.planning"):
        plan = EngineArgs(**options).create_engine_config()
    return plan, [record.getMessage() for record in caplog.records]


def test_every_one_is_readable_and_taken_at_its_default():
    made = EngineArgs(**DEFAULTS)
    assert {name: getattr(EngineArgs(), name) for name in DEFAULTS} == DEFAULTS
    made.create_engine_config()
    EngineArgs().ignore_patterns.append("x")
    assert EngineArgs().ignore_patterns == ["original/**/*"], "each has a list of its own"


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - TUNING))
def test_another_value_is_refused_by_name(name):
    with pytest.raises(NotBuiltYet, match=name):
        EngineArgs(**{name: "something"}).create_engine_config()


def test_those_that_only_tune_are_named_in_one_warning(caplog):
    options = {
        "compilation_config": {"mode": 3, "cudagraph_mode": "FULL"},
        "kernel_config": {"moe_backend": "triton"}, "attention_config": {"backend": "FLASH_ATTN"},
        "prefix_cache_retention_interval": None,
    }  # fmt: skip
    _, [told] = warnings_of(caplog, **options)
    assert all(name in told for name in options)
    assert not warnings_of(caplog, compilation_config=3, kernel_config=None)[1]


def test_what_tunes_another_engine_is_shown_as_it_was_given(caplog):
    plan, [told] = warnings_of(
        caplog, prefix_caching_hash_algo="xxhash", prefix_cache_retention_interval=64
    )
    assert "prefix_caching_hash_algo" in told
    cache = plan.cache_config
    assert (cache.prefix_caching_hash_algo, cache.prefix_cache_retention_interval) == ("xxhash", 64)
    cache = EngineArgs().create_engine_config().cache_config
    assert (cache.prefix_caching_hash_algo, cache.prefix_cache_retention_interval) == ("sha256", 0)
    plan, told = warnings_of(caplog, prefix_caching_hash_algo="sha256_cbor")
    assert plan.cache_config.prefix_caching_hash_algo == "sha256_cbor" and not told
    with pytest.raises(InvalidParameter, match="xxhash_cbor"):
        EngineArgs(prefix_caching_hash_algo="md5").create_engine_config()
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(exit_on_error=False))
    with pytest.raises(argparse.ArgumentError, match="md5"):
        parser.parse_args(["--prefix-caching-hash-algo", "md5"])


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"bogus": [1.0]}, InvalidParameter, "unknown bucket family 'bogus'"),
        ({"request_tokens": []}, InvalidParameter, "request_tokens"),
        ({"request_tokens": [0, 1]}, InvalidParameter, "above 0"),
        ({"request_tokens": [True]}, InvalidParameter, "numbers"),
        ({"request_tokens": [1, float("inf")]}, InvalidParameter, "finite"),
        ({"request_tokens": [2, 2]}, InvalidParameter, "above the one before"),
        ({"kv_cache_residency": [1]}, NotBuiltYet, "not measured"),
    ],
)
def test_bounds_of_buckets_are_checked(given, error, told):
    with pytest.raises(error, match=told):
        EngineArgs(custom_histogram_buckets=given).create_engine_config()


def test_what_tunes_another_engine_reaches_a_process_as_it_was_given():
    given = {
        "enable_flash_late_interaction": False, "safetensors_prefetch_num_threads": 2,
        "performance_mode": "throughput", "prefix_cache_retention_interval": None,
    }  # fmt: skip
    serving = EngineArgs(**given).create_engine_config().serving
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(serving), type=ServingPlan)
    assert arrived.foreign_tuning == given
    assert [type(arrived.foreign_tuning[name]) for name in given] == list(map(type, given.values()))


def test_optimization_level_0_is_eager(caplog):
    plan, told = warnings_of(caplog, optimization_level=0)
    assert not plan.parallel.use_graphs and not told
    assert warnings_of(caplog, optimization_level=2)[0].parallel.use_graphs


def test_values_that_say_nothing():
    same = EngineArgs().create_engine_config()
    for options in (
        {"quantization_config": {}},
        {"max_lora_rank": 64},
        {"limit_mm_per_prompt": {"image": 0, "video": {"count": 0}}},
    ):
        assert EngineArgs(**options).create_engine_config() == same
    bounds = {"limit_mm_per_prompt": {"image": 1}, "allowed_media_domains": "a.example"}
    assert EngineArgs(**bounds).create_engine_config() == same, "text keeps them"
    for name, value in (
        ("mm_processor_kwargs", {"max_pixels": 1}),
        ("media_io_kwargs", {"image": {}}),
        ("limit_mm_per_prompt", {"smell": 1}),
    ):
        with pytest.raises(InvalidParameter, match=name):
            EngineArgs(**{name: value}).create_engine_config()


def test_a_callable_changes_config_json_by_attributes():
    def shorter(config):
        config.max_position_embeddings = 128
        assert config["architectures"] == config.architectures
        with pytest.raises(AttributeError, match="no key 'nothing'"):
            _ = config.nothing
        return config

    plan = EngineArgs(hf_overrides=shorter).create_engine_config()
    assert plan.model.max_model_len == 128
    assert (
        type(plan.model.hf_config) is dict or plan.model.hf_config["max_position_embeddings"] == 128
    )
