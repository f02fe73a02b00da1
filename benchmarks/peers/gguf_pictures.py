"""A LLaVA with CLIP's tower and a Llama -> two GGUF files with the same values, for llama.cpp: the
tower with its projector, and the decoder, without a tokenizer.

Names and keys are those that llama.cpp's clip.cpp and its Llama read. Its graph for LLaVA has the
class token after the patches, so the place of that, the first one, is stored last.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_weights import describe_decoder, read_tensors, widened

_TOWER = re.compile(r"vision_tower\.(?:vision_model\.)?(.*)")
_TOP = {
    "embeddings.class_embedding": "v.class_embd",
    "embeddings.patch_embedding.weight": "v.patch_embd.weight",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "pre_layrnorm.weight": "v.pre_ln.weight",
    "pre_layrnorm.bias": "v.pre_ln.bias",
}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_PROJECTOR = {"linear_1": "mm.0", "linear_2": "mm.2"}
Tensors = dict[str, np.ndarray]


def write_files(folder: Path, kind: str) -> tuple[Path, Path]:
    """Write the tower's file and the decoder's next to a checkpoint. `kind` of matrices: bf16, f16
    or f32; everything else is f32.
    """
    config = json.loads((folder / "config.json").read_text())
    files = folder / f"tower.{kind}.gguf", folder / f"decoder.{kind}.gguf"
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {name: widened(values) for name, values in read_tensors(path)}
    colours = json.loads((folder / "preprocessor_config.json").read_text())
    _write_tower(files[0], config, tensors, colours, kind)
    _write_decoder(files[1], config["text_config"], tensors, kind)
    return files


def _write_tower(
    file: Path, config: dict[str, Any], tensors: Tensors, colours: dict[str, Any], kind: str
) -> None:
    vision = config["vision_config"]
    writer = gguf.GGUFWriter(str(file), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    for key, value in (
        ("embedding_length", vision["hidden_size"]),
        ("feed_forward_length", vision["intermediate_size"]),
        ("block_count", vision["num_hidden_layers"]),
        ("attention.head_count", vision["num_attention_heads"]),
        ("projection_dim", config["text_config"]["hidden_size"]),
        ("image_size", vision["image_size"]),
        ("patch_size", vision["patch_size"]),
    ):
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", colours[key])
    for name, values in tensors.items():
        if new := _name_in_tower(name):
            is_table = new == "v.position_embd.weight"
            _add(writer, new, np.roll(values, -1, 0) if is_table else values, kind)
    _finish(writer)


def _name_in_tower(name: str) -> str | None:
    module, _, leaf = name.rpartition(".")
    if module.startswith("multi_modal_projector."):
        return f"{_PROJECTOR[module.rpartition('.')[2]]}.{leaf}"
    found = _TOWER.fullmatch(name)
    if found is None or found[1].startswith("post_layernorm"):
        return None
    if found[1] in _TOP:
        return _TOP[found[1]]
    layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.*)\.(weight|bias)", found[1])
    assert layer, f"no name for {name}"
    return f"v.blk.{layer[1]}.{_PARTS[layer[2]]}.{layer[3]}"


def _write_decoder(file: Path, text: dict[str, Any], tensors: Tensors, kind: str) -> None:
    writer = gguf.GGUFWriter(str(file), "llama")
    describe_decoder(writer, text)
    writer.add_rope_dimension_count(text["hidden_size"] // text["num_attention_heads"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, text["num_hidden_layers"])
    for name, given in tensors.items():
        if not name.startswith("language_model."):
            continue
        values = given
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # neighbours rotate there, not halves
            heads = text["num_key_value_heads" if ".k_proj" in name else "num_attention_heads"]
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        bare = name.removeprefix("language_model.")
        new = names.get_name(bare, try_suffixes=(".weight",))
        assert new, f"GGUF has no name for {name}"
        _add(writer, new, values, kind)
    _finish(writer)


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    is_matrix = values.ndim == 2 and "position" not in name
    if is_matrix and kind == "bf16":
        codes = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    elif is_matrix or values.ndim == 4:  # llama.cpp convolves f16 and f32
        writer.add_tensor(name, values.astype(np.float32 if kind == "f32" else np.float16))
    else:
        writer.add_tensor(name, values.astype(np.float32))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
