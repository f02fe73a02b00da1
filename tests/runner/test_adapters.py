"""LoRA adapters in the runner: an adapted request is one of the model that the adapter is merged
into, and its bits are its own. Without a scheduler; the files of adapters are tested elsewhere.
"""

import pytest
import torch

from quire.executor.platform import Platform
from quire.models.parameters import adapter_size
from quire.runner.devices.stream_device import StreamDevice
from quire.runner.forward.decode_graphs import GraphForward
from quire.testing.checkpoints import make_checkpoint
from tests.runner.late_engines import plain_ops
from tests.support.late_driver import LateDriver
from tests.support.lora.adapters import Asked, Steps, merged, random_adapter
from tests.support.recorded_graphs import RecordingGraphs

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
RANKS = (8, 3, 1, 5, 8, 2, 4, 7)
NUM_TOKENS = 5


def make_folder(to, family="qwen3", **keys):
    return make_checkpoint(to / family, SMALL | keys, family, dtype="float32")


def prompt_of(number, length):
    draw = torch.Generator().manual_seed(number)
    return torch.randint(3, 300, (length,), generator=draw).tolist()


def crowd(slots=(0, *range(1, 9))):
    """31 requests: every slot several times, and some without an adapter."""
    return [Asked(prompt_of(i, 1 + 5 * i % 17), slots[i % len(slots)]) for i in range(31)]


def outcome(asked):
    return asked.tokens, asked.logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def engine(folder):
    """An engine with nine slots, of which eight have adapters; and these."""
    steps = Steps(folder, slots=9)
    adapters = [random_adapter(folder, steps.banks.targets, r, i) for i, r in enumerate(RANKS)]
    steps.load(*adapters)
    yield steps, adapters
    steps.close()


@pytest.fixture(scope="module")
def together(engine):
    steps, _ = engine
    return steps.run(crowd(), NUM_TOKENS)


def check_against_merged(folder, to, steps, adapters, within):
    """Each adapter's request beside one of the merged model; and all differ from the model's."""
    asked = [Asked(prompt_of(40 + slot, 9), slot) for slot in range(len(adapters) + 1)]
    steps.run(asked, NUM_TOKENS)
    plain = Steps(folder).run([Asked(one.prompt) for one in asked], NUM_TOKENS)
    assert outcome(plain[0]) == outcome(asked[0])
    for slot, adapter in enumerate(adapters, 1):
        model = Steps(merged(folder, adapter, to / f"merged{slot}"))
        (want,) = model.run([Asked(asked[slot].prompt)], NUM_TOKENS)
        assert want.tokens == asked[slot].tokens
        apart = torch.tensor(want.logprobs) - torch.tensor(asked[slot].logprobs)
        assert apart.abs().max() < within
        unlike = torch.tensor(plain[slot].logprobs) - torch.tensor(asked[slot].logprobs)
        assert unlike.abs().max() > 100 * within


def test_an_adapter_is_as_if_merged(folder, engine, tmp_path):
    steps, adapters = engine
    check_against_merged(folder, tmp_path, steps, adapters[:2], within=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "phi3",
        "qwen3_moe",
        "qwen3_5",
        "gpt2",
        "mixtral",
        "gemma2",
        "gpt_oss",
        "starcoder2",
        "youtu",
    ],
)
@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.sharp(when=lambda family, is_eager: (family, is_eager) == ("qwen3_moe", False))
def test_every_kind_of_layer_takes_adapters(tmp_path, family, is_eager):
    own = (
        make_folder(tmp_path, family)
        if family != "gpt2"
        else make_checkpoint(tmp_path / family, "tiny", family, dtype="float32")
    )
    steps = Steps(own, slots=2, enforce_eager=is_eager)
    targets = steps.banks.targets
    if family == "gpt2":  # whose head is its embedding
        targets -= {"embed", "head"}
    adapters = [random_adapter(own, targets, rank, rank, size=0.5) for rank in (8, 3)]
    steps.load(*adapters)
    check_against_merged(own, tmp_path, steps, adapters, within=3e-4)


def test_a_row_without_an_adapter_has_the_bits_of_an_engine_without(folder, together):
    plain = Steps(folder).run(crowd(slots=(0,)), NUM_TOKENS)
    same = [outcome(one) == outcome(own) for one, own in zip(plain, together, strict=True)]
    assert same == [asked.slot == 0 for asked in together]


