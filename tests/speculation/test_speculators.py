"""A draft network in the layout of "speculators", given as the model."""

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.errors import InvalidParameter, LoadError, ModelNotFound, NotBuiltYet
from quire.testing import make_checkpoint
from tests.runner.drafting.draft_checkpoints import read, write, write_eagle3

SHAPE = {"num_hidden_layers": 5, "vocab_size": 300, "hidden_size": 64, "head_dim": 16}
ARGS = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 96}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), SHAPE, "llama", 3, dtype="float32")


@pytest.fixture(scope="module")
def network(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("network") / "drafts"
    return write_eagle3(folder, target, layout="speculators", layers=[1, 2, 3], vocab=120)


def plan_of(model, **args):
    return EngineArgs(model=str(model), **ARGS, **args).create_engine_config()


def test_it_stands_for_its_verifier(target, network):
    found = plan_of(network)
    assert (found.model.model, found.model.model_folder) == (str(target), str(target))
    assert (found.speculation.method, found.speculation.num_tokens) == ("eagle3", 3)
    given = {"method": "eagle3", "model": str(network), "num_speculative_tokens": 3}
    said = plan_of(target, speculative_config=given)
    assert found.speculation == said.speculation
    assert found.model.hf_config == said.model.hf_config


@pytest.mark.parametrize(
    "args",
    [
        {"spec_tokens": 5},
        {"speculative_config": {"num-speculative-tokens": 5}},
        {"speculative_config": {"method": "ngram", "model": "x", "num_speculative_tokens": 5}},
    ],
    ids=str,
)
def test_other_keys_count(target, network, args):
    plan = plan_of(network, **args).speculation
    assert (plan.method, plan.draft.folder, plan.num_tokens) == ("eagle3", str(network), 5)


def test_its_answers_are_those_of_its_verifier(target, network):
    prompts = [{"prompt_token_ids": [7 * i % 300 for i in range(n)]} for n in (3, 20, 41)]
    params = [SamplingParams(temperature=t, seed=4, max_tokens=30, logprobs=1) for t in (0, 1, 1)]
    found = []
    for model in (target, network):
        with LLM(model=str(model), **ARGS) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]


def test_what_cannot_be_served_alone_is_refused(tmp_path, network):
    config, tensors = read(network)

    def refused(error, match, **keys):
        folder = write(tmp_path / str(len(list(tmp_path.iterdir()))), config | keys, tensors)
        with pytest.raises(error, match=match):
            plan_of(folder)

    own = config["speculators_config"]
    refused(LoadError, "verifier.name_or_path", speculators_config={"algorithm": "eagle3"})
    refused(LoadError, "verifier.name_or_path", speculators_config={**own, "verifier": [1]})
    absent = {"name_or_path": str(tmp_path / "absent")}
    refused(ModelNotFound, "absent", speculators_config={**own, "verifier": absent})
    refused(NotBuiltYet, "dflash", speculators_model_type="dflash")
    refused(InvalidParameter, "peagle", speculators_model_type="peagle")
    with pytest.raises(InvalidParameter, match="spec_method"):
        plan_of(network, spec_method="ngram")


def test_a_network_that_names_itself_is_refused(tmp_path, network):
    config, tensors = read(network)
    folder = tmp_path / "own"
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder)
    write(folder, config, tensors)
    with pytest.raises(LoadError, match="cannot be the verifier"):
        plan_of(folder)
