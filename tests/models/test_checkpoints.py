"""Made checkpoints: transformers loads them with the same logits, the same bytes for a seed."""

import hashlib
import json

import pytest
import torch
import transformers
from safetensors import safe_open

from quire.errors import InvalidParameter, UnknownConfigKey
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.costs import num_parameters
from quire.testing import checkpoints, make_checkpoint
from quire.testing.model_shapes import FAMILIES, SHAPES, make_config
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}
SMALL_GPT2 = {"n_embd": 64, "n_layer": 2, "n_inner": 96, "vocab_size": 300}
SMALL_OF = {"gpt2": SMALL_GPT2, "mamba2": {"num_hidden_layers": 2, "vocab_size": 300}}


def digest(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_agrees_on_every_family(tmp_path, family):
    shape = SMALL_OF.get(family, SMALL)
    if family in ("granite", "starcoder2"):
        shape = {**shape, "head_dim": 16}
    folder = make_checkpoint(tmp_path, shape, family=family, dtype="float32")
    prompts = [torch.arange(20) * 7 % 300]
    theirs, notes = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(notes.values())
    with torch.no_grad():
        expected = [theirs.eval().float()(prompts[0][None], use_cache=False).logits[0]]
    got = run_full(load(folder, read_spec(read_config(folder)), max_model_len=64), prompts)
    assert relative_error(got, expected) < TOLERANCE
    assert 0.3 < expected[0].std() < 20


def test_equal_arguments_give_equal_bytes(tmp_path):
    first, second, other = (
        digest(make_checkpoint(tmp_path / name, SMALL, seed=seed))
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert first == second
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {"model.safetensors"}


def test_making_again_replaces(tmp_path):
    fresh = digest(make_checkpoint(tmp_path / "fresh", SMALL))
    make_checkpoint(tmp_path / "again", SMALL, family="qwen3", seed=1)
    assert digest(make_checkpoint(tmp_path / "again", SMALL)) == fresh


def test_large_checkpoints_are_sharded(tmp_path, monkeypatch):
    whole = make_checkpoint(tmp_path / "whole", SMALL)
    monkeypatch.setattr(checkpoints, "_SHARD_BYTES", 100_000)
    parts = make_checkpoint(tmp_path / "parts", SMALL)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    prompts = [torch.arange(9)]
    runs = [
        run_full(load(f, read_spec(read_config(f)), max_model_len=16), prompts)
        for f in (whole, parts)
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    transformers.AutoModelForCausalLM.from_pretrained(parts)


def test_the_tokenizer_has_the_models_vocabulary(tmp_path):
    folder = make_checkpoint(tmp_path, SMALL | {"vocab_size": 1000})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 1000
    text = 'def größe(x):\n    return "日本" * x  # 3.14'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < 700
    assert tokenizer.decode([999]) == "<unused999>"
    assert tokenizer.eos_token_id == 0
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ("tiny", 918_656),
        ("0.6b", 596_049_920),
        ("4b", 4_022_468_096),
        ("1b", 1_235_814_400),
        ("8b", 8_030_261_248),
        ("0.9b-latent", 899_753_984),
        ("0.8b-mamba2", 780_161_280),
        ("0.8b-delta", 752_393_024),
    ],
)
def test_named_shapes_are_the_published_ones(shape, count):
    config = make_config(shape, SHAPES[shape].family)
    assert num_parameters(read_spec(config)) == count
    assert "mamba" in shape or config["max_position_embeddings"] == SHAPES[shape].context


def test_weights_are_stored_in_the_asked_dtype(tmp_path):
    folder = make_checkpoint(tmp_path, SMALL, dtype="float16")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118
    assert transformers.AutoConfig.from_pretrained(folder).dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"shape": "9b"}, InvalidParameter),
        ({"family": "bert"}, InvalidParameter),
        ({"dtype": "int8"}, InvalidParameter),
        ({"shape": {"vocab_size": 100}}, InvalidParameter),
        ({"shape": {"hidden_sizes": 100}}, UnknownConfigKey),
    ],
)
def test_unknown_wishes_are_refused(tmp_path, arguments, error):
    with pytest.raises(error):
        make_checkpoint(tmp_path, **arguments)
