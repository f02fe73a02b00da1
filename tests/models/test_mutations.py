"""Is the comparison with the oracle sensitive? Each fact of each spec is changed, and loading or
the logits must notice; each key of each config.json is changed, and must be refused or change the
spec.

What cannot be noticed is listed below with its reason; the lists are exact, so a fact or a key that
becomes blind fails the test.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from quire.errors import InvalidParameter, LoadError
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.mixers.compressed.spec import Compression
from quire.models.mixers.recurrent.spec import Lightning, Mamba2, ShortConv
from quire.models.parameters import parameters
from quire.models.pooling.spec import PoolerSpec
from quire.models.positions import (
    Alibi,
    BucketBias,
    LinearScaling,
    Rope,
    Temperature,
)
from quire.models.reading.listed import IRRELEVANT
from quire.models.reading.text_part import PART
from quire.models.rules import RuleError
from quire.models.spec import (
    Attention,
    Block,
    BlockAttention,
    Decoder,
    DenseAndExperts,
    Indexer,
    LatentAttention,
    LayerInputs,
    MixerAfterShared,
    Mlp,
    Moe,
    Norm,
    Streams,
    shares,
    single_mixers,
)
from tests.models.hostile.models import cases
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

OTHER = {
    "kind": {
        "rms": "layer",
        "rms_late_cast": "layer",
        "rms1p": "rms",
        "rms_bare": "rms",
        "layer": "rms",
        "layer1p": "layer",
        "none": "layer",
    },
    "act": {
        "silu": "gelu",
        "gelu": "relu",
        "gelu_tanh": "gelu",
        "relu": "silu",
        "relu2": "silu",
        "xielu": "silu",
    },
    "input_act": {"gelu_tanh": "gelu"},
    "score": {
        "softmax": "softmax_topk",
        "softmax_topk": "sigmoid_topk",
        "sigmoid": "softmax",
        "sigmoid_topk": "sigmoid",
        "sparsemixer": "softmax",
        "sqrt_softplus": "softmax",
    },
    "qk_norm_over": {"head": "full", "full": "head", "per_head": "head", "heads_apart": "head"},
    "parallel": {"no": "two_norms", "two_norms": "no", "one_norm": "no"},
    "gate": {"none": "full", "full": "per_head", "per_head": "full"},
}
CHOOSES_ALIKE = ("mixer", "indexer", "rope", "scaling", "factor")
"""Whether other tokens are chosen depends on the last bits of scores."""
FIXED_EPS = ("olmo", "opt", "dbrx", "biogpt")
"""transformers has no key for them: 1e-5, which random numbers do not show."""
_OF_LATENTS = ("mixer", "norm"), ("mixer", "bias")
_CHOICE_NORMS = ("norm", "query_norm")
OF_OWN_KEYS = ("value_norm", "values_are_keys")
"""Facts of keys and values, which other layers may have in a layer's place."""
UNUSED_ROPE = {
    "short": ("short", "attention_factor"),
    "long": ("long", "long_attention_factor"),
}
"""Facts of LongRoPE on the other side of the border."""
WHERE_NONE = {
    "rope": Rope(1e4, 16),
    "scaling": LinearScaling(2.0),
    "window": 3,
    "chunk": 4,
    "temperature": Temperature(0.5, 4.0),
    "q_rank": 16,
    "shared": Mlp(8),
    "softcap": 1.0,
    "qk_norm": Norm(),
    "query_norm": Norm(),
    "clamp": 0.5,
    "clip": 0.3,
    "bound": 0.3,
    "value_dim": 20,
    "alibi": Alibi(),
    "embed_norm": Norm(),
    "logit_softcap": 1.0,
    "mixer": ShortConv(64, 3),
    "mlp": Mlp(80),
    "norm_eps": 0.05,
    "context": 64,
    "shares": 0,
    "input_act": "silu",
    "layer_inputs": LayerInputs(8, 96, Norm()),
    "streams": Streams(2, 0, 4),
    "pooler": PoolerSpec(("embed",)),
    "final_norm": Norm(),
    "repeats": 0,
    "embed_width": 24,
    "distances": BucketBias(8, 20),
    "max_distance": 40,
    "indexer": Indexer(2, 16, 3, Norm("layer", bias=True)),
    "rank": 6,
    "latent": 24,
    "eps": 0.05,
    "compression": Compression(2, overlaps=False),
}


