"""Layers of a checkpoint that predict further tokens guess what the same layer of transformers
guesses, behind a projection of the embedding and the hidden state.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import LoadError, NotBuiltYet
from quire.testing import make_checkpoint
from tests.models.hostile.models import HOSTILE, random_model, rename
from tests.runner.drafting.watched_core import K, assert_same, open_with, run_requests, serve
from tests.runner.late_engines import Life, open_core

VOCAB = 96


@dataclass(frozen=True)
class Names:
    """What files call the parts: the norms of embedding and state, the projection, the last norm,
    and where the layer is.
    """

    embed: str
    state: str
    fc: str
    last: str | None
    layer: str
    states_first: bool = False
    skips_first: bool = True


AT = "model.layers.3."
DEEPSEEK = Names(AT + "enorm", AT + "hnorm", AT + "eh_proj", AT + "shared_head.norm", AT)
QWEN = Names(
    "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0.",
    skips_first=False,
)  # fmt: skip
MTP = "model.mtp_layers.0."
MIMO = Names(
    MTP + "token_layernorm", MTP + "hidden_layernorm", MTP + "input_proj",
    MTP + "final_layernorm", MTP, states_first=True,
)  # fmt: skip
ERNIE = Names(
    "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None,
    "model.mtp_block.0.",
)  # fmt: skip
NAMES = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "mimo": MIMO,
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "ernie4_5_moe": ERNIE,
}


def random_norm(norm):
    norm = copy.deepcopy(norm)
    torch.nn.init.normal_(norm.weight, 0.6, 0.3)
    return norm


class Oracle:
    """A model of transformers whose last layer predicts further tokens."""

    def __init__(self, name):
        self.names, hostile = NAMES[name], HOSTILE[name]
        keys = dict(hostile.keys)
        if "layer_types" in keys:
            keys["layer_types"] = [*keys["layer_types"], "full_attention"]
        if name == "ernie4_5_moe":
            keys["moe_layer_end_index"] = 2
        self.hostile = replace(hostile, keys=keys | {"num_hidden_layers": 4})
        self.whole = random_model(self.hostile)
        self.target = copy.deepcopy(self.whole)
        self.target.model.layers = self.target.model.layers[:3]
        self.layer = copy.deepcopy(self.whole)
        self.layer.model.layers = self.layer.model.layers[3:]
        for model, count in ((self.target, 3), (self.layer, 1)):
            model.config.num_hidden_layers = model.model.config.num_hidden_layers = count
        norm = self.target.model.norm
        self.embed_norm, self.state_norm, self.last = (random_norm(norm) for _ in range(3))
        if self.names.last is None:
            self.last = torch.nn.Identity()
        self.layer.model.norm = self.last
        dim = self.target.config.hidden_size
        self.fc = torch.randn(dim, 2 * dim) / (2 * dim) ** 0.5

    def write(self, folder):
        """The checkpoint as it is published."""
        self.whole.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.startswith(AT)]:
            tensors[self.names.layer + name.removeprefix(AT)] = tensors.pop(name)
        names = self.names
        tensors[names.fc + ".weight"] = self.fc
        norms = {names.embed: self.embed_norm, names.state: self.state_norm, names.last: self.last}
        tensors |= {f"{at}.weight": n.weight.detach() for at, n in norms.items() if at is not None}
        if names is DEEPSEEK:  # copies of what the model has
            tensors[AT + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[AT + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["num_hidden_layers"] = 3
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:3]
        if "mlp_layer_types" in config:
            config["mlp_layer_types"] = config["mlp_layer_types"][:3]
        count = "mtp_num_hidden_layers" if "mtp." in names.fc else "num_nextn_predict_layers"
        path.write_text(json.dumps(config | {count: 1}))
        if self.hostile.architecture is not None:
            rename(folder, self.hostile.architecture)
        return folder

    @torch.inference_mode()
    def drafts(self, ids, count):
        ids = torch.tensor(ids)
        own = self.target.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
        e = self.target.model.embed_tokens(ids[1:])
        if self.names.skips_first:
            e[0] = 0
        found = []
        for _ in range(count):
            pair = [self.embed_norm(e), self.state_norm(own)]
            x = torch.cat(pair[::-1] if self.names.states_first else pair, 1) @ self.fc.T
            y = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            found.append(int(self.target.lm_head(y[-1]).argmax()))
            e = torch.cat([e, self.target.model.embed_tokens(torch.tensor(found[-1:]))])
            own = torch.cat([own, y[-1:]])
        return found


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_those_of_the_same_layer(name, tmp_path):
    torch.manual_seed(1)
    oracle = Oracle(name)
    folder = oracle.write(tmp_path / "model")
    wishes = {"max_num_batched_tokens": 10, "enforce_eager": False, "enable_prefix_caching": False}
    core, watched = open_with(folder, None, "mtp", **wishes, num_gpu_blocks_override=80)
    run_requests(core, VOCAB, together=True)
    checked = [(known, drafts) for known, drafts in watched.guesses if drafts]
    assert len(checked) > 20 and {len(drafts) for _, drafts in checked} >= {K}
    found = [(d, oracle.drafts(known, len(d))) for known, d in checked]
    assert [ours for ours, _ in found] == [theirs for _, theirs in found]
    assert len({tuple(ours) for ours, _ in found}) > 10, "guesses that depend on nothing"


def test_answers_are_those_without_drafts(tmp_path):
    torch.manual_seed(1)
    folder = Oracle("deepseek_v3").write(tmp_path / "model")
    life = Life(2)
    for request in life.requests:
        request.prompt_token_ids[:] = [token % VOCAB for token in request.prompt_token_ids]
        request.params.allowed_token_ids = request.params.logit_bias = None
    plain, _ = open_core(folder)
    right = serve(plain, life, disturbed=False)
    core, watched = open_with(folder, None, "mtp")
    assert_same(serve(core, life, disturbed=True), right, life)
    assert watched.num_drafts > 20


def test_a_model_without_such_layers_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, {"num_hidden_layers": 2}, "qwen3_5", dtype="float32")
    with pytest.raises(LoadError, match="one layer that predicts further tokens"):
        open_with(folder, None, "mtp")
    several = {"num_hidden_layers": 2, "mtp_num_hidden_layers": 2}
    folder = make_checkpoint(tmp_path, several, "qwen3_5", dtype="float32")
    with pytest.raises(LoadError, match="mtp_num_hidden_layers=2.*one layer that predicts"):
        open_with(folder, None, "mtp")
    folder = make_checkpoint(tmp_path, {"num_hidden_layers": 2}, "llama", dtype="float32")
    with pytest.raises(NotBuiltYet, match="mtp with LlamaForCausalLM"):
        open_with(folder, None, "mtp")
