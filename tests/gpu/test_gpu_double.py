"""Engines on a GPU that is made of host memory: what a first run on a real one would stumble over.

No tensor of the host meets one of the GPU, nobody waits for the device but to learn tokens, and
nothing is compiled after the start.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest

from quire.testing import make_checkpoint
from tests.models.hostile.encoders import ENCODERS, make_encoder
from tests.quantization.coded_checkpoints import FORMATS, write
from tests.runner.drafting.draft_checkpoints import write_eagle3, write_medusa

HERE = Path(__file__).parent
SHAPE = {
    "num_hidden_layers": 1, "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip

ENCODER = "ModernBertModel"
SHAPES = {
    "qwen2": {"num_hidden_layers": 3},  # of which some are offloaded
    "youtu": {
        "num_key_value_heads": 2, "head_dim": None, "q_lora_rank": 28, "kv_lora_rank": 24,
        "qk_nope_head_dim": 12, "v_head_dim": 10,
    },
}  # fmt: skip
"""Where a family's differs from SHAPE."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture(scope="module")
def life(tmp_path_factory, run_triton_script):
    folders = {}

    def folder_of(family, stored):
        path = tmp_path_factory.mktemp(family)
        if family == ENCODER:
            return make_encoder(ENCODERS[family], path).folder
        shape = SHAPE | SHAPES.get(family, {})
        plain = make_checkpoint(path, shape, family, dtype="float32")
        if not stored:
            return plain
        write(plain, path / stored, FORMATS[stored])
        return path / stored

    def live(name, family, stored=""):
        if (family, stored) not in folders:
            folders[family, stored] = folder_of(family, stored)
        return run_triton_script(
            HERE / "gpu_lives.py", name, folders[family, stored], interpret=True, timeout_s=900
        )

    return live


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("features", "gemma2", marks=pytest.mark.full),
        pytest.param("offload", "qwen2", marks=pytest.mark.full),
        ("some", "youtu"),
        pytest.param("varying", "youtu", marks=pytest.mark.full),
        pytest.param("some", "qwen3_5", marks=pytest.mark.full),
        pytest.param("offload eager", "qwen2", marks=pytest.mark.full),
        pytest.param("eager", "mistral", marks=pytest.mark.full),
        pytest.param("int4", "qwen3_moe", marks=pytest.mark.full),
    ],
)
def test_an_engine_answers_as_on_the_cpu_and_nobody_waits_or_compiles(life, name, family):
    found = life(name, family)
    assert found["found"] == found["right"]
    assert found["waits"] == {}
    assert found["compiled"] == []
    assert (found["replays"] > 0) == ("eager" not in name)


@pytest.mark.full
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3", "medusa"])
def test_drafts_change_no_bit_and_nobody_waits_for_them(method, tmp_path, run_triton_script):
    shape = SHAPE | {"num_hidden_layers": 3 if method == "eagle3" else 1}
    target = make_checkpoint(tmp_path / "target", shape, "qwen2", dtype="float32")
    config = {"method": method, "num_speculative_tokens": 2}
    config["num_speculative_tokens_per_batch_size"] = [[1, 9, 2]]
    if method == "ngram":
        config["prompt_lookup_min"] = 1
    else:
        make = {
            "draft_model": lambda _, target: target,
            "eagle3": partial(write_eagle3, layers=[0, 1, 2], vocab=150),
            "medusa": write_medusa,
        }
        config["model"] = str(make[method](tmp_path / "draft", target))
    script = HERE / "draft_lives.py"
    found = run_triton_script(script, target, json.dumps(config), interpret=True, timeout_s=900)
    assert found["found"] == found["right"]
    assert found["waits"] == {} and found["compiled"] == []
    assert found["drafted"] >= 5
    assert found["accepted"] > 0 or method in ("eagle3", "medusa"), "these are right by chance only"


@pytest.mark.full
@pytest.mark.parametrize("stored", ["awq", "gptq-v1-symmetric-act_order"])
def test_a_quantised_checkpoint_answers_as_on_the_cpu(life, stored):
    found = life("codes", "qwen2", stored)
    assert found["found"] == found["right"]
    assert found["waits"] == {} and found["compiled"] == []


@pytest.mark.full
def test_an_encoder_answers_as_on_the_cpu_and_nobody_waits_or_compiles(life):
    found = life("vectors", ENCODER)
    for here, there in zip(found["right"], found["found"], strict=True):
        assert [len(row) for row in there] == [len(row) for row in here]
        for one, other in zip(here, there, strict=True):
            assert other == pytest.approx(one, abs=2e-5)
    assert found["waits"] == {} and found["compiled"] == []


@pytest.mark.full
def test_an_engine_that_generates_and_pools_replays_its_decodes_and_never_waits(life):
    found = life("both", "qwen2")
    (tokens, vectors), (right, right_vectors) = found["found"], found["right"]
    assert tokens == right
    for vector, wanted in zip(vectors, right_vectors, strict=True):
        assert vector == pytest.approx(wanted, abs=2e-5)
    assert found["replays"] > 0 and found["compiled"] == [] and found["waits"] == {}


@pytest.mark.full
@pytest.mark.parametrize(("name", "family"), [("memory", "gemma2"), ("offloaded memory", "qwen2")])
def test_memory_is_measured_and_sleep_returns_it(life, name, family):
    found = life(name, family)
    stages, kv_bytes = found["stages"], found["kv"]
    assert stages["awake"] <= found["total"] / 2
    first, *others = found["rounds"]
    assert others == [first, first]
    for level in (1, 2):
        assert stages["awake"] - stages[f"asleep {level}"] > kv_bytes, "the weights are gone too"
        assert stages[f"awake after {level}"] == pytest.approx(stages["awake"], abs=1 << 10)


def test_what_a_gpu_refuses_is_refused(run_triton_script):
    found = run_triton_script(HERE / "gpu_refusals.py", interpret=True)
    assert found.pop("waits") == [
        "a move to cpu", "a move to cuda", "an index of booleans",
        "an index of numbers of the host", "copy_", "item", "torch.tensor",
    ]  # fmt: skip
    assert found == {
        "a mixture": "RuntimeError", "the host's memory in a kernel": "ValueError",
        "numpy of a GPU": "AssertionError", "waiting while captured": "RuntimeError",
        "a copy while captured": "RuntimeError", "read too early": True, "read in time": True,
        "replayed with old numbers": 7.0, "another number": 1, "another alignment": 1,
        "a copy aside": True, "a copy aside that nobody waits for": False,
        "a copy aside that waits for nobody": "AssertionError",
        "a copy of before in a capture": "RuntimeError",
        "replayed copies": [5.0, 2.0], "a capture that is not joined": "RuntimeError",
    }  # fmt: skip