def mutants(value: Any):
    """(path of field names, changed copy) for every fact in a dataclass."""
    for field in fields(value):
        old = getattr(value, field.name)
        if field.name == "stage":
            continue  # which layers a worker has, whatever the model is
        if field.name in ("ignores_spans", "media_id"):
            continue  # of prompts with pictures alone
        if field.name == "blocks":
            yield from block_mutants(old, value)
        elif field.name == "leaf_scales":
            for i, (end, scale) in enumerate(old):
                scales = (*old[:i], (end, 1.3 * scale), *old[i + 1 :])
                yield (field.name, end), replace(value, leaf_scales=scales)
        elif field.name == "mixers":
            for i, mixer in enumerate(old):
                for path, new in mutants(mixer):
                    mixers = (*old[:i], new, *old[i + 1 :])
                    yield (field.name, *path), replace(value, mixers=mixers)
        elif is_dataclass(old):
            for path, new in mutants(old):
                yield (field.name, *path), replace(value, **{field.name: new})
        else:
            for new in changed(field.name, old):
                yield (field.name,), replace(value, **{field.name: new})


def block_mutants(blocks: tuple[Block, ...], decoder: Decoder):
    """Mutants of the last block of each kind."""
    for at in {block: i for i, block in enumerate(blocks)}.values():
        for path, new in mutants(blocks[at]):
            if blocks[at].repeats is not None and path != ("repeats",):
                continue  # it changes with the layer that it repeats
            after = (replace(new, repeats=at) if b.repeats == at else b for b in blocks[at + 1 :])
            changed_blocks = (*blocks[:at], new, *after)
            if path[:2] == ("mixer", "shared") and path[2] != "number":
                changed_blocks = tuple(with_shared(b, new) for b in changed_blocks)
            if path[:2] == ("mixer", "distances") and new.mixer.distances is not None:
                changed_blocks = tuple(with_distances(b, blocks[at], new) for b in blocks)
            yield ("blocks", *path), replace(decoder, blocks=changed_blocks)


def with_distances(block: Block, old: Block, new: Block) -> Block:
    """The block with the scores by distances of `new`, if it has those of `old`."""
    mixer, before, after = block.mixer, old.mixer, new.mixer
    assert isinstance(before, Attention) and isinstance(after, Attention)
    if not isinstance(mixer, Attention) or mixer.distances != before.distances:
        return block
    return replace(block, mixer=replace(mixer, distances=after.distances))


def with_shared(block: Block, new: Block) -> Block:
    """The block with the shared transformer of `new`, if it has that of the same number."""
    mixer, changed_mixer = block.mixer, new.mixer
    assert isinstance(changed_mixer, MixerAfterShared)
    shared = changed_mixer.shared
    if not isinstance(mixer, MixerAfterShared) or mixer.shared.number != shared.number:
        return block
    return replace(block, mixer=replace(mixer, shared=shared))


def changed(name: str, old: Any):
    if old is None:
        return [WHERE_NONE[name]]
    if name == "repeats":
        return [None]
    if isinstance(old, bool):
        return [not old]
    if isinstance(old, tuple):
        return [tuple(v * 1.3 for v in old)]
    if isinstance(old, float):
        return [0.6 if old == math.inf else old * 1.3 or 5.0]
    if isinstance(old, int):
        if name in ("original", "chunk", "max_distance"):
            return [old * 2]
        return [old - 1 if name in ("top_k", "window") else old + 2]
    return [OTHER[name][old]]


