"""Checkpoints of InternVL as their authors publish them have the answers of transformers' form."""

import json

import pytest
from safetensors.torch import load_file, save_file
from torch import cat

from quire.errors import UnsupportedConfigValue
from quire.media.internvl_chat import chat_files
from tests.models.vision.spoken import picture, write_spoken
from tests.models.vision.spoken_models import IMAGE, SPOKEN
from tests.models.vision.test_pictures import PARAMS, as_prompt, engine

NAMES = {
    "attention.projection_layer.": "attn.proj.",
    "layernorm_before.": "norm1.",
    "layernorm_after.": "norm2.",
    "lambda_1": "ls1",
    "lambda_2": "ls2",
    "encoder.layer.": "encoder.layers.",
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection.": "embeddings.patch_embedding.",
    "vision_tower.": "vision_model.",
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
}


def published_tensors(tensors):
    """The tensors by their published names; queries, keys and values are one."""
    found = {}
    for name, tensor in tensors.items():
        if ".attention.q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("k_proj", "v_proj")]
            tensor, name = cat([tensor, *parts]), name.replace("attention.q_proj", "attn.qkv")
        elif "_proj." in name and "vision_tower." in name:
            continue
        for theirs, published in NAMES.items():
            name = name.replace(theirs, published)
        found[name] = tensor
    return found


def publish(folder):
    """Change a checkpoint of transformers into the published form."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    vision, text = config["vision_config"], config["text_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    published = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "vision_config": {
            **{key: vision[key] for key in (*kept, "layer_norm_eps", "norm_type", "hidden_act")},
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "image_size": 24,
            "patch_size": 6,
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": False,
            "drop_path_rate": 0.1,
            "use_flash_attn": True,
        },
        "llm_config": {**text, "architectures": ["Qwen2ForCausalLM"]},
        "select_layer": -1,
        "ps_version": "v2",
        "downsample_ratio": 0.5,
        "template": "internvl2_5",
        "force_image_size": 24,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "max_dynamic_patch": 3,
        "pad2square": False,
    }
    path.write_text(json.dumps(published))
    tensors = load_file(folder / "model.safetensors")
    save_file(published_tensors(tensors), folder / "model.safetensors")
    (folder / "processor_config.json").unlink()
    colours = {key: SPOKEN["internvl"].image[key] for key in ("image_mean", "image_std")}
    files = {"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 448, **colours}
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(f'"{IMAGE}"', '"<IMG_CONTEXT>"'))


def answers(folder):
    llm = engine(folder)
    asked = [
        as_prompt(f"w1 {IMAGE} w2", [picture(1)]),
        as_prompt(f"w1 {IMAGE} w2", [picture(2, 25, 50)]),
        "w7 w8",
    ]
    return [
        (output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].logprobs)
        for output in llm.generate(asked, PARAMS)
    ]


def test_answers_are_those_of_transformers_form(tmp_path):
    write_spoken("internvl", tmp_path)
    right = answers(tmp_path)
    publish(tmp_path)
    assert answers(tmp_path) == right


@pytest.mark.parametrize("changes", [{"pad2square": True}, {"use_thumbnail": False}])
def test_other_ways_to_cut_pictures_are_refused_by_name(changes):
    config = {"model_type": "internvl_chat", "vision_config": {}}
    with pytest.raises(UnsupportedConfigValue, match=next(iter(changes))):
        chat_files({**config, **changes}, {})


def test_pictures_are_cut_as_the_config_says():
    config = {"vision_config": {"image_size": 448, "patch_size": 14}, "max_dynamic_patch": 6}
    processor, image = chat_files(config, {})
    assert processor["image_seq_length"] == 256
    assert (image["min_patches"], image["max_patches"]) == (1, 6)
    _, whole = chat_files({**config, "dynamic_image_size": False}, {})
    assert whole["max_patches"] == 1
