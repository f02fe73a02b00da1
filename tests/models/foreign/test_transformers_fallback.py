"""Models through transformers' code: its tokens, the same bits in every step, and refusals."""

import importlib.util

import pytest
import torch

from quire import LLM
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import (
    InvalidParameter,
    LoadError,
    NotBuiltYet,
    UnsupportedArchitecture,
    WeightMismatch,
)
from quire.hardware.native import find_native
from quire.models.config_reader import read_config
from quire.models.foreign import dry_run
from quire.models.foreign.dry_run import describe_foreign
from quire.models.foreign.implementation import choose_implementation
from quire.models.foreign.load import load_foreign_model
from quire.models.show import describe
from quire.ops import select
from quire.params import SamplingParams
from quire.runner.devices.device import CpuDevice
from tests.models.foreign.tiny_models import FOREIGN, LENGTH, changed, config_of, oracle, write
from tests.support.crowded_engine import engine, greedy_after, prompts, run

NATIVE, REASON = find_native()
ACCURACY = 2e-4  # of log-probabilities
NUM_TOKENS = 40
BY_DEFAULT = (
    *("NanoChatForCausalLM", "AfmoeForCausalLM", "BartForCausalLM", "DiffLlamaForCausalLM"),
    *("RoFormerForCausalLM", "LaraMiniForCausalLM"),
)
"""With experts, positions that the model counts by itself, two calls of attention in a layer, and
over transformers' cache with attention of its own, and with states.
"""


OF_OURS = (
    *("DeepseekV3ForCausalLM", "AfmoeForCausalLM", "GraniteMoeSWAForCausalLM"),
    *("MellumForCausalLM", "Ministral3ForCausalLM"),
)
"""Architectures with a family, as examples of what others have: values narrower than keys, experts,
sinks, windows with a rotation of their own, temperatures."""


def cases():
    return [
        pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.full])
        for name in FOREIGN
    ]


@pytest.fixture(scope="module")
def nanochat(tmp_path_factory):
    return write("NanoChatForCausalLM", tmp_path_factory.mktemp("nanochat"))


def requests():
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    return {i: (ids, params.clone()) for i, ids in enumerate(prompts())}


def crowded(folder, **args):
    """An engine in which eight requests are chunked and preempted."""
    blocks = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 120}
    return engine(folder, max_model_len=LENGTH, **{**blocks, **args})


def config_dict(architecture, **keys):
    config = config_of(architecture, **keys)
    return {**config.to_dict(), "architectures": [architecture], "model_type": config.model_type}


@pytest.mark.parametrize("name", cases())
def test_greedy_tokens_and_chances_equal_those_of_transformers(name, tmp_path):
    impl = "transformers" if name in OF_OURS else "auto"
    core = crowded(write(name, tmp_path), model_impl=impl)
    outputs = run(core, requests(), preempt_every=25)
    assert core.scheduler.counters.num_preemptions > 0
    if not describe_foreign(read_config(tmp_path)).states:  # whose blocks are longer than prompts
        assert core.scheduler.counters.prefix_hits > 0
    ask = oracle(tmp_path)
    for handle, (ids, _) in requests().items():
        tokens = [token for token, _ in outputs[handle]]
        likeliest, chances = greedy_after(ask, ids, tokens)
        assert tokens == likeliest
        found = torch.tensor([chance for _, chance in outputs[handle]])
        assert (found - chances).abs().max() < ACCURACY


