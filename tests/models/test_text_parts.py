"""Models that also take pictures: their text part gives their logits, the rest is skipped."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts
from quire.errors import UnsupportedArchitecture, WeightMismatch
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.costs import num_parameters
from quire.models.reading.text_part import text_part
from tests.models.hostile.form import BASE
from tests.models.hostile.models import HOSTILE, keys_of
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full
from tests.models.vision.published import PUBLISHED as WITH_TOWERS

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": BASE["hidden_size"],
}

QWEN_3_VISION = QWEN_VISION | {"num_position_embeddings": 16}
WITHOUT_WINDOWS = ("qwen3_vl", "qwen3_vl_moe")
"""Their text has no windows, which the hostile models have."""
OF_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "norm_topk_prob")


@dataclass(frozen=True)
class Whole:
    """A model: its type, its text's, the hostile model of its keys, and its tower's keys."""

    kind: str
    text: str
    keys: str
    vision: dict[str, Any] = field(default_factory=lambda: VISION)


WHOLES = {
    "Qwen3_5ForConditionalGeneration": Whole("qwen3_5", "qwen3_5_text", "qwen3_5", QWEN_VISION),
    "Qwen3_5MoeForConditionalGeneration": Whole(
        "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe", QWEN_VISION
    ),
    "Qwen3VLMoeForConditionalGeneration": Whole(
        "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_moe", QWEN_3_VISION
    ),
    "Qwen3VLForConditionalGeneration": Whole("qwen3_vl", "qwen3_vl_text", "qwen3", QWEN_3_VISION),
    "Gemma3ForConditionalGeneration": Whole("gemma3", "gemma3_text", "gemma3"),
    "Mistral3ForConditionalGeneration": Whole(
        "mistral3", "mistral", "mistral", VISION | {"model_type": "pixtral", "head_dim": 8}
    ),
    "Mistral3ForConditionalGeneration-ministral3": Whole(
        "mistral3", "ministral3", "ministral3", VISION | {"model_type": "pixtral", "head_dim": 8}
    ),
    "Mistral3ForConditionalGeneration-mistral4": Whole(
        "mistral3", "mistral4", "mistral4", VISION | {"model_type": "pixtral", "head_dim": 8}
    ),
    "MiniMaxM3SparseForConditionalGeneration": Whole(
        "minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3", VISION | {"num_channels": 1}
    ),
    "Llama4ForConditionalGeneration": Whole(
        "llama4",
        "llama4_text",
        "llama4",
        VISION | {"vision_output_dim": 32, "projector_input_dim": 16, "projector_output_dim": 32},
    ),
}
DEFAULT = (
    "Qwen3_5ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
)


def write_whole(name: str, folder: Any) -> torch.nn.Module:
    """Store a model with random weights."""
    whole, architecture = WHOLES[name], name.split("-")[0]
    keys = keys_of(HOSTILE[whole.keys])
    keys.pop("final_logit_softcapping", None)  # which transformers leaves out here
    if whole.kind in WITHOUT_WINDOWS:
        keys = {key: value for key, value in keys.items() if key not in OF_WINDOWS}
    config = AutoConfig.for_model(
        whole.kind,
        text_config={**keys, "model_type": whole.text},
        vision_config=whole.vision,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval().float()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.15)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[] if a in DEFAULT else [pytest.mark.full]) for a in WHOLES],
)
def test_the_text_part_has_the_logits_of_the_whole(architecture, tmp_path):
    whole = write_whole(architecture, tmp_path)
    spec = read_spec(read_config(tmp_path))
    prompt = torch.randint(3, 96, (19,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = judge_of(whole)(prompt[None], use_cache=False).logits[0]
    found = run_full(load(tmp_path, spec, max_model_len=64), [prompt])
    assert relative_error(found, [expected]) < TOLERANCE


def judge_of(whole: torch.nn.Module) -> torch.nn.Module:
    """What gives a model's logits: itself, or for Llama 4 its text part, since transformers 5.24
    asks the outputs of that for pictures which they do not have.
    """
    kind = transformers.Llama4ForConditionalGeneration
    return whole.language_model if isinstance(whole, kind) else whole


MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"head_dim": 64, "hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}
QWEN3_5_35B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
PUBLISHED = {
    "gemma-3-4b": (WITH_TOWERS["gemma-3-4b-it"], 3_880_263_168),
    "Mistral-Small-3.1": (MISTRAL_SMALL, 23_572_403_200),
    "Llama-4-Scout": (LLAMA_4_SCOUT, 107_769_861_120),
    "Qwen3.5-35B-A3B": (QWEN3_5_35B, 34_660_610_688),
}
"""Published files in short, and the parameters of their text parts."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_wholes_have_their_text_parameters(name):
    config, count = PUBLISHED[name]
    assert num_parameters(read_spec(text_part(config))) == count


