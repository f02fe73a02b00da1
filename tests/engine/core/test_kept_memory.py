"""K/V in memory that outlives a core: the core that comes after it loads what it finds there."""

import msgspec
import pytest

from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.tiers.host_memory import HostMemory
from tests.engine.core.kv_tier_scene import (
    Ask,
    alone,
    check_restored,
    open_plan,
    prompts,
    small_llama,
    tier_of,
)

HOST = 1 << 22


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_llama(tmp_path_factory)


@pytest.fixture
def memory():
    found = HostMemory(HOST, 1)
    yield found
    found.close()


def over(memory, model, **options):
    """A core over the memory, which may have had another one."""
    plan = open_plan(model, HOST, **options)
    tier = msgspec.structs.replace(plan.memory.kv_tier, memory_fd=memory.fds[0])
    return Ask(build_core(plan.changed(kv_tier=tier)))


def test_the_next_core_goes_on_with_it(model, memory):
    expected = alone(model, prompts())
    ask = over(memory, model)
    assert [ask(ids) for ids in prompts()] == expected
    del ask  # it ends without a word
    check_restored(over(memory, model), prompts(), expected)


def test_damaged_blocks_are_computed_again(model, memory):
    ask = over(memory, model)
    expected = [ask(ids) for ids in prompts()]
    for content in list(tier_of(ask.core)._host._by_key.values()):
        content.slot[content.num_bytes // 2] ^= 1
    again = over(memory, model)
    assert [again(ids) for ids in prompts()] == expected and again.external_hits == 0
    check_restored(again, prompts(), expected)


def test_a_checksum_that_is_not_looked_at_is_noticed(model, memory, monkeypatch):
    ask = over(memory, model)
    expected = [ask(ids) for ids in prompts()]
    host = tier_of(ask.core)._host
    for content in list(host._by_key.values()):
        content.slot[content.num_bytes // 2 : content.num_bytes] = 1
    again = over(memory, model)
    copies = tier_of(again.core)._copies
    for content in tier_of(again.core)._host._by_key.values():
        content.checksum = copies.write(0, 1, content.slot)
    assert [again(ids) for ids in prompts()] != expected


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"hf_overrides": {"rope_theta": 2e4}}])
def test_another_model_finds_nothing(change, model, memory):
    ask = over(memory, model)
    [ask(ids) for ids in prompts()]
    again = over(memory, model, **change)
    assert not len(tier_of(again.core)._host)


def test_a_core_whose_weights_may_have_changed_leaves_nothing(model, memory):
    ask = over(memory, model)
    perform(ask.core, "collective_rpc", (lambda worker: None,))
    ask(prompts()[0])
    assert len(tier_of(ask.core)._host)
    assert not len(tier_of(over(memory, model).core)._host)


def test_files_that_were_written_in_between_are_another_model(model, memory):
    ask = over(memory, model)
    [ask(ids) for ids in prompts()]
    for file in model.glob("*.safetensors"):
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    assert not len(tier_of(over(memory, model).core)._host)
