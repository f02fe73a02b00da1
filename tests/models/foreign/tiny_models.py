"""Tiny random checkpoints of architectures that no family describes."""

import json

import torch
import transformers
from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LENGTH = 96
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_PAIR = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OF_A_PAIR = {
    **dict.fromkeys((*_PAIR, "num_key_value_heads", "head_dim")),
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "is_encoder_decoder": False,
    "is_decoder": True,
}
"""Of decoders that were made for an encoder."""
FOREIGN = {
    "NanoChatForCausalLM": {},
    "BartForCausalLM": OF_A_PAIR,
    "DiffLlamaForCausalLM": {},
    "AfmoeForCausalLM": {
        **_EXPERTS,
        "sliding_window": 6,
        "num_dense_layers": 1,
        "global_attn_every_n_layers": 2,
    },
    "BeamForCausalLM": {"sliding_window": 6},
    "CTRLLMHeadModel": {"n_positions": LENGTH, "n_embd": 64, "dff": 96, "n_layer": 3, "n_head": 4},
    "DeepseekV3ForCausalLM": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
    },
    "RobertaForCausalLM": {"is_decoder": True, "max_position_embeddings": LENGTH + 1},
    "BertLMHeadModel": {"is_decoder": True},
    "DogeForCausalLM": {},
    "RoFormerForCausalLM": {"is_decoder": True},
    "GraniteMoeSWAForCausalLM": {"sliding_window": 6, "num_local_experts": 4},
    "JetMoeForCausalLM": {"kv_channels": 16, "num_local_experts": 4},
    "LagunaForCausalLM": _EXPERTS,
    "LaraMiniForCausalLM": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "sliding_window": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "MellumForCausalLM": {**_EXPERTS, "sliding_window": 6},
    "ModernBertDecoderForCausalLM": {"local_attention": 12},
    "Ministral3ForCausalLM": {},
    "ZayaForCausalLM": {
        **_EXPERTS,
        "num_experts_per_tok": 1,
        "router_hidden_size": 32,
        "sliding_window": 6,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    },
}
"""Architecture -> what its config has besides the common keys; None takes one away."""


def config_of(architecture, **keys):
    kind = getattr(transformers, architecture).config_class
    named = {**_COMMON, **FOREIGN.get(architecture, {}), **keys}
    return kind(**{key: value for key, value in named.items() if value is not None})


def write(architecture, folder, **keys):
    """Write a checkpoint in float32. Norms and biases are random as well."""
    torch.manual_seed(5)
    model = getattr(transformers, architecture)(config_of(architecture, **keys))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def changed(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def oracle(folder):
    """What transformers alone makes of ids."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()

    @torch.no_grad()
    def ask(ids):
        return model(ids[None], use_cache=False).logits[0].float()

    return ask