@pytest.mark.parametrize("number", [1, 5, 8, 9])
def test_alone_a_request_has_the_bits_that_it_has_in_a_crowd(engine, together, number):
    steps, _ = engine
    (alone,) = steps.run([crowd()[number]], NUM_TOKENS)
    assert outcome(alone) == outcome(together[number])


def test_bits_do_not_depend_on_how_prompts_are_cut_nor_on_preemption(engine, together):
    steps, _ = engine
    chunked = steps.run(crowd(), NUM_TOKENS, chunk=3)
    assert [outcome(one) for one in chunked] == [outcome(one) for one in together]
    few = crowd()[:12]
    resumed = steps.run(few, NUM_TOKENS, stop_at=2)
    assert [outcome(one) for one in resumed] == [outcome(one) for one in together[:12]]


def test_bits_do_not_depend_on_the_slot_nor_on_the_room(folder, engine, together):
    _, adapters = engine
    for slots, rank, eager in ((2, 8, True), (3, 16, False), (2, 64, False)):
        steps = Steps(folder, slots=slots, rank=rank, enforce_eager=eager)
        steps.load(*adapters[4:6][:: 1 if eager else -1])
        for slot, number in ((1, 4), (2, 5)) if eager else ((2, 4), (1, 5)):
            was = together[number + 1]
            (asked,) = steps.run([Asked(was.prompt, slot)], NUM_TOKENS)
            assert outcome(asked) == outcome(was)
        steps.close()


def test_another_adapter_takes_the_place_of_the_one_before(folder, engine):
    _, adapters = engine
    steps = Steps(folder, slots=1)
    found = []
    for adapter in (adapters[0], adapters[2], adapters[0]):
        steps.load(adapter)
        found += steps.run([Asked(prompt_of(3, 9), 1)], NUM_TOKENS)
    assert outcome(found[0]) == outcome(found[2]) != outcome(found[1])


def test_slots_are_filled_again_after_sleep(folder, engine):
    _, adapters = engine
    steps = Steps(folder, slots=2)
    steps.load(*adapters[:2])
    before = steps.run([Asked(prompt_of(3, 9), 2)], NUM_TOKENS)
    worker = steps.executor.worker
    worker.drop_adapter(adapters[1].number)
    worker.sleep(["weights", "kv_cache"])
    worker.wake_up(["weights", "kv_cache"])
    after = steps.run([Asked(prompt_of(3, 9), 2)], NUM_TOKENS)
    assert outcome(before[0]) == outcome(after[0])


def test_the_plan_counts_the_memory_of_adapters(folder):
    steps = Steps(folder, slots=3, rank=16, dtype="bfloat16")
    one = adapter_size(steps.runner.model.spec) * 16 * 2
    assert steps.banks.nbytes == 3 * one


def test_graphs_are_captured_with_adapters_and_without(folder, engine):
    """Which graphs are replayed; GraphForward checks that a step is where it was captured."""
    _, adapters = engine
    driver, captured, sizes = LateDriver(3), [], [1, 2, 4, 8, 16]

    def capture(model, batches, num_rows):
        graphs = RecordingGraphs(captured)
        return GraphForward(model, lambda: graphs, batches.padding, sizes)

    device = StreamDevice(driver, arena_bytes=1 << 16)
    platform = Platform(device, plain_ops(), capture, sizes, is_host=False, driver=driver)
    steps = Steps(folder, slots=9, rows=16, max_num_batched_tokens=64, platform=platform)
    assert len(captured) == 2 * len(sizes)
    steps.load(*adapters)
    adapted, plain = captured[0::2], captured[1::2]  # each size with adapters first
    before = sum(graph.num_replays for graph in plain), sum(g.num_replays for g in adapted)
    some = [one for one in crowd() if one.slot][:5], [one for one in crowd() if not one.slot][:3]
    for asked in some:
        steps.run(asked, NUM_TOKENS)
    after = sum(graph.num_replays for graph in plain), sum(g.num_replays for g in adapted)
    assert all(late > early for early, late in zip(before, after, strict=True))
