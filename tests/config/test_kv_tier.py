"""Where K/V is kept outside of the pool: what the options decide, and what they refuse by name."""

import msgspec
import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.kv_pool_size import gib
from quire.config.resolve.resolve import resolve
from quire.errors import InvalidParameter, NotBuiltYet
from quire.models.cutting.rank_facts import RankFacts
from quire.models.layer_memory import KeyValues, RecurrentState
from quire.plugins.tables import LOAD_FORMATS
from quire.tiers.kv_transfer_config import kv_transfer_config, tier_settings
from quire.tiers.plan import DiskTierPlan, KVTierPlan
from tests.config import plans

GIB = 1 << 30


def planned(machine=None, model=None, **args):
    return resolve(EngineArgs(**args), model or plans.make_model(), machine or plans.make_machine())


def connector(name="OffloadingConnector", extra=None, **fields):
    given = {"kv_connector": name, "kv_role": "kv_both"} | fields
    return given | {"kv_connector_extra_config": {"cpu_bytes_to_use": GIB} | (extra or {})}


def tier_of(config, **args):
    return planned(kv_transfer_config=config, **args).memory.kv_tier


def test_without_a_wish_there_is_none():
    assert planned().memory.kv_tier is None
    assert planned(kv_transfer_config={}).memory.kv_tier is None


def test_the_short_form_and_the_connectors_say_the_same():
    plan = KVTierPlan(GIB)
    assert planned(kv_offloading_size=1).memory.kv_tier == plan
    assert planned(kv_offloading_size=1.0, kv_offloading_backend="native").memory.kv_tier == plan
    assert tier_of(connector()) == tier_of(connector(extra={"cpu_bytes_to_use": 1e9 + 73741824}))
    assert tier_of(connector("SimpleCPUOffloadConnector")) == plan
    simple = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    simple["kv_connector_extra_config"] = {"cpu_bytes_to_use_per_rank": GIB}
    assert tier_of(simple) == plan


def test_a_folder_is_a_second_tier(tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path)}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    disk = DiskTierPlan(str(tmp_path), 100 * GIB, 2, 2)
    assert tier_of(connector(extra=extra)).disk == disk
    tier |= {"capacity_bytes": 5, "n_read_threads": 3, "n_write_threads": 4}
    assert tier_of(connector(extra=extra)).disk == DiskTierPlan(str(tmp_path), 5, 3, 4)
    simple = {"kv_offload_backend": "disk", "disk_path": str(tmp_path)}
    assert tier_of(connector("SimpleCPUOffloadConnector", simple)).disk == disk


def test_a_folder_may_be_told_of_in_events(tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path), "enable_kv_events": True}
    assert tier_of(connector(extra={"secondary_tiers": [tier]})).disk.publishes
    with pytest.raises(InvalidParameter, match="true or false"):
        tier_of(connector(extra={"secondary_tiers": [{**tier, "enable_kv_events": 1}]}))


def test_a_folder_of_others_needs_a_key(tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path), "mac_key_file": str(tmp_path / "key")}
    with pytest.raises(InvalidParameter, match="mac_key_file.*No such file"):
        tier_of(connector(extra={"secondary_tiers": [tier]}))
    (tmp_path / "key").write_text("0" * 64)
    (tmp_path / "key").chmod(0o600)
    found = tier_of(connector(extra={"secondary_tiers": [tier]}))
    assert found.disk.mac_key_file == str(tmp_path / "key")


def test_contents_may_have_to_come_more_than_once():
    found = tier_of(connector(extra={"store_threshold": 3, "max_tracker_size": 9}))
    assert (found.store_threshold, found.max_tracker_size) == (3, 9)
    assert tier_of(connector(extra={"store_threshold": 0})).store_threshold == 1


