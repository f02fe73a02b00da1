"""Hidden states of prompts in files: those of transformers, with the same bits in any engine."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quire import LLM, EngineArgs, SamplingParams
from quire.engine.control_verbs import perform
from quire.errors import EngineDeadError, InvalidParameter, NotBuiltYet
from quire.models.loading import sharded_state
from quire.testing import make_checkpoint
from tests.server.serve_process import serving

SHAPE = {
    "num_hidden_layers": 4, "vocab_size": 300, "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 96, "rms_norm_eps": 1e-3,
}  # fmt: skip
LAYERS = [4, 0, 1, 3]
PROMPTS = [[(7 * i * i + n) % 290 + 5 for i in range(n)] for n in (1, 30, 9, 17, 30)]
PROMPTS.append(PROMPTS[1])


def config(folder, layers=None, **extra):
    chosen = {"eagle_aux_hidden_state_layer_ids": layers or LAYERS}
    return {
        "speculative_config": {
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": chosen},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder), **extra},
        },
    }  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    shape = SHAPE | ({"rope_theta": 1e4} if request.param == "llama" else {})
    return make_checkpoint(folder, shape, request.param, 3, dtype="float32")


def open_llm(model, **args):
    given = {"dtype": "float32", "max_model_len": 48, "block_size": 4} | args
    return LLM(model=str(model), skip_tokenizer_init=True, **given)


def written(llm, params=None):
    params = params or SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
    assert len(set(paths)) == len(paths), "a file for each request, of equal prompts, too"
    return [load_file(path) for path in paths]


def preempt_often(llm):
    """Preempt all requests after every third of the first steps, in the middle of prompts."""
    core, count = llm.llm_engine.front_end.client.engine_core, 0
    step = core.step

    def disturbed():
        nonlocal count
        count += 1
        if count % 3 == 0 and count < 20:
            perform(core, "reset_prefix_cache", (True,))
            assert core.scheduler.counters.num_preemptions > 0
        return step()

    core.step = disturbed


@torch.inference_mode()
def of_transformers(model):
    """[n, L, C] of each prompt, in the order of layers."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    last = []
    theirs.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0]))
    found = []
    for ids in PROMPTS:
        states = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
        layers = [state[0] for state in states[:-1]] + [last.pop()]
        found.append(torch.stack([layers[layer] for layer in sorted(LAYERS)], 1))
    return found


def test_they_are_those_of_transformers(model, tmp_path):
    with open_llm(model, **config(tmp_path)) as llm:
        found = written(llm)
    for ids, ours, theirs in zip(PROMPTS, found, of_transformers(model), strict=True):
        assert ours["token_ids"].tolist() == ids
        assert ours["hidden_states"].shape == (len(ids), 4, 64)
        torch.testing.assert_close(ours["hidden_states"], theirs, rtol=2e-4, atol=2e-4)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".safetensors"] * len(PROMPTS)


@pytest.mark.parametrize(
    "args",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"max_num_batched_tokens": 11, "max_num_seqs": 6, "enforce_eager": True},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
        {"max_num_seqs": 1, "enable_multiprocessing": True},
    ],
    ids=["chunked", "preempted", "two-steps", "alone"],
)
def test_they_have_the_same_bits_in_any_engine(model, tmp_path, args):
    found = []
    for number, given in enumerate(({}, args)):
        with open_llm(model, **config(tmp_path / str(number)), **given) as llm:
            if number and "enforce_eager" in args:
                preempt_often(llm)
            found.append(written(llm))
    for right, ours in zip(*found, strict=True):
        assert torch.equal(right["hidden_states"], ours["hidden_states"])


def test_they_have_the_type_of_the_model(model, tmp_path):
    with open_llm(model, **config(tmp_path, [2]), dtype="bfloat16") as llm:
        found = written(llm, SamplingParams(n=2, temperature=1.0, max_tokens=1))
    assert {states["hidden_states"].dtype for states in found} == {torch.bfloat16}
    assert found[1]["hidden_states"].shape == (30, 1, 64)


def test_a_file_that_cannot_be_written_fails_its_request(model, tmp_path):
    folder = tmp_path / "gone"
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with open_llm(model, **config(folder)) as llm:
        shutil.rmtree(folder)
        [output] = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "hidden states could not be written" in output.outputs[0].error
        assert output.kv_transfer_params is None
        folder.mkdir()
        assert len(written(llm)) == len(PROMPTS)


def test_a_full_disk_fails_the_request_and_names_the_file(model, tmp_path, monkeypatch):
    def save(tensors, file, metadata):
        raise sharded_state.SafetensorError("I/O error: No space left on device (os error 28)")

    with open_llm(model, **config(tmp_path)) as llm:
        with monkeypatch.context() as full:
            full.setattr(sharded_state, "save_file", save)
            params = SamplingParams(temperature=0.0, max_tokens=2)
            [output] = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert f"{tmp_path}/" in output.outputs[0].error
        assert "No space left on device" in output.outputs[0].error
        assert len(written(llm)) == len(PROMPTS)


@pytest.mark.parametrize("multiprocessing", [False, True])
def test_a_folder_that_cannot_be_is_refused(model, tmp_path, multiprocessing):
    (tmp_path / "file").touch()
    error = EngineDeadError if multiprocessing else InvalidParameter
    with pytest.raises(error, match="shared_storage_path.*can be a folder"):
        given = config(tmp_path / "file" / "folder")
        open_llm(model, **given, enable_multiprocessing=multiprocessing)


def test_replies_of_the_server_name_the_file(tmp_path):
    given = config(tmp_path, [0])
    args = (
        "--speculative-config", json.dumps(given["speculative_config"]),
        "--kv-transfer-config", json.dumps(given["kv_transfer_config"]),
    )  # fmt: skip
    with serving(*args) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 1}
        reply = server.post("/v1/completions", body).json()
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 1}
        replies = [reply, server.post("/v1/chat/completions", chat).json()]
    for reply in replies:
        states = load_file(reply["kv_transfer_params"]["hidden_states_path"])
        num_tokens = reply["usage"]["prompt_tokens"]
        assert len(states["token_ids"]) == len(states["hidden_states"]) == num_tokens


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ({"kv_transfer_config": None}, InvalidParameter, "ExampleHiddenStatesConnector"),
        ({"speculative_config": None}, NotBuiltYet, "stay in their engine"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, InvalidParameter, "which extr"),
        ({"enable_prefix_caching": True}, InvalidParameter, "cached tokens would not be computed"),
        ({"per_request_spec_decode_metrics": "summary"}, InvalidParameter, "nothing is drafted"),
        (config("x", [0, 12]), InvalidParameter, "different layers"),
        (config("x", [1, 1]), InvalidParameter, "different layers"),
        (config("x", ["1"]), InvalidParameter, "different layers"),
        (config("x", use_synchronization_lock=True), NotBuiltYet, "complete when its answer"),
        (config("x", allow_custom_save_path=True), NotBuiltYet, "engine names the files"),
        (config("x", num_writer_threads=4), NotBuiltYet, "num_writer_threads"),
        (config(""), InvalidParameter, "folder that files go to"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(tmp_path, args, error, match):
    with pytest.raises(error, match=match):
        EngineArgs(**config(tmp_path) | args).create_engine_config()
