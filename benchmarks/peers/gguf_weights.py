"""A Qwen3 checkpoint in bfloat16, dense or with experts -> a GGUF file with the same values, for
llama.cpp.

Without a tokenizer: the benchmark speaks in token ids.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_ARCHITECTURES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE}
_TYPES = {"BF16": np.uint16, "F32": np.float32}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(folder: Path, file: Path) -> None:
    """Matrices stay bfloat16, norms become float32 as llama.cpp wants them."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] in _ARCHITECTURES, "only Qwen3's shapes are converted"
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for path in sorted(folder.glob("*.safetensors")):
        for name, values in read_tensors(path):
            assert values.dtype == np.uint16, f"{name} is {values.dtype}, not BF16"
            if expert := _EXPERT.fullmatch(name):
                block, index, part = expert.groups()
                mates = experts[f"{block}.{part}"]
                mates[int(index)] = values
                if len(mates) < config["num_experts"]:
                    continue
                name = f"{block}.{part}.weight"  # noqa: PLW2901
                values = np.stack([mates[i] for i in range(len(mates))])  # noqa: PLW2901
                mates.clear()
            new = names.get_name(name, try_suffixes=(".weight",))
            assert new, f"GGUF has no name for {name}"
            if values.ndim == 1:
                writer.add_tensor(new, widened(values))
            else:
                raw = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(new, values.view(np.uint8), raw_dtype=raw)
    part = file.with_suffix(".part")
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


def describe_decoder(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes that a Llama and a Qwen3 have, and that there is no tokenizer."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    describe_decoder(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a safetensors file, mapped, by name: those in BF16 as bits in uint16,
    those in F32 as they are.
    """
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", 8 + size)
    for name, entry in header.items():
        assert entry["dtype"] in _TYPES, f"{name} is {entry['dtype']}"
        start, end = entry["data_offsets"]
        yield name, data[start:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])


def widened(values: np.ndarray) -> np.ndarray:
    """Values from `read_tensors` in float32."""
    if values.dtype == np.float32:
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)
