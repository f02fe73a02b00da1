"""Mamba, and Falcon's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import LAYER, layer_rules, num_layers_of, top_rules
from quire.models.mixers.recurrent.spec import Mamba
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Block, Decoder, Mixer, Norm

CONV_NAMES = {"conv1d": "conv", "out_proj": "out"}
MAMBA_NAMES = {"in_proj": "in", "x_proj": "select", "dt_proj": "step", **CONV_NAMES}
MAMBA2_NAMES = {
    "in_proj": "z mixer.x mixer.b mixer.c mixer.step",
    "norm": "norm",
    **CONV_NAMES,
}
"""Names of the parts of a mixer in checkpoints, and ours."""


def mixer_rules(at: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules of mixers that lie in a layer under `at`."""
    parts = {f"{at}.{stored}": f"mixer.{ours}" for stored, ours in names.items()}
    leaves = {"A_log": "decay_log", "D": "skip", "dt_bias": "step_bias"}
    return layer_rules(parts) + tuple(
        rule(f"{LAYER}{at}.{stored}", f"layers.{{layer}}.mixer.{ours}")
        for stored, ours in leaves.items()
    )


RULES = (*top_rules("embeddings", "norm_f"), *layer_rules({"norm": "attn_pre"}))


def mamba_decoder(c: ConfigReader, mixer: Mixer, *, tie: bool) -> Decoder:
    """A decoder with one mixer in every layer, and nothing else; `tie` is the family's default."""
    norm = Norm("rms", c.number("layer_norm_epsilon", 1e-5))
    return Decoder(
        vocab=c.integer("vocab_size"),
        dim=c.integer("hidden_size"),
        blocks=(Block(mixer, None, norm),) * num_layers_of(c),
        final_norm=norm,
        # a state has one size at every length, so nothing ends with a number of positions
        context=None,
        tie=c.flag("tie_word_embeddings", tie),
    )


def mamba(c: ConfigReader) -> Mamba:
    """The mixer of every layer."""
    c.rename(hidden_size="d_model", intermediate_size="d_inner", num_hidden_layers="n_layer")
    c.only("hidden_act", "silu")
    c.only("rms_norm", True)
    c.only("ssm_cfg", {})
    c.raw("pad_vocab_size_multiple", None)  # vocab_size counts the padding
    dim = c.integer("hidden_size")
    return Mamba(
        width=c.integer("intermediate_size", int(c.number("expand", 2.0) * dim)),
        state=c.integer("state_size", 16),
        kernel=c.integer("conv_kernel", 4, minimum=2),
        rank=rank_of(c, dim),
        conv_bias=c.flag("use_conv_bias", True),
        bias=c.flag("use_bias", False),
    )


def rank_of(c: ConfigReader, dim: int) -> int:
    """Number of values from which the steps of all channels are made."""
    rank = c.raw("time_step_rank", "auto")
    return -(-dim // 16) if rank == "auto" else c.integer("time_step_rank")


def _describe_mamba(c: ConfigReader) -> Decoder:
    """Mamba: a stack of state-space mixers without feed-forward parts."""
    return mamba_decoder(c, mamba(c), tie=True)


MAMBA_RULES = RULES + mixer_rules("mixer", MAMBA_NAMES)
MAMBA = Family(("MambaForCausalLM",), _describe_mamba, MAMBA_RULES, prefix="backbone.")


def _describe_falcon_mamba(c: ConfigReader) -> Decoder:
    """FalconMamba: Mamba with a norm without weights over the step's numbers, b and c."""
    mixer = replace(mamba(c), norm_eps=c.number("mixer_rms_eps", 1e-6))
    return mamba_decoder(c, mixer, tie=True)


FALCON_MAMBA = Family(
    ("FalconMambaForCausalLM",), _describe_falcon_mamba, MAMBA_RULES, prefix="backbone."
)