def test_experts_of_qwen_3_vl_are_read_as_published_and_as_transformers_writes_them(tmp_path):
    write_whole("Qwen3VLMoeForConditionalGeneration", tmp_path)
    spec, prompt = read_spec(read_config(tmp_path)), torch.arange(3, 20)
    written = run_full(load(tmp_path, spec, max_model_len=64), [prompt])
    tensors = {
        name: t.transpose(1, 2).contiguous() if ".experts." in name else t
        for name, t in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    published = run_full(load(tmp_path, spec, max_model_len=64), [prompt])
    assert torch.equal(published[0], written[0])


def rename_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("thinker.model.", "thinker.lm_head.weight"),
        ("model.text_model.", "lm_head.weight"),
    ],
)
def test_the_text_is_found_behind_any_prefix(prefix, head, tmp_path, caplog):
    write_whole("Qwen3VLForConditionalGeneration", tmp_path)
    spec, prompt = read_spec(read_config(tmp_path)), torch.arange(3, 20)
    usual = run_full(load(tmp_path, spec, max_model_len=64), [prompt])
    rename_tensors(
        tmp_path,
        lambda name: name.replace("model.language_model.", prefix).replace("lm_head.weight", head),
    )
    caplog.set_level("INFO")
    found = run_full(load(tmp_path, spec, max_model_len=64), [prompt])
    assert torch.equal(found[0], usual[0])
    assert "Not loaded, because they are not about text: model" in caplog.text


def test_a_tensor_of_the_text_that_is_unknown_is_refused(tmp_path):
    write_whole("Qwen3VLForConditionalGeneration", tmp_path)
    spec, tensors = read_spec(read_config(tmp_path)), load_file(tmp_path / "model.safetensors")
    for name in ("layers.0.self_attn.extra.weight", "extra_norm.weight"):
        more = {**tensors, f"model.language_model.{name}": torch.ones(3)}
        save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(WeightMismatch, match=f"unknown model.language_model.{name}"):
            load(tmp_path, spec, max_model_len=64)


def test_two_texts_in_one_file_are_refused(tmp_path):
    write_whole("Qwen3VLForConditionalGeneration", tmp_path)
    spec, tensors = read_spec(read_config(tmp_path)), load_file(tmp_path / "model.safetensors")
    twice = {n.replace("model.language_model.", "talker."): t.clone() for n, t in tensors.items()}
    save_file({**twice, **tensors}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match="several text models"):
        load(tmp_path, spec, max_model_len=64)


def test_a_text_next_to_the_parts_of_the_whole_is_read_with_its_class_s_defaults():
    """As Qwen2-VL is published: without an object of text."""
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 32, "embed_dim": 1280, "model_type": "qwen2_vl"},
        "vision_start_token_id": 151652,
        "vocab_size": 151936,
    }
    part = text_part(config)
    assert part["architectures"] == ["Qwen2ForCausalLM"]
    assert num_parameters(read_spec(part)) == 1_543_714_304


def test_a_whole_whose_text_no_family_describes_is_refused_with_its_type():
    config = {
        "architectures": ["MllamaForConditionalGeneration"],
        "model_type": "mllama",
        "text_config": {"model_type": "mllama_text_model"},
    }
    with pytest.raises(UnsupportedArchitecture, match="MllamaForConditionalGeneration is not"):
        read_spec(text_part(config))


def test_a_text_of_an_unknown_type_is_not_read_as_the_usual_one_of_its_whole():
    text = MISTRAL_SMALL["text_config"] | {"model_type": "mistral9"}
    with pytest.raises(UnsupportedArchitecture, match="its text is of the type mistral9"):
        read_spec(text_part(MISTRAL_SMALL | {"text_config": text}))


def test_overrides_reach_the_text_by_either_way(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_SMALL))
    for overrides in ({"text_config": {"rope_theta": 5e5}}, {"rope_theta": 5e5}):
        args = EngineArgs(model=str(tmp_path), hf_overrides=overrides, skip_tokenizer_init=True)
        facts = gather_model_facts(args)
        assert facts.hf_config["rope_theta"] == 5e5
        assert facts.part_of == "Mistral3ForConditionalGeneration"