def test_what_changes_nothing_is_taken():
    fields = {"engine_id": "a", "kv_port": 14579, "kv_load_failure_policy": "recompute"}
    extra = {"eviction_policy": "lru", "blocks_per_chunk": 1, "offload_prompt_only": False}
    assert tier_of(connector(extra=extra, **fields)) == KVTierPlan(GIB)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"kv_role": "kv_both"}, InvalidParameter, "it names a kv_connector"),
        (connector("NixlPushConnector"), NotBuiltYet, "['kv_connector']='NixlPushConnector'"),
        (connector("Nothing"), NotBuiltYet, "kv_connector_module_path"),
        (connector("MultiConnector"), InvalidParameter, "a list of connectors"),
        (connector(kv_role=None), InvalidParameter, "['kv_role']=None"),
        (connector(kv_role="kv_producer"), NotBuiltYet, "['kv_role']='kv_producer'"),
        (connector(kv_load_failure_policy="maybe"), InvalidParameter, "recompute, fail"),
        (connector(kv_rank=0), InvalidParameter, "['kv_rank']=0"),
        (connector(extra={"cpu_bytes_to_use": None}), InvalidParameter, "['cpu_bytes_to_use']"),
        (connector(extra={"cpu_bytes_to_use": True}), InvalidParameter, "a whole number"),
        (connector(extra={"eviction_policy": "arc"}), NotBuiltYet, "['eviction_policy']='arc'"),
        (connector(extra={"offload_prompt_only": True}), NotBuiltYet, "give False"),
        (connector(extra={"spec_name": "Mine"}), NotBuiltYet, "['spec_name']='Mine'"),
        (connector(extra={"sped_name": "Mine"}), InvalidParameter, "there is no such field"),
        (connector(extra={"secondary_tiers": [{"type": "obj"}]}), NotBuiltYet, "['type']='obj'"),
        (connector(extra={"secondary_tiers": [{"type": "fs"}]}), InvalidParameter, "root_dir"),
        (connector(extra={"secondary_tiers": [{"type": "fs", "root_dir": "/x", "a": 1}]}),
         InvalidParameter, "['a']=1"),
        (connector("SimpleCPUOffloadConnector", {"lazy_offload": True}), NotBuiltYet, "lazy"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(config, error, text):
    with pytest.raises(error) as caught:
        tier_of(config)
    assert str(caught.value).startswith("kv_transfer_config") and text in str(caught.value)


def test_a_failed_load_may_end_its_request():
    assert tier_of(connector(kv_load_failure_policy="fail")) == KVTierPlan(GIB, fails=True)
    child = {"kv_connector": "OffloadingConnector"}
    child["kv_connector_extra_config"] = {"cpu_bytes_to_use": GIB}
    peer = {"kv_connector": "NixlConnector"}
    many = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [peer, child]},
    }  # fmt: skip
    assert tier_of(many).fails
    assert kv_transfer_config(many).kv_load_failure_policy == "fail"
    tiers = {"cpu_bytes_to_use": GIB, "secondary_tiers": [{"type": "p2p"}]}
    both = connector(extra=tiers, kv_load_failure_policy="fail")
    assert kv_transfer_config(both).kv_load_failure_policy == "fail"


def test_other_back_ends_and_both_forms_at_once_are_refused():
    with pytest.raises(NotBuiltYet, match="kv_offloading_backend='lmcache'"):
        planned(kv_offloading_size=1, kv_offloading_backend="lmcache")
    with pytest.raises(InvalidParameter, match="kv_offloading_size"):
        planned(kv_offloading_size=1, kv_transfer_config=connector())


def test_models_whose_blocks_cannot_come_back_say_so():
    with pytest.raises(InvalidParameter, match="prefix caching"):
        planned(kv_offloading_size=1, enable_prefix_caching=False)
    memories = plans.make_model().memories
    source = KeyValues(2, 16, source=100)
    crossed = msgspec.structs.replace(plans.make_model(), memories=(*memories, source))
    with pytest.raises(NotBuiltYet, match="second content"):
        planned(model=crossed, kv_offloading_size=1)


