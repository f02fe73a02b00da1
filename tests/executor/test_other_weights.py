"""`reload_weights` with the weights of another folder, or with tensors."""

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, EngineArgs, LLMEngine, SamplingParams
from quire.engine.client.control_state import ControlState
from quire.engine.wire.control_calls import Utility
from quire.errors import InvalidParameter, LoadError, NotBuiltYet, WeightMismatch
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, same_bits, serve

SHAPE = {"num_hidden_layers": 2, "vocab_size": 384}


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def folders(request, tmp_path_factory):
    """Two checkpoints of one shape, with biases and tied heads, or with experts."""
    base = tmp_path_factory.mktemp(request.param)
    shape = SHAPE | {"tie_word_embeddings": request.param == "qwen2"}
    return [make_checkpoint(base / str(s), shape, request.param, seed=s) for s in (0, 1)]


@pytest.fixture(scope="module")
def answers(folders):
    def of(folder):
        core = open_core(folder, 1)
        found = serve(core)
        core.shutdown()
        return found

    first, second = map(of, folders)
    assert not same_bits(first, second)
    return first, second


@pytest.fixture
def core(folders):
    """An engine with the first one's weights."""
    made = open_core(folders[0], 1)
    yield made
    made.shutdown()


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def reload(core, **kwargs):
    return core.collective_rpc("reload_weights", kwargs=kwargs)


@pytest.mark.parametrize("form", ["pairs", "mapping", "generator", "backwards", "wider"])
def test_tensors_give_the_answers_of_their_checkpoint(core, folders, answers, form):
    assert same_bits(serve(core), answers[0])
    weights = tensors_of(folders[1])
    pairs = list(weights.items())
    given = {
        "pairs": pairs,
        "mapping": weights,
        "generator": (pair for pair in pairs),
        "backwards": pairs[::-1],
        "wider": [(name, tensor.double()) for name, tensor in pairs],
    }[form]
    reload(core, weights_iterator=given)
    for tensor in weights.values():
        tensor.zero_()  # the engine has copies
    assert same_bits(serve(core), answers[1])


def test_several_workers_take_their_parts_of_one_iterator(folders, answers):
    core = open_core(folders[0], 2) if "qwen2" in str(folders[0]) else None
    if core is None:
        pytest.skip("experts are not cut over workers")
    reload(core, weights_iterator=iter(tensors_of(folders[1]).items()))
    assert same_bits(serve(core), answers[1])
    core.shutdown()


def test_a_folder_is_the_engines_from_then_on(core, folders, answers):
    reload(core, weights_path=str(folders[1]))
    assert same_bits(serve(core), answers[1])
    core.sleep(2)
    core.wake_up()
    assert same_bits(serve(core), answers[1])
    reload(core)
    assert same_bits(serve(core), answers[1])


def test_tensors_are_not_kept(core, folders, answers, caplog):
    reload(core, weights_iterator=tensors_of(folders[1]).items())
    core.sleep(2)
    core.wake_up()
    assert "were not kept: the checkpoint's are loaded" in caplog.text
    assert same_bits(serve(core), answers[0])
    caplog.clear()
    core.sleep(2)
    core.wake_up()
    assert not caplog.text


@pytest.mark.parametrize(
    "fault", ["missing", "more", "doubled", "shape", "not a pair", "no folder"]
)
def test_what_does_not_fit_changes_nothing(core, folders, answers, fault, tmp_path):
    pairs = list(tensors_of(folders[1]).items())
    name, tensor = pairs[3]
    given, error, words = {
        "missing": (pairs[1:], WeightMismatch, pairs[0][0]),
        "more": ([*pairs, ("model.other", tensor)], WeightMismatch, "model.other"),
        "doubled": ([*pairs, pairs[3]], WeightMismatch, f"{name} is given twice"),
        "shape": ([*pairs[:3], (name, torch.zeros(7)), *pairs[4:]], WeightMismatch, name),
        "not a pair": ([*pairs, tensor], InvalidParameter, "pairs of a name and a tensor"),
        "no folder": (None, LoadError, str(tmp_path / "none")),
    }[fault]
    kwargs = {"weights_iterator": given} if given else {"weights_path": tmp_path / "none"}
    with pytest.raises(error, match=words.replace(".", r"\.")):
        reload(core, **kwargs)
    assert same_bits(serve(core), answers[0])


