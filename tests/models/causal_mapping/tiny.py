"""A tiny random checkpoint of a name of transformers' mapping, with values that hide nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.foreign.tiny_models import FOREIGN, OF_A_PAIR
from tests.models.hostile.models import BY_ONE_MORE

LENGTH, VOCAB = 96, 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


_DECODER = {"is_decoder": True}
_LATENTS = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_MIXTURE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {"full_attention": _ROPE, "sliding_attention": {**_ROPE, "rope_theta": 1e3}}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_INKLING = {
    **_MIXTURE,
    "n_routed_experts": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 6,
    "local_layer_ids": [0, 2],
    "rel_extent": 16,
    "unpadded_vocab_size": VOCAB,
}
OWN: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {**_LATENTS, **_MIXTURE, "n_routed_experts": 8},
    "AXK2ForCausalLM": {**_LATENTS, **_MIXTURE, **_INDEXER, "n_routed_experts": 8},
    "HYV4ForCausalLM": {**_LATENTS, **_MIXTURE, **_INDEXER, "n_routed_experts": 8},
    "BeamForCausalLM": {
        **_MIXTURE,
        "num_experts": 8,
        "sliding_window": 6,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "Cohere2MoeForCausalLM": {"sliding_window": 6},
    "CohereCompassForCausalLM": {"sliding_window": 6, "rope_parameters": _ROPES},
    "DoryForCausalLM": {
        "num_hidden_layers": 12,
        "n_input_layers": 4,
        "n_recurrent_layers": 4,
        "n_output_layers": 4,
        "sliding_window": 6,
    },
    "Dots3NoteForCausalLM": {
        **_LATENTS,
        **_MIXTURE,
        **_INDEXER,
        **{f"swa_{key}": value for key, value in _LATENTS.items()},
        "swa_num_attention_heads": 4,
        "swa_head_dim": 24,
        "n_routed_experts": 8,
        "shared_experts_intermediate_size": 32,
        "sliding_window": 6,
    },
    "Gemma4AssistantForCausalLM": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "ProphetNetForCausalLM": {"num_hidden_layers": None},
    "XLNetLMHeadModel": {"max_position_embeddings": None, "d_head": 16},
    "FlintForCausalLM": {**_MIXTURE, "num_experts": 8, "sliding_window": 6},
    "Gemma3ForConditionalGeneration": {
        "text_config": {**_COMMON, "sliding_window": 6},
        "vision_config": _EYES,
        "mm_tokens_per_image": 4,
    },
    "Gemma4UnifiedForCausalLM": {"sliding_window": 6},
    "HrmTextForCausalLM": {"num_hidden_layers": 12, "num_layers_per_stack": 2, "L_cycles": 2},
    "Kolibri1ForCausalLM": {**_MIXTURE, "num_local_experts": 8, "sliding_window": 6},
    "LongcatFlashForCausalLM": {
        **_LATENTS,
        "num_layers": 2,
        "num_hidden_layers": None,
        "ffn_hidden_size": 96,
        "n_routed_experts": 8,
        "moe_topk": 2,
        "zero_expert_num": 4,
        "expert_ffn_hidden_size": 32,
    },
    "MiniMaxM3VLForCausalLM": {
        **_MIXTURE,
        "num_local_experts": 4,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "MllamaForCausalLM": {"cross_attention_layers": []},
    "MoshiForCausalLM": {"ffn_dim": 96, "sliding_window": 6},
    **dict.fromkeys(
        (
            *("BertGenerationDecoder", "CamembertForCausalLM", "Data2VecTextForCausalLM"),
            *("ElectraForCausalLM", "ErnieForCausalLM", "RobertaPreLayerNormForCausalLM"),
            *("XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM", "MegatronBertForCausalLM"),
            *("RemBertForCausalLM", "RoFormerForCausalLM", "BigBirdForCausalLM"),
        ),
        _DECODER,
    ),
    **dict.fromkeys(
        (
            *("BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM"),
            *("BlenderbotSmallForCausalLM", "MBartForCausalLM", "MarianForCausalLM"),
            *("MvpForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM"),
        ),
        OF_A_PAIR,
    ),
    "WhisperForCausalLM": {
        **OF_A_PAIR,
        "max_target_positions": LENGTH,
        "max_position_embeddings": None,
        "num_mel_bins": 8,
        "max_source_positions": 16,
    },
    **dict.fromkeys(
        ("InklingForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM"), _INKLING
    ),
    "ZambaForCausalLM": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "head_dim": None,
        "layers_block_type": [*["linear_attention"] * 2, "hybrid", "linear_attention", "hybrid"],
    },
    "ZayaForCausalLM": {"num_hidden_layers": 3},
    "Qwen4ExpForCausalLM": {
        **_MIXTURE,
        "num_experts": 8,
        "hc_lowrank": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "XmodForCausalLM": {**_DECODER, "languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "RoCBertForCausalLM": {
        **_DECODER,
        "pronunciation_vocab_size": 32,
        "shape_vocab_size": 32,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "ReformerModelWithLMHead": {**_DECODER, "axial_pos_embds_dim": [32, 32]},
}
"""What the config of a name has besides the common keys; None takes one away."""


_MOST = 4_000_000
_FACTORS = ("sqk", "s_gate")
"""Parameters that the code divides by the range from which they are drawn at first."""


class TooLarge(Exception):
    """The model of a config is not tiny."""


def checkpoint(name: str, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Write the checkpoint in float32. Returns what transformers makes of ids with it."""
    config = config_of(name)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if size > _MOST:
        raise TooLarge(f"its config has no small form here: {size} parameters")
    torch.manual_seed(5)
    model = getattr(transformers, name)(config).eval().float()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(_FACTORS):
                value.mul_(1 + torch.randn_like(value) * 0.1)
            else:
                value.copy_(torch.randn_like(value) * 0.15 + _centre(config, key))
    model.save_pretrained(folder)
    return asker(name, folder)


Change = Callable[[torch.Tensor], torch.Tensor]


def asker(
    name: str, folder: Path, change_of: Callable[[str], Change | None] = lambda _: None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' answer to ids; `change_of`: of the inputs of the module of a name."""
    model = (
        getattr(transformers, name)
        .from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        .eval()
    )

    for at, module in model.named_modules():
        if (change := change_of(at)) is not None:
            module.register_forward_pre_hook(lambda _, given, change=change: change(given[0]))

    @torch.no_grad()
    def ask(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits
        return logits[0].float()

    return ask


def config_of(name: str) -> Any:
    kind = getattr(transformers, name).config_class
    keys = {**_COMMON, **FOREIGN.get(name, {}), **OWN.get(name, {})}
    return kind(**{key: value for key, value in keys.items() if value is not None})


def _centre(config: Any, name: str) -> float:
    is_norm = ("norm" in name.lower() or "ln_" in name) and name.endswith("weight")
    return 1.0 if is_norm and config.model_type not in BY_ONE_MORE else 0.0
