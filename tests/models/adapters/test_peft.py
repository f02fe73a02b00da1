"""Adapters that PEFT itself has written: read here, they give the logits that PEFT computes."""

import pytest
import torch

from quire.models import read_spec
from quire.models.config_reader import read_config
from tests.lora.test_merged import distances, run
from tests.models.adapters.test_reading import merge, read, targets_of
from tests.models.hostile.models import HOSTILE, theirs
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

peft = pytest.importorskip("peft", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries about each other

LINEAR = ["q_proj", "o_proj", "up_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "linear": ("llama", {"target_modules": LINEAR}),
    "rank-stabilised": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": LINEAR,
            "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 2, "^model.layers.1.*up_proj": 5},
            "alpha_pattern": {"o_proj": 3, r"model\.layers\.\d+\.self_attn.q_proj": 20},
        },
    ),
    "embedding-and-head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "stored-input-first": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "by-head": ("gpt_neox", {"target_modules": ["query_key_value"]}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one-of-the-experts": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": ["down_proj"]},
    ),
    "experts-of-rank-patterns": (
        "mixtral",
        {
            "target_modules": [],
            "target_parameters": [*EXPERTS, "mlp.gate.weight"],
            "rank_pattern": {r"experts\.down_proj": 2},
        },
    ),
    "experts-stored-input-first": (
        "gpt_oss",
        {"target_modules": ["k_proj"], "target_parameters": EXPERTS},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(checkpoints, monkeypatch, tmp_path, case):
    name, keys = CASES[case]
    made = checkpoints[name]
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 9, "task_type": "CAUSAL_LM", **keys})
    model = peft.get_peft_model(theirs(HOSTILE[name], made.folder), config).eval()
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "lora_" in part:
                weight.copy_(torch.randn_like(weight) * 0.1)
        expected = [model(p[None], use_cache=False).logits[0].float() for p in made.prompts]
    model.save_pretrained(tmp_path)
    adapter = read(tmp_path, targets_of(made.folder))
    changed = merge(monkeypatch, adapter)
    ours = load(made.folder, read_spec(read_config(made.folder)), max_model_len=made.max_model_len)
    assert changed == set(adapter.products)
    found = run_full(ours, made.prompts)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(found, made.logits) > 1e-3, "the adapter changes nothing"


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("keeps_tied", [True, False])
def test_embeddings_that_are_heads(checkpoints, tmp_path, targets, keeps_tied):
    """In an engine: an adapter of one leaves the other as it is, unless both are kept the same."""
    made = checkpoints["gemma3"]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=9,
        task_type="CAUSAL_LM",
        target_modules=targets,
        ensure_weight_tying=keeps_tied,
    )
    model = peft.get_peft_model(theirs(HOSTILE["gemma3"], made.folder), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "lora_" in part:
                weight.copy_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(tmp_path)
    plain, own = run(made.folder, made.prompts[1].tolist(), tmp_path, max_len=48)
    assert distances(own, model).max() < 1e-4
    assert distances(plain, model).max() > 1e-2, "the adapter changes nothing"
