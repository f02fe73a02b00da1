"""Mistral's own releases (`consolidated*.safetensors`) under the names and in the row order of
Hugging Face checkpoints.

Their rotary embedding turns neighbouring rows of queries and keys; ours turns the two halves of a
head (models/rotary_tables.py). So these rows are put in the other order while they are read.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from quire.errors import WeightMismatch
from quire.models.loading.readers.checkpoint_files import MISTRAL, CheckpointFiles, TensorEntry

_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_EXPERT = re.compile(r"feed_forward\.(experts\.\d+\.w[123])")


class MistralFiles:
    """Read access by the names that `MistralForCausalLM` has on the hub."""

    def __init__(self, folder: Path, head_dim: int) -> None:
        """`head_dim` is that of queries and keys. Raises what `CheckpointFiles` raises."""
        self._files = CheckpointFiles(folder, MISTRAL)
        self._head_dim = head_dim
        self._stored: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        for stored, entry in self._files.entries.items():
            name = hub_name(stored)
            if name in self.entries:
                raise WeightMismatch(f"{stored} and {self._stored[name]} are the same weight.")
            self._stored[name] = stored
            self.entries[name] = entry

    def read(self, name: str) -> Tensor:
        """The tensor in its stored dtype, rows of queries and keys by halves."""
        tensor = self._files.read(self._stored[name])
        if not name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            return tensor
        # these files rotate neighbours, and those on the hub halves of a head
        pairs = tensor.view(-1, self._head_dim // 2, 2, tensor.shape[1])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def close(self) -> None:
        self._files.close()


def hub_name(stored: str) -> str:
    """The name of a weight in a Hugging Face checkpoint; an unknown one stays as it is."""
    layer = _LAYER.fullmatch(stored)
    if layer is None:
        return _NAMES.get(stored, stored)
    part = _PARTS.get(layer[2])
    if part is None and (expert := _EXPERT.fullmatch(layer[2])):
        part = f"block_sparse_moe.{expert[1]}"
    return stored if part is None else f"model.layers.{layer[1]}.{part}.weight"