@pytest.mark.skipif(NATIVE is None, reason=REASON)
def test_a_request_alone_has_the_same_bits(nanochat):
    together = run(crowded(nanochat), requests(), preempt_every=25)
    core = crowded(nanochat, max_num_batched_tokens=64)
    for handle, request in requests().items():
        assert run(core, {handle: request})[handle] == together[handle]


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_plain_torch_serves_as_well(name, tmp_path):
    """Loading compares the logits; the head and the embedding are one weight."""
    write(name, tmp_path, tie_word_embeddings=True)
    ops = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])
    model = load_foreign_model(
        tmp_path, read_config(tmp_path), ops, dtype=torch.bfloat16, device=CpuDevice()
    )
    assert {choice.provider for choice in ops.report()} == {"torch"}
    places = {tensor.data_ptr() for tensor in model.weight_tensors()}
    buffers = dict(model.named_buffers())
    assert any("rotary" in each for each in buffers) or name.startswith(("Bart", "RoFormer"))
    assert places >= {tensor.data_ptr() for tensor in buffers.values()}
    assert model.logits(torch.ones(2, 64, dtype=torch.bfloat16)).dtype is torch.float32


def test_a_family_of_ours_gives_the_same_through_transformers(tmp_path):
    write("LlamaForCausalLM", tmp_path)
    ours, theirs = (
        run(crowded(tmp_path, model_impl=impl), requests()) for impl in ("vllm", "transformers")
    )
    for handle, tokens in ours.items():
        assert [t for t, _ in tokens] == [t for t, _ in theirs[handle]]
        differences = [abs(a - b) for (_, a), (_, b) in zip(tokens, theirs[handle], strict=True)]
        assert max(differences) < ACCURACY


def test_automatic_choice_says_what_it_costs(nanochat, caplog):
    plan = make_plan(EngineArgs(model=str(nanochat), skip_tokenizer_init=True))
    assert plan.model.model_impl == "transformers" and not plan.parallel.use_graphs
    assert "short steps take longer" in caplog.text
    assert "no family of Quire" in plan.explain()


def test_show_names_the_implementation(nanochat):
    text = describe(describe_foreign(read_config(nanochat)))
    assert text.startswith("implementation    transformers 5.")
    assert "attention of 4 / 2 / 2 heads of 16 over all tokens before" in text
    assert "cost              each step calls the model's Python code" in text
    assert "19 linear layers with Quire's kernels, as they are stored" in text
    assert "KV groups" in text


def test_attention_of_a_models_own_runs_over_transformers_cache(tmp_path):
    """What it keeps of a token: keys and values of four heads of 16, in each of three layers."""
    write("RoFormerForCausalLM", tmp_path)
    spec = describe_foreign(read_config(tmp_path))
    assert spec.calls == ()
    assert {(c.kv_heads, c.head_dim, c.value_dim, c.index_dim) for c in spec.caches} == {
        (4, 16, 16, 0)
    }
    text = describe(spec)
    assert "transformers' own attention, one request at a time, over 4 heads of 16" in text
    model = make_plan(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True)).model_config
    assert (model.get_num_attention_heads(), model.get_head_size()) == (4, 16)


