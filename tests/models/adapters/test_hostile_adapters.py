"""Adapters that do not fit, that lie or that want to do harm: each is refused in a sentence."""

import json
import os
import pickle
import random
import struct

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import AdapterNotFound, BadAdapter, InvalidParameter
from quire.models import find_family, read_spec
from quire.models.adapters.targets import AdapterTargets
from tests.models.adapters.made import PREFIX, SAFETENSORS, HandMade, pair
from tests.models.adapters.test_reading import read
from tests.models.hostile.models import HOSTILE, config_of

Q = PREFIX + "model.layers.0.self_attn.q_proj."
WIDTH, ROWS, VOCAB = 64, 96, 96


def targets(name="llama", allowed=None, **keys):
    config = config_of(HOSTILE[name]) | keys
    return AdapterTargets(find_family(config), read_spec(config), allowed)


LLAMA = targets()


def plain(**config):
    a, b = pair(torch.Generator().manual_seed(0), ROWS, WIDTH)
    return HandMade({Q + "lora_A.weight": a, Q + "lora_B.weight": b}, config)


def refusal(folder, model=LLAMA, error=BadAdapter, **keys):
    with pytest.raises(error) as caught:
        read(folder, model, **keys)
    text = str(caught.value)
    assert len(text) <= 2000 and "\n" not in text and text.endswith(".")
    return text