def test_weights_that_a_plugin_reads_have_no_folder(monkeypatch, tmp_path):
    monkeypatch.setitem(LOAD_FORMATS._added, "acme", ("acme:open_weights", "a test"))
    simple = {"kv_offload_backend": "disk", "disk_path": str(tmp_path)}
    with pytest.raises(NotBuiltYet, match="'acme' may come from anywhere"):
        tier_of(connector("SimpleCPUOffloadConnector", simple), load_format="acme")
    assert tier_of(connector("SimpleCPUOffloadConnector"), load_format="acme") == KVTierPlan(GIB)
    peers = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    with pytest.raises(NotBuiltYet, match="'acme' may come from anywhere"):
        planned(kv_transfer_config=peers, load_format="acme")


def test_each_of_several_ranks_keeps_its_share():
    model = plans.make_model()
    share = RankFacts(
        memories=model.memories,
        num_parameters=1,
        stage_layers=(model.num_layers,),
        same_bits=True,
    )
    ranked = msgspec.structs.replace(model, rank=share)
    plan = planned(model=ranked, kv_offloading_size=1, tensor_parallel_size=2, max_model_len=64)
    assert plan.memory.kv_tier == KVTierPlan(GIB)
    assert plan.parallel.distributed_executor_backend == "mp"


def test_the_memory_plan_counts_it():
    without, with_tier = planned(), planned(kv_offloading_size=1)
    lost = without.memory.kv_cache_bytes - with_tier.memory.kv_cache_bytes
    assert lost >= GIB // 2 - with_tier.memory.kv_cache_bytes // with_tier.memory.num_blocks
    assert f"K/V outside of the pool {gib(GIB)}" in with_tier.explain(400)
    assert f"kv_offloading_size: {gib(GIB)} of host memory" in with_tier.explain(400)


def test_memory_without_room_for_a_block_is_refused():
    with pytest.raises(InvalidParameter, match="a block of K/V takes"):
        planned(kv_transfer_config=connector(extra={"cpu_bytes_to_use": 9}))


def test_each_core_has_a_port_of_its_own():
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    config = kv_transfer_config(given).of_rank(2)
    assert config.rank == 2
    many = {**given, "kv_connector": "MultiConnector"}
    many["kv_connector_extra_config"] = {"connectors": [{"kv_connector": "NixlConnector"}]}
    assert [child.rank for child in kv_transfer_config(many).of_rank(3).children] == [3]


def test_settings_of_connectors_are_read_alike():
    tier = {"type": "p2p", "port": 7}
    extra = {"cpu_bytes_to_use": 1 << 30, "secondary_tiers": [tier]}
    given = connector(extra=extra)
    assert tier_settings(given)["kv_connector_extra_config"]["secondary_tiers"] == []
    config = kv_transfer_config(given)
    assert config.kv_connector == "PeerTier" and config.kv_connector_extra_config == {"port": 7}
    assert config.is_kv_producer and config.is_kv_consumer and config.has_connector("PeerTier")
    child = {"kv_connector": "ExampleHiddenStatesConnector"}
    many = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    with pytest.raises(NotBuiltYet, match="without other connectors"):
        kv_transfer_config({**many, "kv_connector_extra_config": {"connectors": [child]}})
    for wrong in ({"kv_role": "both"}, {"rank": 1}, {"kv_load_failure_policy": "maybe"}):
        with pytest.raises(InvalidParameter, match=next(iter(wrong))):
            kv_transfer_config({"kv_connector": "NixlConnector", "kv_role": "kv_both", **wrong})


def test_connectors_are_refused_where_they_cannot_serve():
    peers = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert planned(kv_transfer_config=peers).memory.kv_connector.kv_connector == "NixlConnector"
    with pytest.raises(InvalidParameter, match="it goes with prefix caching"):
        planned(kv_transfer_config=peers, enable_prefix_caching=False)
    files = {**peers, "kv_connector": "ExampleConnector"}
    assert planned(kv_transfer_config=files).steps.max_steps_in_flight == 1
    with pytest.raises(InvalidParameter, match="belong to one step at a time"):
        planned(kv_transfer_config=files, async_scheduling=True)
    memories = plans.make_model().memories
    mixed = msgspec.structs.replace(plans.make_model(), memories=(*memories, RecurrentState(8)))
    with pytest.raises(NotBuiltYet, match="a recurrent state"):
        planned(model=mixed, kv_transfer_config=peers)