REFUSED = {
    "recurrent state": ("RwkvForCausalLM", {}, "its layers keep a recurrent state"),
    "linear attention": (
        "MiniMaxForCausalLM",
        {"layer_types": ["linear_attention"] * 3},
        "linear_attention keep something else",
    ),
    "chunks": ("Llama4ForCausalLM", {}, "keep something else"),
    "both directions": ("LlamaForCausalLM", {"is_causal": False}, "is not causal"),
    "both directions, by the mask": (
        "BertLMHeadModel",
        {"is_decoder": False},
        "its tokens see those after them",
    ),
    "both directions, and positions": (
        "XLMRobertaForCausalLM",
        {},
        "its tokens see those after them",
    ),
    "both directions, with attention of its own": (
        "MegatronBertForCausalLM",
        {"is_decoder": False},
        "its tokens see those after them",
    ),
    "a cache of its own": ("CpmAntForCausalLM", {}, "more than keys and values of each token"),
    "an encoder": ("LlamaForCausalLM", {"is_encoder_decoder": True}, "it has an encoder"),
    "rope by step": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "depends on the longest sequence",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused(case):
    architecture, keys, why = REFUSED[case]
    with pytest.raises(UnsupportedArchitecture, match=why):
        describe_foreign(config_dict(architecture, **keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_logits_are_refused_before_the_model_serves(tmp_path, monkeypatch, dtype):
    """As where positions are off by those of padding."""
    write("RobertaForCausalLM", tmp_path)
    monkeypatch.setattr(dry_run, "_counted_positions", lambda name, model: (0, None))
    ops = select(device="cpu", dtype=dtype, providers=["torch"])
    with pytest.raises(UnsupportedArchitecture, match="its logits differ from those of transf"):
        load_foreign_model(tmp_path, read_config(tmp_path), ops, dtype=dtype, device=CpuDevice())


def test_positions_after_those_of_padding(tmp_path):
    """RoBERTa's table has as many rows fewer to use."""
    write("RobertaForCausalLM", tmp_path)
    spec = describe_foreign(read_config(tmp_path))
    assert (spec.first_position, spec.num_positions) == (1, LENGTH)
    plan = make_plan(EngineArgs(model=str(tmp_path), skip_tokenizer_init=True))
    assert plan.model.max_model_len == LENGTH
    assert describe_foreign(config_dict("BertLMHeadModel", is_decoder=True)).first_position == 0


def test_what_transformers_cannot_run_is_refused(tmp_path):
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    config = config_dict("DeepseekV3ForCausalLM", num_key_value_heads=2)
    with pytest.raises(LoadError, match="transformers fails to run the model with this config"):
        load_foreign_model(
            tmp_path, config, ops, dtype=torch.float32, device=CpuDevice(), load_format="dummy"
        )


def test_unknown_to_both_is_refused():
    config = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {}}
    with pytest.raises(UnsupportedArchitecture, match="OwnForCausalLM is not supported"):
        choose_implementation(config, "auto")
    with pytest.raises(UnsupportedArchitecture, match="has no causal language model 'OwnFor"):
        describe_foreign(config)


@pytest.mark.parametrize(
    "option", [{"quantization": "int8"}, {"deterministic": True}, {"enable_expert_parallel": True}]
)
def test_options_of_our_own_decoder_are_refused(nanochat, option):
    with pytest.raises(NotBuiltYet, match="with model_impl=transformers"):
        make_plan(EngineArgs(model=str(nanochat), skip_tokenizer_init=True, **option))


def test_its_weights_are_not_a_sharded_state(nanochat, tmp_path):
    with pytest.raises(NotBuiltYet, match="save_sharded_state with model_impl=transformers"):
        engine(nanochat, max_model_len=LENGTH).save_sharded_state(str(tmp_path))


def test_other_implementations_are_refused():
    with pytest.raises(InvalidParameter, match="terratorch"):
        make_plan(EngineArgs(model_impl="terratorch"))


def test_without_the_library_the_error_names_the_extra(nanochat, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    for asked in ("auto", "transformers"):
        with pytest.raises(UnsupportedArchitecture, match=r"pip install 'quire\[transformers\]'"):
            choose_implementation(read_config(nanochat), asked)


def test_a_checkpoint_must_fit(nanochat, tmp_path):
    write("NanoChatForCausalLM", tmp_path, intermediate_size=64)
    changed(tmp_path, intermediate_size=128)
    with pytest.raises(WeightMismatch):
        engine(tmp_path, max_model_len=LENGTH)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="would apply this adapter"):
        engine(tmp_path, max_model_len=LENGTH)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(LoadError, match="not a valid safetensors file"):
        engine(tmp_path, max_model_len=LENGTH)


@pytest.mark.full
def test_a_core_process_gives_the_same(nanochat):
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = prompts()[0]
    (expected,) = run(crowded(nanochat), {0: (prompt, requests()[0][1])}).values()
    llm = LLM(
        model=str(nanochat),
        skip_tokenizer_init=True,
        dtype="float32",
        model_impl="transformers",
        enable_multiprocessing=True,
    )
    try:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert answer.outputs[0].token_ids == [token for token, _ in expected]
        llm.sleep(level=2)
        llm.wake_up()
        (again,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert again.outputs[0].token_ids == answer.outputs[0].token_ids
    finally:
        llm.close()
