"""Strict reading of config.json: published files are understood, nothing is passed over."""

import json

import pytest
from transformers import AutoConfig

from quire.errors import (
    LoadError,
    UnknownConfigKey,
    UnsupportedArchitecture,
    UnsupportedConfigValue,
)
from quire.models import memories_of, plan_kv_pool, read_spec
from quire.models.config_reader import read_config
from quire.models.costs import active_parameters, num_parameters
from quire.models.families import architectures, read_with_foreign
from quire.models.kv_pool import token_bytes
from quire.models.layer_memory import NumberBytes
from quire.models.max_length import length_facts
from quire.models.positions import LinearScaling, LongRopeScaling, YarnScaling
from quire.models.reading.unbuilt import WHY_NOT
from quire.models.show import describe
from tests.models.hostile.published import HARMLESS, PUBLISHED_DENSE
from tests.models.hostile.published_gemma import HARMLESS_IN_GEMMA, PUBLISHED_GEMMA
from tests.models.hostile.published_latent import HARMLESS_WITH_LATENTS, PUBLISHED_LATENT
from tests.models.hostile.published_mixtures import HARMLESS_IN_MIXTURES, PUBLISHED_MIXTURES
from tests.models.hostile.published_more import HARMLESS_IN_MORE, PUBLISHED_MORE
from tests.models.hostile.published_poolers import HARMLESS_IN_POOLERS, PUBLISHED_POOLERS
from tests.models.hostile.published_state import HARMLESS_WITH_STATES, PUBLISHED_STATE

NOISE = {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def published(architecture, layers, width, heads, kv_heads, ffn, vocab, context, **keys):
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **NOISE,
        **keys,
    }


LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

