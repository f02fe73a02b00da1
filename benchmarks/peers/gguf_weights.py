"""A Qwen3 checkpoint in bfloat16 -> a GGUF file with the same values, for llama.cpp.

Without a tokenizer: the benchmark speaks in token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(folder: Path, file: Path) -> None:
    """Matrices stay bfloat16, norms become float32 as llama.cpp wants them."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3", "only the 0.6b shape is converted; use that"
    writer = gguf.GGUFWriter(str(file), "qwen3")
    _describe(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for path in sorted(folder.glob("*.safetensors")):
        for name, values in _tensors(path):
            new = names.get_name(name, try_suffixes=(".weight",))
            assert new, f"GGUF has no name for {name}"
            if values.ndim == 1:
                wide = values.astype(np.uint32) << 16
                writer.add_tensor(new, wide.view(np.float32))
            else:
                raw = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(new, values.view(np.uint8), raw_dtype=raw)
    part = file.with_suffix(".part")
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _tensors(path: Path) -> list[tuple[str, np.ndarray]]:
    """(name, bfloat16 bits as uint16) of a safetensors file, mapped."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + size)
    found = []
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}, not BF16"
        start, end = entry["data_offsets"]
        found.append((name, data[start:end].view(np.uint16).reshape(entry["shape"])))
    return found
