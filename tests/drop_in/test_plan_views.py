"""`vllm_config.model_config` and the other views show the plan, and nothing else: sizes are those
that transformers reads from the same config.json.
"""

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoConfig

from quire import EngineArgs, embedded
from quire.config.args.option import options_of
from quire.config.plan import PARTS
from quire.config.views import PlanViews
from quire.config.views.engine import (
    CacheView,
    DeviceView,
    LoadView,
    ObservabilityView,
    ParallelView,
    SchedulerView,
)
from quire.config.views.model import ModelView
from quire.config.views.view import Fact

VIEWS = [
    *(CacheView, DeviceView, LoadView, ModelView, ObservabilityView, ParallelView, SchedulerView),
]
CONFIGS = {
    "grouped heads": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "a window and other names": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "sliding_window": 40,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
    },
    "experts": {
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_experts": 6,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 128,
    },
}  # fmt: skip


def plan_of(folder, config, **args):
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(str(folder), load_format="dummy", skip_tokenizer_init=True, **args)
    return args.create_engine_config()


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_transformers(tmp_path, name):
    model = plan_of(tmp_path, CONFIGS[name]).model_config
    theirs = AutoConfig.from_pretrained(tmp_path)
    heads, width = theirs.num_attention_heads, theirs.hidden_size
    assert model.get_vocab_size() == theirs.vocab_size
    assert model.get_hidden_size() == model.get_inputs_embeds_size() == width
    assert model.get_num_layers(None) == theirs.num_hidden_layers
    assert model.get_num_attention_heads(None) == heads
    assert model.get_total_num_kv_heads() == theirs.num_key_value_heads
    assert model.get_head_size() == (getattr(theirs, "head_dim", None) or width // heads)
    assert model.get_sliding_window() == getattr(theirs, "sliding_window", None)
    assert model.get_num_experts() == getattr(theirs, "num_experts", 0)
    assert model.is_moe == hasattr(theirs, "num_experts")
    assert model.architectures == model.hf_config.architectures == theirs.architectures


def test_latents_have_one_head(tmp_path):
    config = {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "q_lora_rank": None,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 2,
        "first_k_dense_replace": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "num_experts_per_tok": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    model = plan_of(tmp_path, config).model_config
    assert model.use_mla
    assert (model.get_num_kv_heads(), model.get_head_size()) == (1, 32 + 8)


def test_views_follow_the_arguments():
    plan = EngineArgs(
        dtype="float16", max_num_seqs=7, block_size=64, num_gpu_blocks_override=90, seed=4,
        data_parallel_size=3, enable_prefix_caching=False, scheduling_policy="priority",
    ).create_engine_config()  # fmt: skip
    assert plan.model_config.dtype is torch.float16
    assert plan.model_config.seed == 4
    assert plan.cache_config.block_size == 64
    assert plan.cache_config.num_gpu_blocks == 90
    assert plan.cache_config.enable_prefix_caching is False
    assert plan.scheduler_config.max_num_seqs == 7
    assert plan.scheduler_config.policy == "priority"
    assert plan.parallel_config.world_size == 1
    assert plan.parallel_config.world_size_across_dp == 3
    assert plan.parallel_config.data_parallel_size_local == 3
    assert plan.parallel_config.local_world_size == plan.parallel_config.nnodes_within_dp == 1
    assert plan.parallel_config.data_parallel_index == plan.parallel_config.rank == 0
    assert not plan.parallel_config.local_engines_only and not plan.parallel_config.use_all2all
    assert not plan.parallel_config.use_ubatching and plan.parallel_config.num_ubatches == 0
    assert plan.device_config.device == torch.device(plan.parallel.device)
    assert plan.lora_config is None and plan.speculative_config is None
    assert plan.structured_outputs_config.backend == "guidance" and plan.profiler_config is None


def test_adapters_and_drafts():
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    args = EngineArgs(enable_lora=True, max_loras=2, speculative_config=drafts)
    plan = args.create_engine_config()
    assert (plan.lora_config.max_loras, plan.lora_config.max_lora_rank) == (2, 16)
    found = plan.speculative_config
    assert (found.method, found.num_speculative_tokens, found.model) == ("ngram", 3, None)
    assert args.create_speculative_config(plan.model_config, plan.parallel_config) == found


def test_config_json_reads_as_an_object():
    plan = EngineArgs().create_engine_config()
    given = json.loads((embedded.path() / "config.json").read_text())
    found = plan.model_config.hf_config
    assert found.to_dict() == plan.model.hf_config
    assert found.hidden_size == given["hidden_size"]
    assert found.get("no_such_key", 3) == 3 and "no_such_key" not in found
    assert found.get_text_config() == found == plan.model_config.hf_text_config
    found.architectures.append("Evil")
    assert found.architectures == given["architectures"], "what it gives is a copy"
    with pytest.raises(AttributeError, match="config.json has no 'no_such_key'"):
        _ = found.no_such_key


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_a_view_reads_fields_that_there_are(view):
    facts = [fact for fact in vars(view).values() if isinstance(fact, Fact)]
    parts = dict(PARTS)
    assert facts or view.parts
    assert all(f.field in parts[f.part or view.parts[0]].__struct_fields__ for f in facts)
    assert view.name in vars(PlanViews)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_a_view_has_the_options_of_its_parts(view):
    plan = EngineArgs(seed=11, max_num_seqs=9, max_logprobs=4).create_engine_config()
    made, own = view(plan), vars(view)
    for part in view.parts:
        for name in options_of(EngineArgs).keys() - own.keys():
            if hasattr(getattr(plan, part), name):
                assert getattr(made, name) == getattr(getattr(plan, part), name)
                assert f"{name}=" in repr(made)


def test_views_can_only_be_read():
    plan = EngineArgs().create_engine_config()
    with pytest.raises(AttributeError, match=r"model_config\.seed cannot be set.*EngineArgs"):
        plan.model_config.seed = 3
    with pytest.raises(AttributeError, match=r"cache_config has no 'swap_space'.*explain"):
        _ = plan.cache_config.swap_space
    assert not hasattr(plan.model_config, "no_such_name")
    with pytest.raises(AttributeError, match=r"vllm_config has no 'cutlass_config'.*explain"):
        _ = plan.cutlass_config
    for copied in (copy.deepcopy(plan.cache_config), pickle.loads(pickle.dumps(plan.cache_config))):
        assert copied == plan.cache_config
    other = plan.changed(block_size=16)
    assert other.cache_config != plan.cache_config
    assert "block_size=16" in repr(other.cache_config)