def is_explained(path: tuple[str, ...], spec: Decoder, name: str, block: Block) -> bool:
    """Whether a change cannot show in float32 logits of prompts within the served length."""
    last, mixers = path[-1], [m for block in spec.blocks for m in single_mixers(block.mixer)]
    if path == ("context",):
        return True  # a limit, no part of any formula
    if last == "axes":
        return True  # which positions of text share
    if path[0] == "leaf_scales":
        return not any(leaf.endswith(last) for leaf in parameters(spec))
    if last == "parallel" and block.mixer is None:
        return True
    latent = block.mixer if isinstance(block.mixer, LatentAttention) else None
    if latent is not None and latent.shares is not None and path[1:3] in _OF_LATENTS:
        return True  # of the products and norms of the other layer's latents
    if path[-3:] == ("mixer", "norm", "eps") and name == "mistral_large4":
        return False  # that of the whole model
    if path[-3:] in (("mixer", "norm", "eps"), *(("indexer", n, "eps") for n in _CHOICE_NORMS)):
        # of latents, and of queries and keys of the choice, always 1e-6
        return not isinstance(block.mixer, BlockAttention)
    if "indexer" in path[:-1] and last != "is_shared":
        mixer = block.mixer
        shared = isinstance(mixer, LatentAttention) and mixer.indexer is not None
        return shared and mixer.indexer.is_shared  # another layer's choice
    if last == "number":
        return num_uses(spec, block) == 1  # a name
    own = [m for m in single_mixers(block.mixer) if isinstance(m, Attention)]
    if last == "qk_norm_over":
        return all(mixer.qk_norm is None for mixer in own)
    if last == "qk_norm_after_rope":
        return all(mixer.qk_norm is None or commutes(mixer) for mixer in own)
    if last in ("norm_groups", "gate_first"):
        return all(mixer.norm_eps is None for mixer in mixers if isinstance(mixer, Mamba2))
    if last in ("pre", "post", "mixer_pre") and block.norms_sum:
        return True
    if last == "mlp_post":
        return block.has_post or block.mlp is None
    if isinstance(block.mixer, Lightning) and last in ("norm_eps", "slope"):
        # always 1e-6; the last layer's states forget next to nothing
        return last == "norm_eps" or block.mixer.slope < 1e-3
    if last == "mixer_pre":
        return block.mixer is None or not block.pre
    if last == "out_bias" and "mlp" in path:
        return has_out_bias(block)
    if last == "position_offset":
        return spec.learned_positions == 0
    if last == "eps" and name in FIXED_EPS:
        return True
    if "scaling" in path and name == "llama-dynamic":
        return last in ("factor", "original")  # act beyond the original length: test_rotary
    if "scaling" in path and name.startswith("phi"):
        # the other side of the border; the border itself, while it is not crossed
        unused = UNUSED_ROPE["short" if name == "phi3-long" else "long"]
        return last == "original" or last in unused
    if last in OF_OWN_KEYS and all(map(shares, single_mixers(block.mixer))):
        return True
    return block.experts is not None and is_explained_of_mixture(last, block.experts)


def has_out_bias(block: Block) -> bool:
    """Whether the layer's feed-forward part has a bias after all products anyway."""
    if isinstance(block.mixer, MixerAfterShared):
        return block.mixer.shared.mlp.bias
    mlp = block.mlp.dense if isinstance(block.mlp, DenseAndExperts) else block.mlp
    own = mlp.shared if isinstance(mlp, Moe) else mlp
    return isinstance(own, Mlp) and own.bias


def num_uses(spec: Decoder, block: Block) -> int:
    """How many layers use the shared transformer of this one."""
    mixers = [b.mixer for b in spec.blocks if isinstance(b.mixer, MixerAfterShared)]
    assert isinstance(block.mixer, MixerAfterShared)
    return sum(mixer.shared.number == block.mixer.shared.number for mixer in mixers)


def commutes(a: Attention) -> bool:
    """Whether a rotation changes nothing in a norm, which comes before or after it."""
    if a.qk_norm_over == "full":
        return False  # which is refused
    return a.rope is None or (a.qk_norm is not None and a.qk_norm.kind == "rms_bare")


def is_explained_of_mixture(last: str, mlp: Moe) -> bool:
    """The same for a fact of a mixture."""
    is_chosen_first = mlp.score in ("softmax_topk", "sigmoid_topk", "sparsemixer")
    if last == "renorm":
        return is_chosen_first  # their weights are what they are
    if last == "score" and mlp.score == "sigmoid_topk":
        return True  # the largest sigmoids are those of the largest logits
    if last == "score":
        # a softmax over the chosen logits is the renormalised choice of a softmax over all
        plain = mlp.groups == 1 and not mlp.select_bias
        return mlp.score == "softmax" and mlp.renorm and plain
    if last == "renorm_min":
        return is_chosen_first or not mlp.renorm
    if last == "jitter":
        return mlp.score != "sparsemixer"
    if last == "shared_gate":
        return mlp.shared is None
    if last == "wide_router":
        return not mlp.router_bias  # all logits are in float32
    return last == "renorm_eps"  # far below what float32 shows


