"""Model folders with random weights, so that anyone can repeat a figure or a test without a
download.

What is written is an ordinary Hugging Face checkpoint (config, safetensors, tokenizer, chat
template) that transformers loads too. It is a function of shape, family, seed and dtype.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.errors import InvalidParameter, UnknownConfigKey
from quire.models.families import find_family, read_with_foreign
from quire.models.loading.random_weights import RandomLeaves
from quire.models.loading.transforms import from_leaves
from quire.models.reading.keys import listed
from quire.models.rules import StoredTensor, tensor_map
from quire.testing.model_shapes import FAMILIES, SHAPES, make_config
from quire.testing.tiny_tokenizer import write_tokenizer

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SHARD_BYTES = 4 << 30
_THREADS = 2


def make_checkpoint(
    path: str | Path,
    shape: str | Mapping[str, Any] = "tiny",
    family: str | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
) -> Path:
    """Write a model folder with random weights to `path` and return it.

    `shape` is one of `SHAPES` in testing/model_shapes.py, such as tiny (about 1 M parameters), 0.6b
    (Qwen3-0.6B), 1b (Llama-3.2-1B), 4b (Qwen3-4B), 8b (Llama-3.1-8B), or keys of config.json that
    differ from tiny.
    `family` is one of `FAMILIES` in testing/model_shapes.py, by default the one the shape is known
    from. Two calls with equal arguments write equal files; an earlier checkpoint in `path` is
    replaced.
    Raises InvalidParameter for an unknown name, UnknownConfigKey for an unknown key.
    """
    config = checkpoint_config(shape, family, dtype)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    write_tokenizer(folder, config["vocab_size"])
    decoder, foreign = read_with_foreign(config)
    if foreign:
        raise UnknownConfigKey(f"Nothing reads these keys: {listed(foreign)}.")
    tensors = tensor_map(find_family(config), decoder)
    _write_weights(folder, tensors, RandomLeaves(seed), getattr(torch, dtype))
    _write_json(folder / "config.json", config)  # last: a folder with a config is complete
    return folder


def checkpoint_config(
    shape: str | Mapping[str, Any], family: str | None = None, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The config.json that `make_checkpoint` writes for these arguments, and raises for."""
    if dtype not in _DTYPES:
        raise InvalidParameter("dtype", dtype, ", ".join(_DTYPES))
    if isinstance(shape, str) and shape not in SHAPES:
        raise InvalidParameter("shape", shape, f"{', '.join(SHAPES)}, or a dict of config keys")
    name = family or (SHAPES[shape].family if isinstance(shape, str) else "llama")
    if name not in FAMILIES:
        raise InvalidParameter("family", name, ", ".join(FAMILIES))
    return make_config(shape, name) | {"torch_dtype": dtype}


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    tensors: tuple[StoredTensor, ...]


def _write_weights(
    folder: Path, tensors: list[StoredTensor], draw: RandomLeaves, dtype: torch.dtype
) -> None:
    shards = list(_shards(tensors, dtype.itemsize))
    for shard in shards:
        _write_shard(folder / shard.name, shard.tensors, draw, dtype)
    if len(shards) > 1:
        where = {t.name: shard.name for shard in shards for t in shard.tensors}
        total = sum(_num_bytes(t, dtype.itemsize) for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: list[StoredTensor], itemsize: int) -> Iterator[_Shard]:
    groups: list[list[StoredTensor]] = [[]]
    room = _SHARD_BYTES
    for tensor in tensors:
        size = _num_bytes(tensor, itemsize)
        if size > room and groups[-1]:
            groups.append([])
            room = _SHARD_BYTES
        groups[-1].append(tensor)
        room -= size
    for i, group in enumerate(groups):
        numbered = f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        yield _Shard("model.safetensors" if len(groups) == 1 else numbered, tuple(group))


def _write_shard(
    file: Path, tensors: tuple[StoredTensor, ...], draw: RandomLeaves, dtype: torch.dtype
) -> None:
    """One safetensors file: header's length, header, data. Tensors are drawn side by side."""
    header, offsets = _header(tensors, dtype)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.pwrite(descriptor, header, 0)
        with ThreadPoolExecutor(_THREADS) as pool:
            done = [
                pool.submit(_write_tensor, descriptor, tensor, draw, dtype, offset)
                for tensor, offset in zip(tensors, offsets, strict=True)
            ]
            for future in done:
                future.result()
    finally:
        os.close(descriptor)


def _write_tensor(
    descriptor: int, stored: StoredTensor, draw: RandomLeaves, dtype: torch.dtype, offset: int
) -> None:
    leaves = [draw(leaf) for leaf in stored.leaves]
    whole = leaves[0] if not stored.steps else from_leaves(stored, leaves)
    data = whole.to(dtype).contiguous().view(torch.uint8).numpy().data.cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _header(tensors: tuple[StoredTensor, ...], dtype: torch.dtype) -> tuple[bytes, list[int]]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = [], 0
    name = _DTYPES[str(dtype).removeprefix("torch.")]
    for tensor in tensors:
        end = at + _num_bytes(tensor, dtype.itemsize)
        entries[tensor.name] = {
            "dtype": name,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        starts.append(at)
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [base + start for start in starts]


def _num_bytes(tensor: StoredTensor, itemsize: int) -> int:
    return sum(leaf.size for leaf in tensor.leaves) * itemsize


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
