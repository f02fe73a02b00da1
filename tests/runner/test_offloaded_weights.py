"""Weights that stay on the host: the same answers, through buffers that hold poison from the start
of a copy to its end.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire import SamplingParams
from quire.config.offload import Offload
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import LoadError
from quire.models.loading.model_parts import tensors_within
from quire.models.loading.options import ModelOptions
from quire.models.loading.products import layer_products, product_of
from quire.models.loading.weights import load_model
from quire.runner import offloaded_weights
from quire.runner.offloaded_weights import OffloadedWeights
from quire.testing import make_checkpoint
from tests.runner.late_engines import Life, late_target, open_core, plain_ops, plan_of, tokens
from tests.support.late_driver import LateCopyQueue, LateDriver, _LateArrival, same_bits

NUM_LAYERS = 6
ALL = Offload(tuple(range(NUM_LAYERS)), (), 1)
PLACES = {
    "one buffer for all": ALL,
    "every second": Offload((1, 3, 5), (), 1),
    "the first and the last": Offload((0, 5), (), 1),
    "two ahead": Offload((0, 1, 2, 4, 5), (), 2),
    "three ahead, some weights": Offload((1, 2, 3, 5), ("mlp",), 3),
}
POOL = {"num_gpu_blocks_override": 200}
FAMILIES = ("qwen3", "gemma3", "qwen3_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    shape = {"num_hidden_layers": NUM_LAYERS, "vocab_size": 300}
    return {
        family: make_checkpoint(tmp_path_factory.mktemp(family), shape, family, dtype="float32")
        for family in FAMILIES
    }


@pytest.fixture(scope="module")
def answers(folders):
    """What lives get on the CPU."""
    known = {}

    def right(family, seed):
        if (family, seed) not in known:
            core, _ = open_core(folders[family], **POOL)
            known[family, seed] = Life(seed).run(core, disturbed=False)
            core.shutdown()
        return known[family, seed]

    return right


def lived(folder, offload, seed):
    core, _ = open_core(folder, late_seed=seed, offload=offload, **POOL)
    found = Life(seed).run(core, disturbed=True)
    core.shutdown()
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PLACES)
def test_any_life_has_the_answers_of_weights_that_stay(folders, answers, family, name):
    seed = list(PLACES).index(name)
    right, found = answers(family, seed), lived(folders[family], PLACES[name], seed)
    assert (found.tokens, found.ends) == (right.tokens, right.ends)


def never_joined(monkeypatch):
    monkeypatch.setattr(_LateArrival, "join", lambda self: None)


def reused_too_early(monkeypatch):
    """The buffer's next copy starts before the layer that has it runs."""
    fetch = OffloadedWeights.fetch

    def fetch_and_release(self, place):
        fetch(self, place)
        self.release(place)

    monkeypatch.setattr(OffloadedWeights, "fetch", fetch_and_release)


def one_ahead_too_many(monkeypatch):
    """Of buffers that are one fewer than the copies under way."""

    def release(self, place):
        if place + self._num_buffers + 1 < len(self._copies):
            self._start(place + self._num_buffers + 1)

    monkeypatch.setattr(OffloadedWeights, "release", release)
    monkeypatch.setattr(OffloadedWeights, "fetch", lambda self, place: self._coming[place].join())


def fetched_once(monkeypatch):
    """The buffers are believed to have what they had in the pass before."""
    start = OffloadedWeights._start
    seen = set()

    def start_once(self, place):
        start(self, place)
        if (id(self), place) in seen:
            self._coming[place] = _LateArrival([])
        seen.add((id(self), place))

    monkeypatch.setattr(OffloadedWeights, "_start", start_once)


@pytest.mark.parametrize(
    "plant", [never_joined, reused_too_early, one_ahead_too_many, fetched_once]
)
def test_planted_bugs_are_seen(folders, answers, plant, monkeypatch):
    right = answers("qwen3", 3)
    assert lived(folders["qwen3"], PLACES["two ahead"], 3).tokens == right.tokens
    plant(monkeypatch)
    try:
        found = lived(folders["qwen3"], PLACES["two ahead"], 3)
    except KeyError:  # a copy that nobody has started
        return
    assert found.tokens != right.tokens


def weights_of(core):
    return core.executor.worker.get_model()


def test_the_device_has_the_buffers_and_what_is_not_offloaded(folders):
    whole, _ = open_core(folders["qwen3"], late_seed=0)
    core, _ = open_core(folders["qwen3"], late_seed=0, offload=PLACES["every second"])
    names = dict(weights_of(whole).named_parameters())
    products = layer_products(weights_of(core).spec)
    layer = 4 * sum(products[1].values())
    on_device = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in weights_of(core).weight_tensors()
    }
    assert sum(on_device.values()) == sum(t.nbytes for t in names.values()) - 2 * layer
    assert {n: t.shape for n, t in weights_of(core).named_parameters()} == {
        n: t.shape for n, t in names.items()
    }
    addresses = {
        name: tensor.data_ptr()
        for name, tensor in weights_of(core).named_parameters()
        if name.startswith("layers.") and product_of(name) in products[0]
    }
    assert addresses["layers.1.mlp.up.weight"] == addresses["layers.5.mlp.up.weight"]
    assert len({addresses[f"layers.{i}.attn.o.weight"] for i in range(6)}) == 4
    for one in (whole, core):
        one.shutdown()


