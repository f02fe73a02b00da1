"""From folders on disk to facts and plans."""

import json
import struct
from pathlib import Path

import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.facts import EMBEDDED_NAME
from quire.config.planning import checkpoint_dtype, gather_model_facts, make_plan
from quire.errors import (
    InvalidParameter,
    LoadError,
    ModelNotFound,
    NotBuiltYet,
    RequestError,
    UnknownConfigKey,
    UnsupportedArchitecture,
)
from quire.models.layer_memory import KeyValues
from tests.models.hostile.models import HOSTILE, config_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def make_folder(path, config=LLAMA, **files):
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(json.dumps(content))
    return str(path)


def write_header(path, header):
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def test_numbers_of_a_folder(tmp_path):
    folder = make_folder(tmp_path, generation_config__json={"top_k": 5, "eos_token_id": 2})
    facts = gather_model_facts(EngineArgs(model=folder))
    assert (facts.name, facts.folder, facts.tokenizer_folder) == (folder, folder, folder)
    assert facts.num_parameters == 100 * 64 * 2 + 64 + 2 * (
        64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    )
    assert facts.memories == (KeyValues(kv_heads=2, head_dim=16),) * 2
    assert (facts.length.limit, facts.checkpoint_dtype) == (128, "bfloat16")
    plan = make_plan(EngineArgs(model=folder))
    assert plan.sampling.sampling_defaults == {"top_k": 5}
    assert plan.sampling.generation_eos_token_ids == (2,)


def test_no_model_is_the_embedded_one():
    plan = make_plan(EngineArgs())
    assert plan.model.served_model_names == (EMBEDDED_NAME,)
    assert plan.model.architecture == "LlamaForCausalLM"
    assert plan.model.max_model_len >= 2048


def test_overrides_are_merged_or_called(tmp_path):
    folder = make_folder(tmp_path)
    merged = gather_model_facts(EngineArgs(model=folder, hf_overrides={"num_hidden_layers": 3}))
    assert merged.num_layers == 3

    def halve(config):
        return {**config, "vocab_size": config["vocab_size"] // 2}

    assert gather_model_facts(EngineArgs(model=folder, hf_overrides=halve)).vocab_size == 50
    with pytest.raises(InvalidParameter, match="must return"):
        gather_model_facts(EngineArgs(model=folder, hf_overrides=lambda config: None))


def test_generation_config_from_elsewhere_or_nowhere(tmp_path):
    folder = make_folder(tmp_path, generation_config__json={"top_k": 5})
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    plans = [
        make_plan(EngineArgs(model=folder, generation_config=source)).sampling.sampling_defaults
        for source in ("auto", "vllm", "quire", str(other))
    ]
    assert plans == [{"top_k": 5}, {}, {}, {"top_p": 0.5}]
    with pytest.raises(InvalidParameter, match="generation_config"):
        make_plan(EngineArgs(model=folder, generation_config=str(tmp_path / "none")))


def test_chat_template_as_text_file_or_name(tmp_path):
    folder = make_folder(tmp_path)
    (tmp_path / "t.jinja").write_text("hello {{ messages }}")
    shown = [
        make_plan(EngineArgs(model=folder, chat_template=given)).model.chat_template
        for given in (None, "{{ x }}", str(tmp_path / "t.jinja"), "tool_use")
    ]
    assert shown == [None, "{{ x }}", "hello {{ messages }}", "tool_use"]
    with pytest.raises(InvalidParameter, match="a file that exists"):
        make_plan(EngineArgs(model=folder, chat_template="missing.jinja"))


@pytest.mark.parametrize("is_file", [True, False])
def test_a_chat_template_that_is_not_jinja_is_refused_at_the_start(tmp_path, is_file):
    given = "{{"
    if is_file:
        given = str(tmp_path / "t.jinja")
        Path(given).write_text("{{")
    with pytest.raises(
        RequestError, match="chat template has a syntax error in line 1: unexpected"
    ):
        make_plan(EngineArgs(model=make_folder(tmp_path), chat_template=given))


@pytest.mark.parametrize("given", ["", " ", ["a", ""]])
def test_a_served_model_has_a_name(tmp_path, given):
    with pytest.raises(InvalidParameter, match="served_model_name=.*: a name has a character"):
        make_plan(EngineArgs(model=make_folder(tmp_path), served_model_name=given))


@pytest.mark.parametrize(
    ("config", "stored", "dtype"),
    [
        ({"dtype": "float16"}, None, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, None, "bfloat16"),
        ({}, "BF16", "bfloat16"),
        ({"torch_dtype": "auto"}, "F8_E4M3", "F8_E4M3"),
        ({}, None, "float32"),
    ],
    ids=str,
)
def test_type_of_the_checkpoint(tmp_path, config, stored, dtype):
    if stored:
        write_header(tmp_path, {"__metadata__": {}, "w": {"dtype": stored}})
    assert checkpoint_dtype(config, tmp_path) == dtype


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[1]]", struct.pack("<Q", 9) + b'{"w": 1}'],
)
def test_files_that_are_not_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors is not a (valid )?safetensors file"):
        checkpoint_dtype({}, tmp_path)


def test_folders_that_are_not_models(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        make_plan(EngineArgs(model=str(tmp_path)))
    with pytest.raises(ModelNotFound):
        make_plan(EngineArgs(model=str(tmp_path / "missing")))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="cannot be read as JSON"):
        make_plan(EngineArgs(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LoadError, match="must hold a JSON object"):
        make_plan(EngineArgs(model=str(tmp_path)))


def test_configs_that_we_do_not_know(tmp_path):
    with pytest.raises(UnsupportedArchitecture):
        make_plan(EngineArgs(model=make_folder(tmp_path, {**LLAMA, "architectures": ["X"]})))
    with pytest.raises(UnknownConfigKey, match="sliding_window=1"):
        make_plan(EngineArgs(model=make_folder(tmp_path, {**LLAMA, "sliding_window": 1})))


def test_a_key_that_nothing_reads_is_told_once_or_refused(tmp_path, caplog):
    folder = make_folder(tmp_path, {**LLAMA, "surprise": 1, "another": {"a": [2]}, "no": False})
    plan = make_plan(EngineArgs(model=folder))
    warnings = [r.getMessage() for r in caplog.records if "surprise" in r.getMessage()]
    assert [text.partition("transformers: ")[2] for text in warnings] == [
        'another={"a": [2]}, surprise=1.'
    ]
    assert 'note: Nothing reads these keys of config.json: another={"a": [2]}' in plan.explain()
    with pytest.raises(UnknownConfigKey, match=r'hf_overrides={"surprise": null, "another": null}'):
        make_plan(EngineArgs(model=folder, strict_config=True))


def test_arguments_are_checked_before_files_are_touched():
    with pytest.raises(NotBuiltYet, match="decode_context_parallel_size"):
        make_plan(EngineArgs(model="/does/not/exist", decode_context_parallel_size=2))


def test_an_override_that_nothing_reads_is_refused(tmp_path):
    folder = make_folder(tmp_path, LLAMA)
    with pytest.raises(UnknownConfigKey, match="hf_overrides: rope_tetha=1"):
        make_plan(EngineArgs(model=folder, hf_overrides={"rope_tetha": 1}))


def test_a_block_size_that_does_not_suit_the_layers_is_derived(tmp_path):
    llama4 = config_of(HOSTILE["llama4"]) | {"attention_chunk_size": 16}
    plan = make_plan(EngineArgs(model=make_folder(tmp_path, llama4), skip_tokenizer_init=True))
    assert plan.memory.block_size == 16
    assert "chunks of attention are whole blocks" in plan.reasons["block_size"]
