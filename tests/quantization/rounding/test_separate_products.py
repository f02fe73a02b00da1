"""Projections of one product (q, k and v; gate and up) that a checkpoint does not store alike."""

import re
from dataclasses import replace

import pytest
import torch

from quire.config.args.engine_args import EngineArgs
from quire.errors import LoadError, NotBuiltYet
from quire.llm import LLM
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.loading.separate_products import SeparateLinear
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.models.hostile.models import HOSTILE, Library, oracle
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error
from tests.quantization.coded_checkpoints import (
    FORMATS,
    LAYERS,
    Written,
    compressed,
    numbers_of,
    write,
)

NATIVE = select(device="cpu", dtype=torch.float32)
OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("plain"))


class Shuffled:
    """A format with act-order, of which every weight has an order of its own."""

    def __init__(self, how: Written) -> None:
        self.how, self.config, self.seed = how, how.config, 0

    def made(self, weight):
        self.seed += 1
        how = self.how
        numbers = numbers_of(
            weight, how.bits, how.group, symmetric=how.symmetric, reorders=True, seed=self.seed
        )
        return how.tensors(numbers), numbers.plain()


def without(part: str) -> re.Pattern[str]:
    """The names of weights that are quantised but for those of one projection."""
    return re.compile(rf"(?!.*{part})(?:{LAYERS.pattern})")


def checked(made, name, folder, plain, ops):
    model = load_model(folder, read_spec(read_config(folder)), ops, dtype=torch.float32)
    run = PagedRun(model, made.prompts, ops=ops)
    found = list(run.step([len(p) for p in made.prompts]).values())
    expected = [oracle(HOSTILE[name], plain)(p) for p in made.prompts]
    assert relative_error(found, expected) < TOLERANCE
    return dict(model._parts)


@pytest.mark.parametrize("ops", [NATIVE, OPS], ids=["native", "torch"])
@pytest.mark.parametrize("how", ["gptq-v2-act_order", "compressed-w4a16-asymmetric-act_order"])
def test_orders_may_differ(library, tmp_path, how, ops):
    made = library["llama"]
    plain = write(made.folder, tmp_path / "model", Shuffled(FORMATS[how]))
    parts = checked(made, "llama", tmp_path / "model", plain, ops)
    assert len(parts["layers.0.attn.qkv"].parts) == 3
    assert len(parts["layers.0.mlp.up"].parts) == 2


@pytest.mark.parametrize("ops", [NATIVE, OPS], ids=["native", "torch"])
@pytest.mark.parametrize(("part", "counts"), [("q_proj", (2, 1)), ("gate_proj", (1, 2))])
def test_some_may_keep_their_values(library, tmp_path, part, counts, ops):
    made, how = library["llama"], compressed()
    config = {**how.config, "ignore": [*how.config["ignore"], f"re:.*{part}$"]}
    plain = write(made.folder, tmp_path / "model", replace(how, config=config), names=without(part))
    parts = checked(made, "llama", tmp_path / "model", plain, ops)
    found = (parts["layers.0.attn.qkv"], parts["layers.0.mlp.up"])
    assert tuple(len(p.parts) if isinstance(p, SeparateLinear) else 1 for p in found) == counts


def test_experts_have_one_order(library, tmp_path):
    made = library["qwen3_moe"]
    write(made.folder, tmp_path / "model", Shuffled(FORMATS["gptq-v2-act_order"]))
    folder = tmp_path / "model"
    with pytest.raises(LoadError, match="differ in the bits, the groups or the order"):
        load_model(folder, read_spec(read_config(folder)), OPS, dtype=torch.float32)


def test_the_name_within_a_wrapper_is_ignored_as_the_modules_own(library, tmp_path):
    made, how = library["llama"], compressed()
    layers = [f"model.layers.{i}.self_attn.o_proj.linear" for i in range(8)]
    config = {**how.config, "ignore": ["lm_head", *layers]}
    plain = write(
        made.folder, tmp_path / "model", replace(how, config=config), names=without("o_proj")
    )
    checked(made, "llama", tmp_path / "model", plain, OPS)
    layout_of = read_storage({"quantization_config": config}).layout_of
    assert layout_of("model.layers.0.self_attn.o_proj") is None
    assert layout_of("model.layers.0.self_attn.q_proj") is not None


def test_adapters_of_separate_products_are_refused(library, tmp_path):
    made = library["llama"]
    write(made.folder, tmp_path / "model", Shuffled(FORMATS["gptq-v2-act_order"]))
    with pytest.raises(NotBuiltYet, match="adapters of layers.0.attn.qkv, whose parts"):
        LLM(
            str(tmp_path / "model"),
            skip_tokenizer_init=True,
            enable_lora=True,
            max_lora_rank=8,
            max_model_len=64,
        )
    assert EngineArgs(model="x").enable_lora is False