def test_products_are_named_as_the_decoder_makes_them(folders):
    seen = {}

    class Placement:
        def place(self, layer, parts):
            seen[layer] = {product_of(n) for n, p in parts if not isinstance(p, torch.Tensor)}

        def finish(self, layers):
            return layers

    core, _ = open_core(folders["qwen3_moe"])
    spec = weights_of(core).spec
    core.shutdown()
    options = {"dtype": torch.float32, "load_format": "dummy"}
    options["options"] = ModelOptions(make_placement=Placement)
    load_model(folders["qwen3_moe"], spec, plain_ops(), **options)
    assert list(seen.values()) == [set(sizes) for sizes in layer_products(spec)]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_brings_offloaded_weights_back(folders, level):
    target, _ = late_target(0)
    target = dataclasses.replace(target, is_host=False)
    plan = plan_of(folders["qwen3"], async_scheduling=True)
    core = build_core(plan.changed(offload=PLACES["two ahead"]), target)
    right = tokens(core)
    perform(core, "sleep", (level,)).result(timeout=0)
    assert sum(t.untyped_storage().nbytes() for t in weights_of(core).weight_tensors()) == 0
    assert perform(core, "wake_up", ()) is True
    assert tokens(core) == right
    core.shutdown()


def test_a_pass_in_pieces_and_one_after_a_failure(folders):
    """Copies belong to a pass, and a piece fetches what nobody has fetched for it."""
    driver = LateDriver(0)
    kept = [torch.arange(5.0) + i for i in range(4)]
    weights = OffloadedWeights(driver, (0, 1, 3), 2)
    held = [tensor.clone() for tensor in kept]
    for i in range(4):
        weights.place(i, [(f"layers.{i}.mlp.down", [held[i]])])
    fails = []

    class Layer:
        def __init__(self, number):
            self.number, self.enter = number, lambda x: x

        def __call__(self, x, h, batch):
            if self.number in fails:
                raise RuntimeError("planted")
            assert torch.equal(held[self.number], kept[self.number])
            return x, h

    layers = weights.finish([Layer(i) for i in range(4)])

    def run(numbers):
        for i in numbers:
            layers[i](None, None, None)

    for numbers in (range(4), range(4), (1, 2, 3), (3,), (0, 1), (2, 3), (1, 1, 3, 3)):
        run(numbers)
    for broken in range(4):
        fails[:] = [broken]
        with pytest.raises(RuntimeError, match="planted"):
            run(range(4))
        fails.clear()
        run(range(broken, 4))
        run(range(4))


def test_tensors_of_any_form_come_back_bit_for_bit(monkeypatch):
    """Views of shared memory, gaps, other orders of axes, sizes beyond a piece, and none."""
    monkeypatch.setattr(offloaded_weights, "_PIECE_BYTES", 512)
    base = torch.arange(100, dtype=torch.int16)
    part = [
        torch.randn(33, 7).t(), base[3:50:2], (base[10:20], base), torch.empty(0),
        torch.arange(5, dtype=torch.uint8), torch.randn(300).bfloat16(), torch.randn(2, 3, 4)[:, 1],
    ]  # fmt: skip
    tensors = list(tensors_within(part))
    before = [tensor.clone() for tensor in tensors]
    forms = [(tensor.shape, tensor.stride()) for tensor in tensors]
    weights = OffloadedWeights(LateDriver(0), (0,), 1)
    weights.place(0, [("layers.0.mlp.up", part), ("layers.0.mlp_pre.weight", torch.ones(3))])
    assert all(tensor.numel() == 0 for tensor in tensors)
    (layer,) = weights.finish([lambda x, h, batch: [t.clone() for t in tensors]])
    found = layer(None, None, None)
    assert [(tensor.shape, tensor.stride()) for tensor in tensors] == forms
    assert all(same_bits(a, b) for a, b in zip(found, before, strict=True))
    base_now, slice_now = tensors[3], tensors[1]
    assert base_now.untyped_storage().data_ptr() == slice_now.untyped_storage().data_ptr()
    assert slice_now.data_ptr() - base_now.data_ptr() == 6
    assert all(t.data_ptr() % 16 == 0 for t in (tensors[0], base_now, tensors[5]))


def test_a_layer_without_products_cannot_be_offloaded():
    weights = OffloadedWeights(LateDriver(0), (0,), 1, ["experts"])
    with pytest.raises(LoadError, match="Layer 0 has no weights"):
        weights.place(0, [("layers.0.mlp.up", [torch.ones(3)])])


def test_copies_are_started_ahead_and_once_for_each_layer(folders, monkeypatch):
    order = []
    monkeypatch.setattr(OffloadedWeights, "fetch", logged(order, "fetch", OffloadedWeights.fetch))
    monkeypatch.setattr(OffloadedWeights, "_start", logged(order, "start", OffloadedWeights._start))
    queues = []
    opened = LateDriver.copy_queue
    monkeypatch.setattr(
        LateDriver, "copy_queue", lambda self: queues.append(opened(self)) or queues[-1]
    )
    core, _ = open_core(folders["qwen3"], late_seed=0, offload=PLACES["two ahead"])
    order.clear()
    assert isinstance(queues[0], LateCopyQueue)
    queues[0].num_started = 0
    params = SamplingParams(temperature=0.0, max_tokens=1)
    core.add_request(EngineCoreRequest(0, [20, 21, 22], params, seed=0, arrival_time=0.0))
    while core.has_work:
        core.step()
    core.shutdown()
    assert queues[0].num_started == 5
    assert order == [
        ("start", 0), ("start", 1), ("fetch", 0), ("start", 2), ("fetch", 1), ("start", 3),
        ("fetch", 2), ("start", 4), ("fetch", 3), ("fetch", 4),
    ]  # fmt: skip


def logged(order, name, function):
    def call(self, place):
        order.append((name, place))
        return function(self, place)

    return call