# The keys of published files, old style, and the parameter counts that their authors give.
PUBLISHED = {
    "Llama-3.1-8B": (
        published(
            "LlamaForCausalLM",
            *(32, 4096, 32, 8, 14336, 128256, 131072),
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA31,
            attention_bias=False,
            mlp_bias=False,
            pretraining_tp=1,
            hidden_act="silu",
            tie_word_embeddings=False,
        ),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        published(
            "MistralForCausalLM",
            *(32, 4096, 32, 8, 14336, 32000, 32768),
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            sliding_window=4096,
            tie_word_embeddings=False,
        ),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        published(
            "Qwen2ForCausalLM",
            *(24, 896, 14, 2, 4864, 151936, 32768),
            max_window_layers=24,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            sliding_window=32768,
            use_sliding_window=False,
            use_mrope=False,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen3-30B-A3B": (
        published(
            "Qwen3MoeForCausalLM",
            *(48, 2048, 32, 4, 6144, 151936, 40960),
            head_dim=128,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_experts=128,
            num_experts_per_tok=8,
            max_window_layers=48,
            rope_scaling=None,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.001,
            use_sliding_window=False,
            sliding_window=None,
        ),
        30_532_122_624,
    ),
    "Mixtral-8x7B": (
        published(
            "MixtralForCausalLM",
            *(32, 4096, 32, 8, 14336, 32000, 32768),
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_theta=1000000.0,
            sliding_window=None,
            output_router_logits=False,
        ),
        46_702_792_704,
    ),
    "gemma-2-2b": (
        published(
            "Gemma2ForCausalLM",
            *(26, 2304, 8, 4, 9216, 256000, 8192),
            head_dim=256,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            sliding_window=4096,
            cache_implementation="hybrid",
            attention_bias=False,
        ),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        published(
            "Gemma3ForCausalLM",
            *(26, 1152, 4, 1, 6912, 262144, 32768),
            model_type="gemma3_text",
            head_dim=256,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
        ),
        999_885_952,
    ),
    "Phi-3.5-mini": (
        published(
            "Phi3ForCausalLM",
            *(32, 3072, 32, 32, 8192, 32064, 131072),
            auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_scaling={"type": "longrope", **FACTORS},
            rope_theta=10000.0,
            sliding_window=262144,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attention_bias=False,
        ),
        3_821_079_552,
    ),
    "gpt2": (
        {
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    **PUBLISHED_DENSE,
    **PUBLISHED_MIXTURES,
    **PUBLISHED_LATENT,
    **PUBLISHED_STATE,
    **PUBLISHED_GEMMA,
    **PUBLISHED_MORE,
    **PUBLISHED_POOLERS,
}
GPT_OSS = published(
    "GptOssForCausalLM",
    *(24, 2880, 64, 8, 2880, 201088, 131072),
    head_dim=64,
    attention_bias=True,
    experts_per_token=4,
    num_experts_per_tok=4,
    num_local_experts=32,
    initial_context_length=4096,
    layer_types=["sliding_attention", "full_attention"] * 12,
    sliding_window=128,
    swiglu_limit=7.0,
    rope_theta=150000,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
)


def llama(**changes):
    config = published("LlamaForCausalLM", 2, 64, 4, 2, 80, 96, 64, rms_norm_eps=1e-5)
    return {**config, **changes}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_parameters(name):
    config, count = PUBLISHED[name]
    spec = read_spec(config)
    assert num_parameters(spec) == count
    assert f"{count:,}" in describe(spec)


def test_active_parameters_of_a_mixture():
    spec = read_spec(PUBLISHED["Mixtral-8x7B"][0])
    assert active_parameters(spec) == 12_879_925_248 - 32000 * 4096  # published, less the embedding


BF16 = NumberBytes(2, 2)


def test_kv_bytes_and_groups_of_known_models():
    def groups_of(name):
        memories = memories_of([read_spec(PUBLISHED[name][0])])
        return plan_kv_pool(memories, 32, BF16).groups

    llama = memories_of([read_spec(PUBLISHED["Llama-3.1-8B"][0])])
    assert token_bytes(llama, BF16) == 131_072
    youtu = memories_of([read_spec(PUBLISHED["Youtu-LLM-2B"][0])])
    assert token_bytes(youtu, BF16) == 32 * (512 + 64) * 2
    sharing = memories_of([read_spec(PUBLISHED["gemma-3n-E4B"][0])])
    assert len(sharing) == 20 and token_bytes(sharing, BF16) == 20 * 2 * 2 * 256 * 2
    groups = groups_of("gemma-3-1b")
    assert [len(g.layers) for g in groups] == [4, 4, 4, 4, 4, 4, 2]
    assert [g.window for g in groups] == [None] + [512] * 6
    assert sorted(layer for g in groups for layer in g.layers) == list(range(26))
    assert [len(g.layers) for g in groups_of("gemma-2-2b")] == [13, 13]


def test_a_window_as_long_as_the_context_is_none():
    spec = read_spec(PUBLISHED["Phi-3.5-mini"][0])
    assert spec.blocks[0].mixer.window is None


def test_gpt_oss_is_read_as_published_and_other_quantisation_refused_by_name():
    assert isinstance(read_spec(GPT_OSS).blocks[0].mixer.rope.scaling, YarnScaling)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    published = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    assert read_spec({**GPT_OSS, "quantization_config": published}) == read_spec(GPT_OSS)
    with pytest.raises(UnsupportedConfigValue, match="quantization_config.quant_method='aqlm'"):
        read_spec({**GPT_OSS, "quantization_config": {"quant_method": "aqlm"}})


def test_old_and_new_rope_keys_mean_the_same():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = read_spec(llama(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0}))
    new = read_spec(llama(rope_parameters={"rope_theta": 5000.0, **scaling}))
    assert old == new
    assert old.blocks[0].mixer.rope.scaling == LinearScaling(2.0)


def test_rope_per_layer_type_goes_to_its_layers():
    config, _ = PUBLISHED["gemma-3-1b"]
    spec = read_spec({**config, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    local, full = spec.blocks[0].mixer, spec.blocks[5].mixer
    assert (local.window, local.rope.theta, local.rope.scaling) == (512, 1e4, None)
    assert (full.window, full.rope.theta, full.rope.scaling) == (None, 1e6, LinearScaling(8.0))
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_local_base_freq")}
    assert read_spec({**new, "rope_parameters": nested}) == spec


def test_longrope_attention_follows_the_extension():
    scaling = read_spec(PUBLISHED["Phi-3.5-mini"][0]).blocks[0].mixer.rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.attention_factor == pytest.approx(1.1902380714238083)


REFUSED = {
    "key of the reference": (llama(sliding_window=8), UnknownConfigKey, "sliding_window=8"),
    "unknown key where nothing is known": (
        {**PUBLISHED["glm-4-9b-chat"][0], "frobnicate": False},
        UnknownConfigKey,
        "frobnicate=false",
    ),
    "unknown key of code of its own": (
        llama(frobnicate=0, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}),
        UnknownConfigKey,
        "frobnicate=0",
    ),
    "unknown rope type": (
        llama(rope_scaling={"type": "spiral", "factor": 2.0}),
        UnsupportedConfigValue,
        "rope_type='spiral'",
    ),
    "activation": (llama(hidden_act="wish"), UnsupportedConfigValue, "hidden_act='wish'"),
    "missing size": (llama(hidden_size=None), LoadError, "lacks hidden_size"),
    "string for number": (llama(hidden_size="64"), UnsupportedConfigValue, "hidden_size='64'"),
    "negative": (llama(num_hidden_layers=-1), UnsupportedConfigValue, "num_hidden_layers=-1"),
    "kv heads": (llama(num_key_value_heads=3), UnsupportedConfigValue, "num_key_value_heads=3"),
    "flag": (llama(tie_word_embeddings="yes"), UnsupportedConfigValue, "tie_word_embeddings"),
    "nan": (llama(rms_norm_eps=float("nan")), UnsupportedConfigValue, "rms_norm_eps=nan"),
    "quantised": (
        llama(quantization_config={"quant_method": "aqlm", "bits": 4}),
        UnsupportedConfigValue,
        "quantization_config.quant_method='aqlm'",
    ),
    "encoder": (llama(is_encoder_decoder=True), UnsupportedConfigValue, "is_encoder_decoder=True"),
    "bidirectional": (
        {**PUBLISHED["gemma-2-2b"][0], "use_bidirectional_attention": True},
        UnsupportedConfigValue,
        "use_bidirectional_attention=True",
    ),
    "two epsilons": (
        {**PUBLISHED["gte-modernbert-base"][0], "layer_norm_eps": 1e-3},
        UnsupportedConfigValue,
        "layer_norm_eps=0.001",
    ),
    "an encoder that is causal": (
        {**PUBLISHED["bge-m3"][0], "is_causal": True},
        UnsupportedConfigValue,
        "is_causal=True",
    ),
    "ignored elsewhere": (
        {**PUBLISHED["gemma-3-1b"][0], "attn_logit_softcapping": 50.0},
        UnsupportedConfigValue,
        "attn_logit_softcapping=50.0",
    ),
    "short factors": (
        {
            **PUBLISHED["Phi-3.5-mini"][0],
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 48},
        },
        UnsupportedConfigValue,
        "short_factor",
    ),
    "layer types": (
        {**GPT_OSS, "layer_types": ["full_attention"]},
        LoadError,
        "one type per layer",
    ),
    "two names of one size": (
        {**PUBLISHED["gpt-j-6b"][0], "hidden_size": 64},
        UnsupportedConfigValue,
        "hidden_size=64 .*n_embd=4096, its other name",
    ),
    "no architecture": (llama(architectures=None), UnsupportedArchitecture, "hf_overrides"),
    "unknown architecture": (
        llama(architectures=["RwkvForCausalLM"]),
        UnsupportedArchitecture,
        r"RwkvForCausalLM is not supported.* All that are known are in docs/models.md",
    ),
    "architecture with a reason": (
        llama(architectures=["LongcatFlashForCausalLM"]),
        UnsupportedArchitecture,
        "LongcatFlashForCausalLM is not supported: its layers have two attentions",
    ),
    "almost a known architecture": (
        llama(architectures=["Qwen3MoEForCausalLM"]),
        UnsupportedArchitecture,
        "the nearest names are Qwen3MoeForCausalLM, ",
    ),
    "own code": (
        llama(architectures=["MyModel"], auto_map={"AutoModel": "modeling.MyModel"}),
        UnsupportedArchitecture,
        "never executed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case):
    config, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        read_spec(config)


def test_an_unknown_key_can_be_removed_by_an_override():
    read_spec(llama(frobnicate=None))


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_key_of_a_family_may_change_unnoticed(name):
    """Each key is read (and refused at a wrong type), foreign, or listed as without meaning."""
    config, _ = PUBLISHED[name]
    ignored = {*NOISE, "architectures", "auto_map", "model_type", "rope_scaling"}
    accepted = []
    for key in config.keys() - ignored:
        try:
            _, foreign = read_with_foreign({**config, key: {"not": "this"}})
        except LoadError:
            continue
        if not foreign:
            accepted.append(key)
    harmless = {
        *("pretraining_tp", "router_aux_loss_coef", "output_router_logits", "embd_pdrop"),
        *("resid_pdrop", "attn_pdrop", "summary_type", "task_specific_params"),
        *("cache_implementation", "max_window_layers", *HARMLESS, *HARMLESS_IN_MIXTURES),
        *(*HARMLESS_WITH_LATENTS, *HARMLESS_WITH_STATES, *HARMLESS_IN_GEMMA),
        *HARMLESS_IN_MORE,
    }
    if name in PUBLISHED_POOLERS:
        harmless |= HARMLESS_IN_POOLERS
    assert set(accepted) <= harmless


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "nul", "\x00"])
def test_a_broken_config_file_is_one_clear_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match="config.json"):
        read_config(tmp_path)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(LoadError, match="has no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(LoadError, match="cannot be read"):
        read_config(tmp_path)


def test_heads_of_full_layers_are_named_once_or_layer_by_layer():
    config, _ = PUBLISHED["gemma-4-26B-A4B"]
    own = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    named = ("global_head_dim", "num_global_key_value_heads")
    listed = {key: value for key, value in config.items() if key not in named}
    assert read_spec({**listed, "per_layer_config": own}) == read_spec(config)


def test_layers_of_gemma_4_look_up_the_padding_at_pictures():
    config, _ = PUBLISHED["gemma-4-26B-A4B"]
    own = {"hidden_size_per_layer_input": 8}
    assert read_spec({**config, **own}).layer_inputs.media_id == 0
    assert read_spec({**config, **own, "pad_token_id": 5}).layer_inputs.media_id == 5


def test_ropes_of_gemma_4_without_keys():
    config, _ = PUBLISHED["gemma-4-26B-A4B"]
    assert read_spec({**config, "rope_parameters": None}) == read_spec(config)


def test_the_part_of_text_is_read_with_what_stands_next_to_it(tmp_path):
    text = {"model_type": "gemma4_text", "hidden_size": 64, "eos_token_id": 1}
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 32},
        "image_token_id": 7,
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = read_config(tmp_path)
    assert found.items() >= (text | {"eos_token_id": [1, 106]}).items()
    assert found["architectures"] == ["Gemma4ForCausalLM"]
    assert found["vocab_size"] == 262144, "the default of transformers' class"
    assert not {"vision_config", "image_token_id"} & found.keys()


def test_an_mscale_of_zero_says_nothing():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    plain = read_spec(llama(rope_scaling=yarn))
    assert read_spec(llama(rope_scaling={**yarn, "mscale": 2.0, "mscale_all_dim": 0.0})) == plain
    assert read_spec(llama(rope_scaling={**yarn, "mscale": 2.0, "mscale_all_dim": 1.0})) != plain


def test_the_attention_factor_of_yarn_is_multiplied_as_in_vllm():
    """R1-0528-Qwen3-8B takes the usual factor of its scaling back."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = llama(rope_scaling={**yarn, "attn_factor": 0.8782488562869419})
    scaling = read_spec(config).blocks[0].mixer.rope.scaling
    assert scaling.attention_factor == pytest.approx(1.0)


def test_numbers_that_json_cannot_write(tmp_path):
    limit = [0.0, {"__float__": "Infinity"}]
    config, _ = PUBLISHED["Mamba-Codestral-7B"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "time_step_limit": limit}))
    found = read_config(tmp_path)
    assert found["time_step_limit"] == [0.0, float("inf")]
    assert read_spec(found) == read_spec(config)


def test_rotations_under_both_names_must_agree():
    new, old = {"rope_theta": 5e3, "rope_type": "default"}, {"type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedConfigValue, match=r"rope_parameters.rope_theta=5000"):
        read_spec(llama(rope_parameters=new, rope_scaling=old))
    both = llama(rope_parameters=old, rope_scaling=old)
    assert read_spec(both) == read_spec(llama(rope_scaling=old))


def test_reading_does_not_change_the_config():
    config = json.loads(json.dumps(GPT_OSS))
    read_spec(config)
    assert config == json.loads(json.dumps(GPT_OSS))


LENGTHS = {
    "plain": ({"max_position_embeddings": 100}, 100, 100),
    "smallest key": ({"max_position_embeddings": 100, "seq_length": 60}, 60, 60),
    "stated": ({"max_position_embeddings": 100, "model_max_length": 300}, 300, 300),
    "linear": (
        {"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2.5}},
        250,
        250,
    ),
    "dynamic": (
        {
            "max_position_embeddings": 100,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
        },
        400,
        400,
    ),
    "llama3": ({"max_position_embeddings": 100, "rope_scaling": LLAMA31}, 100, 100),
    "yarn": (
        {"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        100,
        100,
    ),
    "longrope": (PUBLISHED["Phi-3.5-mini"][0], 131072, 4096),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "max_position_embeddings": 100,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        100,
        100,
    ),
    "gpt2": (PUBLISHED["gpt2"][0], 1024, 1024),
    "nothing": ({}, None, None),
    "no number": ({"max_position_embeddings": 1e30}, None, None),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_length_follows_the_keys(case):
    config, limit, default = LENGTHS[case]
    facts = length_facts(config)
    assert (facts.limit, facts.default) == (limit, default)


def test_published_keys_of_mimo_v2_mean_those_of_transformers():
    config, _ = PUBLISHED["MiMo-V2-Flash"]
    made = AutoConfig.for_model(
        "mimo_v2_flash", max_position_embeddings=262144, sliding_window_size=128
    )
    theirs = made.to_dict() | {"architectures": config["architectures"]}
    assert read_spec(config) == read_spec(theirs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hybrid_layer_pattern", [2] * 48),
        ("moe_layer_freq", [1] * 47),
        ("swa_head_dim", 128),
        ("swa_num_attention_heads", 32),
        ("sliding_window", 4096),
        ("hybrid_block_size", 4),
    ],
)
def test_published_keys_of_mimo_v2_are_refused_at_other_values(key, value):
    config, _ = PUBLISHED["MiMo-V2-Flash"]
    with pytest.raises(UnsupportedConfigValue, match=key):
        read_spec({**config, key: value})


@pytest.mark.parametrize("name", WHY_NOT)
def test_what_is_asked_for_and_not_there_is_refused_with_its_reason(name):
    with pytest.raises(UnsupportedArchitecture) as caught:
        read_spec({"architectures": [name], "model_type": "of_another"})
    assert f"The architecture {name} is not supported: {WHY_NOT[name]}" in str(caught.value)
    assert name not in architectures()
