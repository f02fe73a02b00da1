"""Where events of the KV cache are published: what the option decides, and what it refuses."""

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from quire.engine.core.worker_program import of_core
from quire.errors import InvalidParameter, NotBuiltYet
from quire.tiers.kv_events_config import KVEventsConfig, KVEventsPlan
from tests.config import plans


def planned(given, **args):
    return resolve(
        EngineArgs(kv_events_config=given, **args), plans.make_model(), plans.make_machine()
    )


def events_of(**given):
    return planned({"enable_kv_cache_events": True} | given).memory.kv_events


def test_nothing_is_published_unless_it_is_enabled():
    assert planned(None).memory.kv_events is None
    assert planned({}).memory.kv_events is None
    assert planned({"enable_kv_cache_events": False, "publisher": "zmq"}).memory.kv_events is None
    assert events_of(publisher="null") is None
    assert planned(None).kv_events_config is None


def test_the_defaults_are_the_documented_ones():
    plan = planned({"enable_kv_cache_events": True})
    config = plan.memory.kv_events.config
    assert plan.memory.kv_events == KVEventsPlan(KVEventsConfig(True))
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert plan.kv_events_config is config
    assert plan.reasons["kv_events"] == "kv_events_config: published at tcp://*:5557"


def test_each_core_has_its_endpoints_and_one_after_a_death_greater_numbers():
    plan = planned(
        {
            "enable_kv_cache_events": True,
            "endpoint": "tcp://[::]:6000",
            "replay_endpoint": "ipc:///run/replay",
        }
    )
    ports = [of_core(plan, core).memory.kv_events.endpoint for core in range(3)]
    assert ports == ["tcp://[::]:6000", "tcp://[::]:6001", "tcp://[::]:6002"]
    replays = [of_core(plan, core).memory.kv_events.replay_endpoint for core in range(2)]
    assert replays == ["ipc:///run/replay", "ipc:///run/replay_dp1"]
    numbers = [of_core(plan, 1, deaths).memory.kv_events.first for deaths in range(3)]
    assert numbers == [0, 1 << 32, 2 << 32]
    assert of_core(planned(None), 1).memory.kv_events is None


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"buffer": 5}, InvalidParameter, r"\['buffer'\]=5 .*no such field.*buffer_steps"),
        ({"hwm": "many"}, InvalidParameter, "Expected `int`"),
        ({"hwm": 0}, InvalidParameter, r"\['hwm'\]=0 .*a number of at least 1"),
        ({"buffer_steps": -1}, InvalidParameter, r"\['buffer_steps'\]=-1"),
        ({"max_queue_size": 0}, InvalidParameter, r"\['max_queue_size'\]=0"),
        ({"publisher": "kafka"}, NotBuiltYet, "Use 'zmq' or 'null'"),
        ({"endpoint": "5557"}, InvalidParameter, "tcp://host:port"),
        ({"endpoint": "tcp://*:65536"}, InvalidParameter, "at most 65535"),
        ({"endpoint": "tcp://*:0"}, NotBuiltYet, "Ports are not chosen"),
        ({"replay_endpoint": "http://a"}, InvalidParameter, r"\['replay_endpoint'\]"),
        ({"replay_endpoint": "tcp://*:5557"}, InvalidParameter, "another one than the endpoint"),
    ],
)  # fmt: skip
def test_what_is_refused(given, error, text):
    for is_enabled in (True, False):
        with pytest.raises(error, match=text):
            planned(given | {"enable_kv_cache_events": is_enabled})


def test_it_goes_with_prefix_caching():
    with pytest.raises(InvalidParameter, match="kv_events_config.*prefix cache, which is off"):
        planned({"enable_kv_cache_events": True}, enable_prefix_caching=False)
