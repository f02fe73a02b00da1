"""Tiny random encoders in checkpoints as transformers writes them, and what it makes of prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.hostile.form import BASE, TYPES, WINDOWS, rope

_BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "layer_norm_eps": 0.05,
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "num_labels": 3,
}
_ALBERT = {**_BASE, "embedding_size": 24, "num_hidden_groups": 1, "num_hidden_layers": 3}
_T5 = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 0.05,
    "num_labels": 3,
}
_SIGLIP = {**_BASE, "hidden_act": "gelu_pytorch_tanh", "projection_size": 24}
_GATED_T5 = {**_T5, "feed_forward_proj": "gated-gelu"}
_DEBERTA = {
    **_BASE,
    "relative_attention": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
_ROBERTA = {**_BASE, "pad_token_id": 3, "type_vocab_size": 1, "max_position_embeddings": 68}
_DISTIL = {
    "vocab_size": 96,
    "dim": 64,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "activation": "gelu",
    "pad_token_id": 0,
    "num_labels": 3,
}
_MODERN = {
    **{k: v for k, v in _BASE.items() if k not in ("layer_norm_eps", "hidden_act")},
    "norm_eps": 0.05,
    "hidden_activation": "gelu",
    "local_attention": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
_BIDIRECTIONAL = {**BASE, "is_causal": False}


@dataclass(frozen=True)
class HostileEncoder:
    """The class of transformers, that of its config, and the keys.

    has_types: a second text is told by types. `architecture`: what config.json says instead.
    """

    model: str
    config: str
    keys: dict[str, Any] = field(default_factory=dict)
    has_types: bool = False
    architecture: str | None = None


def _forms(
    stem: str, keys: dict[str, Any], has_types: bool = False, config: str | None = None
) -> dict[str, HostileEncoder]:
    ends = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return {
        stem + end: HostileEncoder(stem + end, config or f"{stem}Config", keys, has_types)
        for end in ends
    }


ENCODERS: dict[str, HostileEncoder] = {
    **_forms("Bert", _BASE, has_types=True),
    **_forms("Roberta", _ROBERTA),
    **_forms("XLMRoberta", _ROBERTA),
    **_forms("Camembert", _ROBERTA),
    **_forms("Data2VecText", _ROBERTA),
    **_forms("DistilBert", _DISTIL),
    **_forms("ModernBert", _MODERN),
    **_forms("NomicBert", {**_BASE, "hidden_act": "silu"}, has_types=True),
    **_forms("Gte", {**_BASE, "type_vocab_size": 2}, has_types=True),
    **_forms("Electra", {**_BASE, "embedding_size": 24, "type_vocab_size": 2}, has_types=True),
    "electra-wide": HostileEncoder(
        "ElectraForPreTraining", "ElectraConfig", {**_BASE, "embedding_size": 64}, True
    ),
    "AlbertForPreTraining": HostileEncoder(
        "AlbertForPreTraining",
        "AlbertConfig",
        {**_ALBERT, "num_hidden_groups": 2, "num_hidden_layers": 5},
        True,
    ),
    **_forms("Albert", _ALBERT, has_types=True),
    **_forms("EuroBert", {**BASE, "classifier_pooling": "late"}),
    "eurobert-biased": HostileEncoder(
        "EuroBertForSequenceClassification",
        "EuroBertConfig",
        {**BASE, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"},
    ),
    **_forms("MPNet", {**_BASE, "max_position_embeddings": 68, "pad_token_id": 1}),
    **_forms("DebertaV2", _DEBERTA),
    "deberta-v2-own": HostileEncoder(
        "DebertaV2Model",
        "DebertaV2Config",
        {
            **_DEBERTA,
            "share_att_key": False,
            "norm_rel_ebd": "none",
            "position_buckets": -1,
            "position_biased_input": True,
            "type_vocab_size": 2,
            "max_relative_positions": 24,
        },
        True,
    ),
    "deberta-v2-c2p": HostileEncoder(
        "DebertaV2Model", "DebertaV2Config", {**_DEBERTA, "pos_att_type": "c2p"}
    ),
    "SiglipTextModel": HostileEncoder("SiglipTextModel", "SiglipTextConfig", _SIGLIP),
    "Siglip2TextModel": HostileEncoder("Siglip2TextModel", "Siglip2TextConfig", _SIGLIP),
    "T5EncoderModel": HostileEncoder("T5EncoderModel", "T5Config", _T5),
    "T5ForTokenClassification": HostileEncoder("T5ForTokenClassification", "T5Config", _T5),
    "MT5EncoderModel": HostileEncoder("MT5EncoderModel", "MT5Config", _GATED_T5),
    "MT5ForTokenClassification": HostileEncoder(
        "MT5ForTokenClassification", "MT5Config", _GATED_T5
    ),
    "UMT5EncoderModel": HostileEncoder("UMT5EncoderModel", "UMT5Config", _GATED_T5),
    "UMT5ForTokenClassification": HostileEncoder(
        "UMT5ForTokenClassification", "UMT5Config", _GATED_T5
    ),
    **_forms(
        "JinaEmbeddingsV3", {**_BASE, "type_vocab_size": 2, **rope("default")}, has_types=True
    ),
    "BertForPreTraining": HostileEncoder("BertForPreTraining", "BertConfig", _BASE, True),
    "bert-relu": HostileEncoder("BertModel", "BertConfig", {**_BASE, "hidden_act": "relu"}, True),
    "gte-untyped": HostileEncoder("GteModel", "GteConfig", {**_BASE, "type_vocab_size": 0}),
    "modernbert-biased": HostileEncoder(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {
            **_MODERN,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
        },
    ),
    "llama": HostileEncoder("LlamaModel", "LlamaConfig", _BIDIRECTIONAL),
    "LlamaBidirectionalModel": HostileEncoder(
        "LlamaModel",
        "LlamaConfig",
        {**_BIDIRECTIONAL, "pooling": "avg"},
        architecture="LlamaBidirectionalModel",
    ),
    "qwen2": HostileEncoder("Qwen2Model", "Qwen2Config", _BIDIRECTIONAL),
    "qwen3": HostileEncoder("Qwen3Model", "Qwen3Config", _BIDIRECTIONAL),
    "gemma3": HostileEncoder(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {
            **BASE,
            **WINDOWS,
            "query_pre_attn_scalar": 20,
            "use_bidirectional_attention": True,
            "layer_types": TYPES,
        },
    ),
}


@dataclass(frozen=True)
class MadeEncoder:
    """A checkpoint in float32, prompts with the position of their second text (None: they have
    one), the hidden states [T, C] that transformers makes of them, and its logits where it has
    some: [labels], or of tokens [T, labels].
    """

    folder: Path
    prompts: list[list[int]]
    seconds: list[int | None]
    hidden: list[torch.Tensor]
    logits: list[torch.Tensor]


def make_encoder(hostile: HostileEncoder, folder: Path) -> MadeEncoder:
    model = random_encoder(hostile)
    model.save_pretrained(folder)
    if hostile.architecture is not None:
        rename(folder, hostile.architecture)
    generator = torch.Generator().manual_seed(7)
    lengths = (23, 1, 9, 64, 14)
    prompts = [torch.randint(4, 96, (n,), generator=generator).tolist() for n in lengths]
    seconds = [10, None, None, 33, 3] if hostile.has_types else [None] * len(lengths)
    found = [ask(model, *asked) for asked in zip(prompts, seconds, strict=True)]
    return MadeEncoder(folder, prompts, seconds, *(list(part) for part in zip(*found, strict=True)))


def random_encoder(hostile: HostileEncoder) -> torch.nn.Module:
    """The model as transformers makes it, with weights that leave nothing at one or zero."""
    config = getattr(transformers, hostile.config)(**hostile.keys, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, hostile.model)(config).eval().float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            by_one_more = hostile.config.startswith("Gemma")
            value.copy_(torch.randn_like(value) * 0.15 + (is_norm and not by_one_more))
    model.tie_weights()
    return model


@torch.no_grad()
def ask(
    model: torch.nn.Module, prompt: list[int], second: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states [T, C] and the logits that transformers makes of a prompt."""
    ids = torch.tensor([prompt])
    types = (
        {}
        if second is None
        else {"token_type_ids": (torch.arange(len(prompt)) >= second)[None].long()}
    )
    found = model(ids, output_hidden_states=True, **types)
    base = model.base_model(ids, **types)
    logits = found.logits[0] if "logits" in found else torch.zeros(0)
    return base.last_hidden_state[0], logits


def rename(folder: Path, architecture: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": [architecture]}))


def renamed_tensors(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