CONFIGS = {
    "another-method": ({"peft_type": "IA3"}, "peft_type is 'IA3', and only LORA is supported"),
    "no-rank": ({"r": None}, "r must be an integer from 1 to 65536, not None"),
    "rank-of-zero": ({"r": 0}, "r must be an integer from 1 to 65536, not 0"),
    "rank-that-is-true": ({"r": True}, "r must be an integer from 1 to 65536, not True"),
    "alpha-as-text": ({"lora_alpha": "16"}, "lora_alpha must be a number, not '16'"),
    "alpha-nan": ({"lora_alpha": float("nan")}, "lora_alpha must be a number, not nan"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only': adapters that change biases"),
    "dora": ({"use_dora": True}, "use_dora=True: DoRA scales the model's own weights as well"),
    "lora-bias": ({"lora_bias": True}, "lora_bias=True: an adapter with biases"),
    "alora": ({"alora_invocation_tokens": [1]}, "an adapter that begins within a prompt"),
    "replication": ({"layer_replication": [[0, 2]]}, "the model would have other layers"),
    "qalora": ({"use_qalora": True}, "use_qalora=True: this key is not supported"),
    "tokens": ({"trainable_token_indices": [3]}, "train with embed_tokens among target_modules"),
    "unknown": ({"use_magic": 7}, "use_magic=7: this key is not supported"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "changes the model's own weights"),
    "rslora-as-text": ({"use_rslora": "yes"}, "use_rslora must be true or false, not 'yes'"),
    "patterns-as-list": ({"rank_pattern": ["q"]}, "rank_pattern must map patterns of names"),
    "rank-pattern-of-zero": ({"rank_pattern": {"q": 0}}, "rank_pattern must map patterns"),
    "names-as-numbers": ({"target_parameters": [1]}, "target_parameters must be a list of names"),
    "no-expression": ({"alpha_pattern": {"(": 2}}, "which is not a regular expression"),
    "endless": ({"rank_pattern": {"(a+)+$": 2}}, "which may take long to match"),
    "many-stars": ({"rank_pattern": {".*a.*b.*c": 2}}, "which may take long to match"),
    "any-or-none": ({"rank_pattern": {".?" * 99 + "!": 2}}, "which may take long to match"),
    "alternatives": ({"rank_pattern": {"(.|..)" * 40 + "!": 2}}, "which may take long to match"),
    "many-slow": (
        {"rank_pattern": {f".*.*[ab]{i}!": 2 for i in range(60)}},
        "which may take long to match",
    ),
    "looking-back": ({"rank_pattern": {r"(\w)\1": 2}}, "which may take long to match"),
    "long": ({"rank_pattern": {"[a]" * 200: 2}}, "which may take long to match"),
    "many": ({"rank_pattern": {f"[a]{i}": 2 for i in range(65)}}, "65 regular expressions"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_are_refused_by_key(tmp_path, case):
    keys, text = CONFIGS[case]
    found = refusal(plain(**keys).save(tmp_path))
    assert found.startswith("adapter_config.json: ") and text in found


def test_a_config_names_all_that_is_wrong(tmp_path):
    text = refusal(plain(use_dora=True, bias="all", r=-1).save(tmp_path))
    assert all(word in text for word in ("use_dora=True", "bias is 'all'", "r must be"))


def test_keys_that_change_nothing_are_accepted(tmp_path):
    keys = {
        "lora_dropout": 0.1, "base_model_name_or_path": "somewhere", "use_dora": False,
        "a_key_of_the_future": None, "another": {}, "loftq_config": {}, "fan_in_fan_out": True,
        "init_lora_weights": "gaussian", "modules_to_save": None, "inference_mode": True,
    }  # fmt: skip
    assert list(read(plain(**keys).save(tmp_path), LLAMA).products) == ["layers.0.attn.q"]


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_what_was_saved_whole_has_to_be_there(tmp_path, module):
    folder = plain(modules_to_save=["classifier", module]).save(tmp_path)
    assert refusal(folder) == f"modules_to_save names {module}, which the adapter lacks."
    others = plain(modules_to_save=["classifier", "score"]).save(tmp_path)
    assert read(others, LLAMA).products, "names that PEFT adds for models that classify"


def test_texts_that_are_not_a_config(tmp_path):
    folder = plain().save(tmp_path)
    for text in ("{", "[]", "[" * 100_000, '{"r": "\\ud800"}', "\0"):
        (folder / "adapter_config.json").write_text(text)
        refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert refusal(folder, error=AdapterNotFound).endswith("it has no adapter_config.json.")
    assert refusal(tmp_path / "nowhere", error=AdapterNotFound)


def test_without_tensors_there_is_no_adapter(tmp_path):
    folder = plain().save(tmp_path)
    (folder / SAFETENSORS).unlink()
    assert "has no adapter_model.safetensors" in refusal(folder, error=AdapterNotFound)
    (folder / SAFETENSORS).symlink_to(tmp_path / "gone")
    assert "is a link to" in refusal(folder)
    (folder / SAFETENSORS).unlink()
    os.mkfifo(folder / SAFETENSORS)
    refusal(folder)
    (folder / SAFETENSORS).unlink()
    save_file({}, folder / SAFETENSORS)
    assert refusal(folder) == "The adapter has no tensors."


def with_header(folder, header, data=bytes(64)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SAFETENSORS).write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(**keys):
    return {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **keys}


HEADERS = {
    "no-object": b"[1]",
    "no-json": b"{{{",
    "deep": b"[" * 200_000,
    "behind-the-end": {"a": entry(shape=[2, 16], data_offsets=[0, 128])},
    "before-the-start": {"a": entry(data_offsets=[-32, 0])},
    "backwards": {"a": entry(data_offsets=[32, 0])},
    "another-size": {"a": entry(shape=[2, 5])},
    "fractions": {"a": entry(shape=[2.5, 4])},
    "truths": {"a": entry(shape=[True, 8])},
    "endless-shape": {"a": entry(shape=[2**62, 2**62, 0, 8])},
    "no-shape": {"a": {"dtype": "F32", "data_offsets": [0, 32]}},
    "no-entry": {"a": 3},
    "twins": b'{"a": 1, "a": 1}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(tmp_path, case):
    folder = plain().save(tmp_path)
    with_header(folder, HEADERS[case])
    refusal(folder)


def test_files_that_are_cut(tmp_path):
    folder = plain().save(tmp_path)
    whole = (folder / SAFETENSORS).read_bytes()
    for length in (0, 7, 8, 50, len(whole) // 2, len(whole) - 1):
        (folder / SAFETENSORS).write_bytes(whole[:length])
        refusal(folder)
    (folder / SAFETENSORS).write_bytes(struct.pack("<Q", 2**60) + whole)
    assert "its header would have" in refusal(folder)


@pytest.mark.parametrize("seed", range(4))
def test_any_byte_may_be_wrong(tmp_path, seed):
    folder, draw = plain().save(tmp_path), random.Random(seed)
    whole = (folder / SAFETENSORS).read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(100):
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(header)] = draw.randrange(256)
        (folder / SAFETENSORS).write_bytes(changed)
        try:
            found = read(folder, LLAMA)
        except BadAdapter:
            continue
        assert list(found.products) == ["layers.0.attn.q"]


def replaced(name, tensor):
    made = plain()
    made.tensors[name] = tensor
    return made


def renamed(**names):
    """The plain adapter with `lora_A.weight` and `lora_B.weight` under other names."""
    made = plain()
    old = [Q + "lora_A.weight", Q + "lora_B.weight"]
    tensors = [made.tensors[name] for name in old]
    made.tensors = dict(zip(names["to"], tensors, strict=True))
    return made


def halves(module):
    return [f"{PREFIX}{module}.lora_{part}.weight" for part in "AB"]


TENSORS = {
    "wide": (replaced(Q + "lora_A.weight", torch.ones(4, 65)), "is [4, 65], and this model needs"),
    "tall": (replaced(Q + "lora_B.weight", torch.ones(97, 4)), "is [97, 4], and this model needs"),
    "another-rank": (replaced(Q + "lora_A.weight", torch.ones(5, 64)), "needs [4, 64]"),
    "one-axis": (replaced(Q + "lora_A.weight", torch.ones(4)), "is [4], and this model needs"),
    "nan": (replaced(Q + "lora_A.weight", torch.full((4, 64), torch.nan)), "holds NaN or infinity"),
    "infinity": (replaced(Q + "lora_B.weight", torch.full((96, 4), torch.inf)), "holds NaN"),
    "integers": (replaced(Q + "lora_A.weight", torch.ones(4, 64).int()), "has no type of F32, F16"),
    "unknown-layer": (renamed(to=halves("model.layers.3.self_attn.q_proj")), "does not have"),
    "unknown-part": (renamed(to=halves("model.layers.0.attn.query")), "does not have"),
    "a-norm": (renamed(to=halves("model.layers.0.input_layernorm")), "does not have"),
    "no-half": (replaced(PREFIX + "lm_head.lora_A.weight", torch.ones(4, 64)), "other half"),
    "dora": (replaced(Q + "lora_magnitude_vector", torch.ones(96)), "DoRA is not supported"),
    "dora-in-training": (
        replaced(Q + "lora_magnitude_vector.default.weight", torch.ones(96)),
        "DoRA is not supported",
    ),
    "bias": (replaced(Q + "lora_B.bias", torch.ones(96)), "an adapter with biases"),
    "in-training": (
        renamed(to=[Q + "lora_A.default.weight", Q + "lora_B.default.weight"]),
        "save_pretrained writes adapters",
    ),
    "whole-head": (
        replaced(PREFIX + "lm_head.weight", torch.ones(96, 64)),
        "modules_to_save may only name classifiers",
    ),
    "rows": (
        replaced(PREFIX + "model.embed_tokens.token_adapter.trainable_tokens_delta", torch.ones(2)),
        "trained alone",
    ),
    "more-tokens": (
        replaced(PREFIX + "model.embed_tokens.base_layer.weight", torch.ones(99, 64)),
        "another vocabulary",
    ),
    "no-classifier": (replaced(PREFIX + "score.weight", torch.ones(2, 64)), "does not have"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(tmp_path, case):
    made, text = TENSORS[case]
    assert text in refusal(made.save(tmp_path))


def test_two_names_of_one_module(tmp_path):
    made = plain()
    for part in "AB":
        made.tensors[f"layers.0.self_attn.q_proj.lora_{part}.weight"] = made.tensors[
            f"{Q}lora_{part}.weight"
        ].clone()
    assert "changes layers.0.attn.q twice" in refusal(made.save(tmp_path))


def test_what_is_tied_has_both_adapters(tmp_path):
    a, b = pair(torch.Generator().manual_seed(0), VOCAB, WIDTH)
    names = halves("lm_head")
    half = HandMade(dict(zip(names, (a, b), strict=True)), {"ensure_weight_tying": True})
    assert read(half.save(tmp_path), LLAMA).products, "this model is not tied"
    text = refusal(tmp_path, targets(tie_word_embeddings=True))
    assert "only one of them" in text


def test_ranks_have_a_limit(tmp_path):
    text = refusal(plain().save(tmp_path), max_rank=3)
    assert text.startswith("LoRA rank 4 is greater than max_lora_rank 3")


def test_values_have_to_fit_the_dtype(tmp_path):
    big = replaced(Q + "lora_B.weight", torch.full((ROWS, 4), 6e4)).save(tmp_path)
    assert read(big, LLAMA, dtype=torch.bfloat16)
    assert "what is not in torch.float16" in refusal(big, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_value_is_found(tmp_path, dtype, bad):
    for place in (0, 1, 77, 255):
        made = plain()
        made.tensors[Q + "lora_A.weight"].view(-1)[place] = bad
        assert "holds NaN or infinity" in refusal(made.save(tmp_path), dtype=dtype)


def test_copies_of_the_table_are_passed_over(tmp_path):
    made = replaced(PREFIX + "lm_head.base_layer.weight", torch.full((VOCAB, WIDTH), torch.nan))
    assert read(made.save(tmp_path), LLAMA)


def test_pickles_are_read_and_not_run(tmp_path):
    folder = plain().save(tmp_path)
    expected = read(folder, LLAMA)
    (folder / SAFETENSORS).unlink()
    torch.save(plain().tensors, folder / "adapter_model.bin")
    assert read(folder, LLAMA).digest == expected.digest

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"a": Harm()}, 2))
    assert "could run any code" in refusal(folder)
    assert not (tmp_path / "harm").exists()


def test_names_and_pickles_have_a_limit(tmp_path):
    made = plain()
    made.tensors = {".lora_A" * 10_000 + ".x.y": torch.ones(1)}
    assert "a name of 70004 characters" in refusal(made.save(tmp_path))
    (tmp_path / SAFETENSORS).unlink()
    with (tmp_path / "adapter_model.bin").open("wb") as stream:
        stream.truncate(5 << 30)
    assert "save safetensors" in refusal(tmp_path)


def test_targets_may_be_restricted(tmp_path):
    folder = plain().save(tmp_path)
    for allowed in ("q_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj", "qkv_proj"):
        assert read(folder, targets(allowed=[allowed]))
    for allowed in ("k_proj", "layers.1.self_attn.q_proj", "lm_head"):
        text = refusal(folder, targets(allowed=[allowed]))
        assert "not among the modules that lora_target_modules allows" in text
    with pytest.raises(InvalidParameter, match="the model has no such module"):
        targets(allowed=["q_proj", "query"])


def test_contents_make_the_number(tmp_path):
    first = read(plain().save(tmp_path / "a"), LLAMA)
    again = read(plain(lora_dropout=0.5).save(tmp_path / "b"), LLAMA)
    other = read(plain(lora_alpha=7.0).save(tmp_path / "c"), LLAMA)
    rounded = read(tmp_path / "a", LLAMA, dtype=torch.bfloat16)
    assert first.number == again.number
    assert len({first.number, other.number, rounded.number}) == 3


def test_the_order_of_axes_is_found_or_refused(tmp_path):
    """Until PEFT 0.20, A may read either axis of a stack; a square one's shape does not tell."""
    name = PREFIX + "model.layers.0.mlp.experts"

    def stored(at, version, width, exchanged=False):
        a, b = pair(torch.Generator().manual_seed(1), 64, width, rank=16)
        if exchanged:
            a = a.unflatten(0, (4, 4)).permute(2, 1, 0).flatten(1)  # [in, r E]: it was [E r, in]
            b = b.unflatten(1, (4, 4)).permute(2, 1, 0).flatten(0, 1)
            a, b = b, a
        tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        keys = {"target_parameters": ["experts.down_proj"], "peft_version": version}
        return HandMade(tensors, keys).save(tmp_path / at)

    def changes(folder, model):
        found = read(folder, model).products
        assert set(found) == {f"layers.0.mlp.experts.{e}.down" for e in range(4)}
        return torch.stack([low.b @ low.a for _, low in sorted(found.items())])

    oblong, square = (
        targets("qwen3_moe", num_experts=4, moe_intermediate_size=n) for n in (40, 64)
    )
    right = changes(stored("new", "0.21.2", 40), oblong)
    assert torch.allclose(changes(stored("old", "0.18.1", 40, exchanged=True), oblong), right)
    assert changes(stored("square", "0.20.0", 64), square).shape == (4, 64, 64)
    assert "is square" in refusal(stored("unknown", "0.19.1", 64), square)
    assert "and rank 4 of" in refusal(tmp_path / "new", square)


def test_a_head_is_replaced_whole(tmp_path):
    config = config_of(HOSTILE["llama"]) | {"architectures": ["LlamaForTokenClassification"]}
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    family = find_family(config | labels)
    model = AdapterTargets(family, read_spec(config | labels))
    weight, bias = (PREFIX + "score." + part for part in ("weight", "bias"))
    whole = HandMade({weight: torch.ones(2, 64), bias: torch.ones(2)})
    found = read(whole.save(tmp_path / "whole"), model).head
    assert set(found) == {"pooler.classifier.weight", "pooler.classifier.bias"}
    half = HandMade({weight: torch.ones(2, 64)})
    assert "without score.bias" in refusal(half.save(tmp_path / "half"), model)
