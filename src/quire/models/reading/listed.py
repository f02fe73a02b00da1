"""Keys of config.json that no family reads, and why that is right: by hand, for all families."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_IRRELEVANT_BY_REASON = {
    "identity and provenance; auto_map names code of the repository, which is never executed": (
        "architectures model_type auto_map _name_or_path name_or_path _commit_hash "
        "transformers_version unsloth_fixed unsloth_version finetuning_task task_specific_params "
        "tokenizer_class language name"
    ),
    "how the weights are stored: the engine decides on its own dtype": "torch_dtype dtype",
    "how the weights are quantised, which models/formats reads": (
        "quantization_config compression_config quantization quantization_file"
    ),
    "the plugin that processes data for the model, which config/resolve reads": (
        "io_processor_plugin"
    ),
    "training only": (
        "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
        "residual_dropout embedding_dropout gradient_checkpointing router_aux_loss_coef "
        "router_jitter_noise output_router_logits moe_loss_weight moe_jitter_eps "
        "dropout activation_dropout classifier_dropout "
        "emb_pdrop embed_dropout layerdrop init_std init_device embedding_initializer_range "
        "aux_loss_alpha seq_aux ep_size init_method block_mlp_init_scale block_out_init_scale "
        "block_use_xavier_init conv_use_xavier_init"
    ),
    "outputs and kernels of another library": (
        "use_cache cache_implementation output_attentions output_hidden_states output_past "
        "return_dict tf_legacy_loss torchscript attn_implementation _attn_implementation "
        "_attn_implementation_autoset "
        "experts_implementation use_flash_attention_2 chunk_size_feed_forward pretraining_tp "
        "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 "
        "bias_dropout_fusion masked_softmax_fusion slow_but_exact fused_add_norm "
        "calc_logits_for_entire_prompt"
    ),
    "how states of Mamba are initialised, or computed by another library": (
        "time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor "
        "rescale_prenorm_residual use_mambapy use_associative_scan use_falcon_mambapy "
        "use_mamba_kernels use_mem_eff_path chunk_size mamba_chunk_size residual_in_fp32 "
        "mamba_ssm_cache_dtype num_logits_to_keep"
    ),
    "token ids and labels: text and sampling, not the decoder": (
        "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id "
        "forced_bos_token_id forced_eos_token_id unk_token_id eod_token_id prefix id2label "
        "label2id num_labels _num_labels problem_type"
    ),
    "heads for classification that a causal model does not have": (
        "summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout"
    ),
    "lengths, which models/max_length.py reads": (
        "max_position_embeddings n_positions n_ctx max_seq_len seq_length max_target_positions "
        "max_sequence_length max_seq_length seq_len model_max_length"
    ),
    "generation defaults of old files: quire reads generation_config.json": (
        "max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty "
        "length_penalty num_beams num_beam_groups diversity_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size num_return_sequences bad_words_ids begin_suppress_tokens "
        "suppress_tokens early_stopping output_scores return_dict_in_generate "
        "exponential_decay_length_penalty remove_invalid_values use_bfloat16"
    ),
}
IRRELEVANT = frozenset(key for keys in _IRRELEVANT_BY_REASON.values() for key in keys.split())
"""Keys that say nothing about the computation, whatever their value."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "is_encoder_decoder": (False,),
        "is_decoder": (False, True),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (),
        "tie_encoder_decoder": (False,),
        "pruned_heads": ({},),
        "use_bidirectional_attention": (False,),
        "per_layer_config": ({},),
    }
)
"""Keys at which no family implements another value than these, which change nothing."""