def notices(made: Any, mutant: Decoder) -> bool:
    try:
        model = load(made.folder, mutant, max_model_len=made.max_model_len)
        got = run_full(model, made.prompts[:1])
    except (LoadError, InvalidParameter, RuleError, AssertionError, RuntimeError, KeyError):
        return True
    return relative_error(got, made.logits[:1]) > TOLERANCE


PLAIN = (
    *("bailing_hybrid", "cohere", "dbrx", "ernie4_5_moe", "falcon_h1-gate", "gemma3", "gpt2"),
    *("granite_moe", "internlm2", "kimi_linear", "llama4", "minimax", "ministral3", "olmo"),
    *("phimoe", "qwen2_moe", "qwen3", "step3p5"),
)
"""Models whose facts others of the default run have, too."""
LONG = ("deepseek_v4", "mistral_large4")
"""Models whose mutants take 20 s; the default run compares their logits (test_families.py)."""


@pytest.mark.parametrize("name", cases())
@pytest.mark.sharp(when=lambda name: name not in PLAIN + LONG)
def test_every_fact_of_a_spec_is_noticed(checkpoints, name):
    made = checkpoints[name]
    spec = read_spec(read_config(made.folder))
    blind = []
    for path, mutant in mutants(spec):
        changed_block = next(
            (b for b, m in zip(spec.blocks, mutant.blocks, strict=False) if b != m), spec.blocks[0]
        )
        if path[-5:] == CHOOSES_ALIKE:
            continue
        if notices(made, mutant) == is_explained(path, spec, name, changed_block):
            blind.append(".".join(path))
    assert not blind


