"""The layers of a checkpoint that predict further tokens (MTP, DeepSeek-V3 section 2.2), as a draft
network: the model's own kind of layer after a projection of embedding and hidden state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import NotBuiltYet
from quire.models.config_reader import unsupported
from quire.models.drafting.network import DraftNetwork
from quire.models.drafting.spec import DraftDecoder, DraftInputs
from quire.models.rules import Family, Rule, rule
from quire.models.spec import Attention, Block, Decoder, LatentAttention

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True)
class _Form:
    """A family's names of the parts, after `at`; the layer's own parts are at `layer`. `{n}` is the
    number of the target's layers. `is_first_kind`: the layer is of the kind of the target's first
    layer, not of its last one with attention.
    """

    at: str
    layer: str
    embed_norm: str
    state_norm: str
    fc: str
    final_norm: str | None
    states_first: bool = False
    skips_first: bool = True
    is_first_kind: bool = False

    def at_of(self, layers: int) -> str:
        """`at` in a model of so many layers."""
        return self.at.format(n=layers)


_DEEPSEEK = _Form("layers.{n}.", "layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = _Form(
    "mtp.",
    "mtp.layers.0.",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "fc",
    "norm",
    skips_first=False,
)
_MIMO = _Form(
    "mtp_layers.0.",
    "mtp_layers.0.",
    "token_layernorm",
    "hidden_layernorm",
    "input_proj",
    "final_layernorm",
    states_first=True,
)
_ERNIE = _Form(
    "mtp_",
    "mtp_block.0.",
    "emb_norm.0",
    "hidden_norm.0",
    "linear_proj.0",
    None,
    is_first_kind=True,
)
_FORMS: Mapping[str, _Form] = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": _MIMO,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
"""Architecture -> how its further layers are stored."""


def read_mtp(config: Mapping[str, Any], target: Decoder, family: Family) -> DraftNetwork:
    """The network that a checkpoint of `target` has for further tokens.

    Raises NotBuiltYet for families whose layers are not known here, UnsupportedConfigValue where
    there are none, or several, which predict different tokens.
    """
    name = next((name for name in family.architectures if name in _FORMS), None)
    if name is None:
        known = ", ".join(sorted(_FORMS))
        what = f"mtp with {', '.join(family.architectures)}"
        raise NotBuiltYet("speculative_config['method']", what, f"Known are {known}.")
    key, count = next(((k, config[k]) for k in _COUNTS if config.get(k)), (_COUNTS[0], None))
    if count != 1:
        raise unsupported(key, count, "one layer that predicts further tokens")
    form = _FORMS[name]
    block = target.blocks[0] if form.is_first_kind else _layer_of(target)
    norm = block.norm
    inputs = DraftInputs(
        target.dim,
        target.vocab,
        embed_norm=norm,
        state_norm=norm,
        states_first=form.states_first,
        skips_first=form.skips_first,
        feeds_normed=True,
    )
    spec = DraftDecoder(
        target.vocab, target.dim, (block,), None if form.final_norm is None else norm,
        target.context, inputs=inputs, leaf_scales=target.leaf_scales,
    )  # fmt: skip
    return DraftNetwork(spec, _family(form, family, target))


def _layer_of(target: Decoder) -> Block:
    """The kind of layer that follows the target's: its last one with attention."""
    for block in reversed(target.blocks):
        if isinstance(block.mixer, Attention | LatentAttention):
            return block
    raise AssertionError("a family whose models have attention")


def _family(form: _Form, family: Family, target: Decoder) -> Family:
    """The family's names for the further layer, whatever else the checkpoint has."""
    layers = len(target.blocks)
    at = form.at_of(layers)
    # these tensors stand next to the model's module, not within it
    prefix = "" if at.startswith("mtp.") else "{prefix}"
    parts = {
        form.embed_norm: "draft.embed_norm",
        form.state_norm: "draft.state_norm",
        form.fc: "draft.fc",
    }
    if form.final_norm is not None:
        parts[form.final_norm] = "norm"
    own = [
        rule(f"{prefix}{at}{stored}.{{leaf}}", f"{ours}.{{leaf}}") for stored, ours in parts.items()
    ]
    of_layer = prefix + form.layer.format(n=layers)
    rules = [_moved(each, of_layer) for each in family.rules_for(target)]
    # the layer's own head and embedding are copies of the target's
    others = rf"(?!{re.escape(at)}).*|{re.escape(at)}(shared_head\.head|embed_tokens)\.weight"
    return replace(family, rules=(*own, *rules), ignored=(others,), drafts_after_layers=False)


def _moved(each: Rule, at: str) -> Rule:
    """The rule for a layer whose names begin with `at`."""
    return replace(each, source=each.source.replace("{prefix}layers.{layer}.", at))