def test_what_is_refused_is_named(core, folders):
    with pytest.raises(NotBuiltYet, match="is_checkpoint_format"):
        reload(core, weights_iterator=[], is_checkpoint_format=False)
    with pytest.raises(InvalidParameter, match="weights_path"):
        reload(core, weights_iterator=[], weights_path=str(folders[1]))


def test_files_are_read_after_a_start_with_random_weights(folders, answers):
    core = open_core(folders[0], 1, load_format="dummy")
    drawn = serve(core)
    core.collective_rpc("update_config", args=[{"load_config": {"load_format": "auto"}}])
    assert same_bits(serve(core), drawn)
    reload(core)
    assert same_bits(serve(core), answers[0])
    core.collective_rpc("update_config", args=[{"model_config": {"model": str(folders[1])}}])
    core.sleep(2)
    core.wake_up()
    assert same_bits(serve(core), answers[1])
    for refused, error in (
        ({"load_config": {"load_format": "dummy"}}, NotBuiltYet),
        ({"load_config": {"device": "cpu"}}, InvalidParameter),
        ({"cache_config": {}}, InvalidParameter),
        ([], InvalidParameter),
    ):
        with pytest.raises(error):
            core.collective_rpc("update_config", args=[refused])
    assert same_bits(serve(core), answers[1])
    core.shutdown()


def test_a_restarted_core_reads_the_files_that_the_one_before_was_told_of(folders, answers):
    state = ControlState()
    told = {"overrides": {"load_config": {"load_format": "auto"}}}
    state.note(Utility("collective_rpc", ("update_config", None, [], told)), [None])
    [again] = state.replay()
    core = open_core(folders[0], 1, load_format="dummy")
    core.collective_rpc(*again.args)
    assert same_bits(serve(core), answers[0])
    core.shutdown()


FORMAT = {"load_config": {"load_format": "safetensors"}}


def folder_of(name):
    return {"model_config": {"model": name}}


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ([folder_of("b"), FORMAT], [folder_of("b"), FORMAT]),
        ([FORMAT, folder_of("b")], [folder_of("b")]),
        ([FORMAT, folder_of("b"), FORMAT], [folder_of("b"), FORMAT]),
        ([folder_of("b"), "a"], ["a"]),
        ([folder_of("b"), "a", folder_of("c")], [folder_of("c")]),
        ([FORMAT, "a", FORMAT], ["a", FORMAT]),
    ],
)
def test_a_restarted_core_reads_the_files_that_were_named_last(told, kept):
    state = ControlState()
    for each in told:
        given = ("reload_weights", None, [None, each], {})
        if not isinstance(each, str):
            given = ("update_config", None, [each], {})
        state.note(Utility("collective_rpc", given), [None])
    assert [call.args[2][-1] for call in state.replay()] == kept
    assert all(
        call.args[3] == ({"is_restored": True} if call.args[0] == "update_config" else {})
        for call in state.replay()
    )


def test_a_restarted_core_is_told_of_the_folder_again():
    state = ControlState()
    for method, kwargs in (("reload_weights", {"weights_path": "a"}), ("kv_cache_bytes", {"b": 1})):
        state.note(Utility("collective_rpc", (method, None, [], kwargs)), [None])
    state.note(Utility("collective_rpc", ("reload_weights", None, [], {})), [None])
    [again] = state.replay()
    assert again.args == ("reload_weights", None, [], {"weights_path": "a"})


@pytest.mark.sharp(when=lambda folders: folders == "qwen2")
@pytest.mark.full
def test_a_core_that_died_comes_back_with_the_weights_of_the_folder(folders):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(3, 20))}

    def texts(llm):
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    wishes = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 22, "max_model_len": 64}

    def opened(folder):
        args = EngineArgs(model=str(folder), **wishes)
        return LLM.from_engine(LLMEngine.from_engine_args(args, enable_multiprocessing=True))

    with opened(folders[1]) as other:
        right = texts(other)
    with opened(folders[0]) as llm:
        assert texts(llm) != right
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
        assert texts(llm) == right
        [core] = llm.llm_engine.front_end.client.remote.pool.processes.values()
        core.kill()
        assert texts(llm) == right