EXPERTS_OF_NEMOTRON = (
    "n_routed_experts n_shared_experts moe_intermediate_size num_experts_per_tok n_group "
    "topk_group moe_shared_expert_intermediate_size norm_topk_prob routed_scaling_factor"
)
UNUSED_BY_NEMOTRON = (
    "expand time_step_limit mtp_layers_block_type num_nextn_predict_layers "
    "moe_shared_expert_overlap"
)
BLIND_KEYS: dict[str, set[str]] = {
    "mamba": {"expand"},  # intermediate_size is there, too
    "falcon_mamba": {"expand"},
    "mamba2": {"time_step_rank"},
    "falcon_h1": {"mamba_expand"},  # mamba_d_ssm is there, too
    "falcon_h1-gate": {"mamba_expand"},
    "granite_hybrid": {"intermediate_size", "num_experts_per_tok"},  # of experts
    "zamba2-several": {"rope_parameters.rope_theta"},
    "granite_hybrid-experts": {"rope_parameters.rope_theta"},  # nothing rotates
    "nemotron_h": {
        *EXPERTS_OF_NEMOTRON.split(),
        *UNUSED_BY_NEMOTRON.split(),
    },
    "nemotron_h-experts": {*UNUSED_BY_NEMOTRON.split(), "intermediate_size"},
    "qwen3_moe-renorm": {"intermediate_size"},  # of layers without experts, which it lacks
    "hunyuan-alpha": {"rope_parameters.factor"},  # without meaning next to alpha
    "qwen3_moe": {"use_sliding_window"},  # whose width is null
    "hunyuan_moe": {"rope_parameters.factor"},
    # layer types say which layers these keys are about
    "qwen2_moe": {"max_window_layers"},
    "dots1": {"max_window_layers"},
    "mimo": {"max_window_layers", "use_sliding_window", "num_nextn_predict_layers"},
    "exaone_moe": {"first_k_dense_replace", "sliding_window_pattern"},
    "llama4": {"interleave_moe_layer_step", "no_rope_layer_interval"},
    # of layers that predict further tokens, of training, and of one rounding that is done anyway
    **dict.fromkeys(
        ("glm4_moe", "deepseek_v3", "deepseek_v3-one_group"), {"num_nextn_predict_layers"}
    ),
    "phimoe": {"input_jitter_noise"},
    "hy_v3": {"enable_moe_fp32_combine"},
    **dict.fromkeys(("qwen2", "qwen3"), {"max_window_layers"}),  # layer types are listed
    "gemma3": {"_sliding_window_pattern"},
    **dict.fromkeys(("exaone4", "exaone4-whole"), {"sliding_window_pattern"}),
    "smollm3": {"no_rope_layer_interval"},
    **dict.fromkeys(("gpt_neox", "gpt_neox-sequential"), {"is_decoder"}),
    "falcon": {"num_kv_heads"},  # one for all queries
    **dict.fromkeys(("falcon-new", "falcon-one-norm"), {"multi_query"}),  # heads are counted
    "falcon-alibi": {"rope_parameters.rope_type", "rope_parameters.rope_theta"},
    "mpt": {"learned_pos_emb", "attn_config.attn_impl"},  # only without linear biases; kernels
    # of layers that share keys and values, and of inputs of layers
    **dict.fromkeys(("gemma3n", "gemma3n-plain"), {"altup_coef_clip"}),  # of training
    **dict.fromkeys(("gemma4", "gemma4_unified"), {"global_head_dim"}),  # each layer has its own
    "gemma4-dense": {"use_double_wide_mlp", "vocab_size_per_layer_input"},
    # each layer has its own
    **dict.fromkeys(("granite_swa", "granite_moe_swa"), {"rope_parameters.rope_theta"}),
    "gpt_neo": {"attention_layers", "resid_dropout"},  # written out of another; training
    "biogpt": {"layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob"},
    "bamba": {"z_loss_coefficient"},  # training
    "afmoe": {"global_attn_every_n_layers"},  # layer types are listed
    # parts say their own sizes, and layer types are listed
    "glm_moe_dsa": {"first_k_dense_replace", "head_dim"},
    "mistral_large4": {
        *("first_k_dense_replace", "index_topk_freq", "index_skip_topk_offset"),
        *("no_rope_layer_interval", "head_dim"),  # there are lists for the layers
        "rope_theta",  # the rotation has its own
    },
    "kimi_linear": {"head_dim"},
    "deepseek_v32": {"head_dim"},
    "deepseek_v4": {
        *("num_nextn_predict_layers", "partial_rotary_factor", "qk_rope_head_dim"),
        *("rope_theta", "compress_rope_theta"),  # each rotation has its own
    },
    "bailing_hybrid-unbounded": {
        *("num_nextn_predict_layers", "mtp_loss_scaling_factor", "kda_lower_bound"),
        *("head_dim", "rope_theta", "layer_group_size"),
    },
    "olmo_hybrid-nope": {"linear_a_log_min", "rope_parameters.rope_type"},
    "bailing_hybrid": {
        *("num_nextn_predict_layers", "mtp_loss_scaling_factor"),
        *("head_dim", "rope_theta", "layer_group_size"),
    },
    "olmo_hybrid": {"linear_a_log_min"},  # training
    "minimax": {"block_size"},  # of sums in which a state is computed
    "recurrent_gemma": {"final_w_init_variance_scale", "w_init_variance_scale"},
    "nemotron_h-narrow": {*UNUSED_BY_NEMOTRON.split(), "intermediate_size"},
    "gpt_neox_japanese": {"is_decoder"},
    "cohere2_moe": {"rope_theta", "sliding_window_pattern"},
    "cohere2_moe-rms": {
        *("rope_theta", "sliding_window_pattern"),
        *("prefix_dense_sliding_window_pattern", "layer_norm_eps"),
    },
}
"""Keys that are read and cannot show in the model at hand."""


def other_values(value: Any) -> list[Any]:
    """What a key might have had in its place."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 1.3]
    if isinstance(value, str):
        return ["gelu", value + "_"]
    if isinstance(value, list):
        return [value[::-1] + value[:1], value[1:] + value[:1], [*value, 0]]
    return []


def changed_configs(config: dict[str, Any]):
    """(key, changed copies) for every key that a family reads; sections are entered."""
    for key, value in config.items():
        if value is None or key in IRRELEVANT or key == PART:
            continue
        if isinstance(value, dict):
            for inner, copies in changed_configs(value):
                yield f"{key}.{inner}", [{**config, key: copy} for copy in copies]
        else:
            yield key, [{**config, key: other} for other in other_values(value)]


def shows(config: dict[str, Any], spec: Decoder) -> bool:
    """Whether a config is refused, or has another spec."""
    try:
        return read_spec(config) != spec
    except LoadError:
        return True


@pytest.mark.parametrize("name", cases())
def test_every_key_of_a_config_is_noticed(checkpoints, name):
    config = read_config(checkpoints[name].folder)
    spec = read_spec(config)
    blind = {
        key
        for key, copies in changed_configs(config)
        if not any(shows(copy, spec) for copy in copies)
    }
    assert blind == BLIND_KEYS.get(name, set())
