"""Zamba2: Mamba-2 in every layer; before some of them one of a few transformers, which these layers
share, reads the residual stream next to the embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families.llama import (
    EMBEDDING_RULES,
    attention,
    context_of,
    layer_rules,
    mlp,
    read_kinds,
    rms,
    stack,
)
from quire.models.families.mamba import MAMBA2_NAMES, divisor_of, mixer_rules
from quire.models.mixers.recurrent.spec import Mamba2
from quire.models.rope_config import read_rope
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, Block, Decoder, MixerAfterShared, Norm, SharedTransformer

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}
"""Layer types as old and new files call them."""
_RECURRENT_RULES = (
    *mixer_rules("mamba", MAMBA2_NAMES),
    *layer_rules({"input_layernorm": "attn_pre"}),
)


def _describe(c: ConfigReader) -> Decoder:
    norm, mamba = rms(c, 1e-5), _mamba(c)
    shared, plain = _shared_transformer(c, norm), Block(mamba, None, norm)
    blocks, uses, count = [], 0, c.integer("num_mem_blocks", 1)
    for kind in _layer_types(c):
        if kind == "hybrid":
            use = MixerAfterShared(replace(shared, number=uses % count), mamba)
            blocks.append(replace(plain, mixer=use))
            uses += 1
        else:
            blocks.append(plain)
    return stack(c, blocks, tie=c.flag("tie_word_embeddings", True))


def _mamba(c: ConfigReader) -> Mamba2:
    width = int(c.number("mamba_expand", 2) * c.integer("hidden_size"))
    heads = divisor_of("n_mamba_heads", c.integer("n_mamba_heads", 8), width)
    groups = divisor_of("mamba_ngroups", c.integer("mamba_ngroups", 1), heads)
    c.only("mamba_headdim", width // heads)
    c.only("use_conv_bias", True)
    c.raw("time_step_limit", None)  # steps have a least value alone, whatever files say
    bias = c.flag("add_bias_linear", False)
    return Mamba2(
        heads=heads,
        head_dim=width // heads,
        state=c.integer("mamba_d_state", 64),
        groups=groups,
        kernel=c.integer("mamba_d_conv", 4, minimum=2),
        bias=bias,
        out_bias=bias,
        norm_groups=groups,
        least_step=c.number("time_step_min", 0.001),
    )


def _shared_transformer(c: ConfigReader, norm: Norm) -> SharedTransformer:
    width = c.integer("intermediate_size", 4 * c.integer("hidden_size"))
    c.only("ffn_hidden_size", width)
    rank = c.integer("adapter_rank", 128)
    return SharedTransformer(
        number=0,
        attention=_attention(c),
        mlp=mlp(c, width=width, act="gelu", bias=c.flag("add_bias_linear", False)),
        norm=norm,
        rank=rank,
        attention_rank=rank if c.flag("use_shared_attention_adapter", False) else 0,
    )


def _attention(c: ConfigReader) -> Attention:
    """Heads share out twice the hidden width, and scores are scaled as if it were once."""
    width, heads = 2 * c.integer("hidden_size"), c.integer("num_attention_heads")
    dim = width // divisor_of("num_attention_heads", heads, width)
    if dim % 2:
        raise unsupported("num_attention_heads", heads, "one that makes an even size of heads")
    for key, value in (
        ("attention_hidden_size", width),
        ("attention_head_dim", dim),
        ("kv_channels", width // 2 // heads),
        ("num_query_groups", heads),
    ):
        c.only(key, value)
    c.only("use_long_context", False)
    # read in any case: files without rotation keep its keys
    rope = read_rope(c, dim, context=context_of(c))
    attn = attention(
        c,
        head_dim=dim,
        scale=(dim / 2) ** -0.5,
        rope=rope if c.flag("use_mem_rope", False) else None,
    )
    if c.flag("use_shared_attention_adapter", False) and attn.kv_heads != heads:
        raise unsupported("num_key_value_heads", attn.kv_heads, f"{heads}, with adapters")
    return attn


def _layer_types(c: ConfigReader) -> list[str]:
    kinds = [_KINDS[kind] for kind in read_kinds(c, "layers_block_type", _KINDS)]
    c.only("hybrid_layer_ids", [i for i, kind in enumerate(kinds) if kind == "hybrid"])
    return kinds


def _rules(d: Decoder) -> tuple[Rule, ...]:
    """A transformer is stored with the first layer that uses it, with the adapters of all uses."""
    rules: list[Rule] = []
    homes: dict[int, str] = {}
    uses = 0
    for i, block in enumerate(d.blocks):
        if not isinstance(block.mixer, MixerAfterShared):
            continue
        at, number = f"{{prefix}}layers.{i}.", block.mixer.shared.number
        if number not in homes:
            homes[number] = at + "shared_transformer."
            rules += _shared_rules(homes[number], f"shared.{number}.")
        rules += _adapter_rules(homes[number], f"layers.{i}.shared.", uses)
        rules.append(rule(at + "linear.weight", f"layers.{i}.shared.out.weight"))
        rules += (_in_layer(r, i) for r in _RECURRENT_RULES)
        uses += 1
    final = rule("{prefix}final_layernorm.weight", "norm.weight")
    return (*rules, *_RECURRENT_RULES, final, *EMBEDDING_RULES)


def _shared_rules(stored: str, ours: str) -> list[Rule]:
    names = {
        "input_layernorm": ("attn_pre",),
        **{f"self_attn.{part}_proj": (f"attn.{part}",) for part in "qkvo"},
        "pre_ff_layernorm": ("mlp_pre",),
        "feed_forward.gate_up_proj": ("mlp.gate", "mlp.up"),
        "feed_forward.down_proj": ("mlp.down",),
    }
    return [
        rule(
            f"{stored}{name}.{{leaf}}",
            *(f"{ours}{part}.{{leaf}}" for part in parts),
            steps=("split",) if len(parts) > 1 else (),
        )
        for name, parts in names.items()
    ]


def _adapter_rules(stored: str, ours: str, use: int) -> list[Rule]:
    names = {part: f"self_attn.linear_{part}_adapter_list" for part in "qkv"}
    names["mlp"] = "feed_forward.gate_up_proj_adapter_list"
    return [
        rule(f"{stored}{name}.{use}.{i}.weight", f"{ours}{part}_{side}.weight")
        for part, name in names.items()
        for i, side in enumerate("ab")
    ]


def _in_layer(r: Rule, layer: int) -> Rule:
    """The rule of a Mamba-2 that a layer with a shared transformer has."""
    targets = tuple(target.replace("{layer}", str(layer)) for target in r.targets)
    return replace(
        r, source=r.source.replace("{layer}.", f"{layer}.mamba_decoder."), targets=targets
    )


FAMILY = Family(("Zamba2ForCausalLM",), _describe, _rules)
