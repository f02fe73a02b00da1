"""LoRARequest, what is made of it, and the forms of --lora-modules."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.config.args.engine_args import EngineArgs
from quire.engine.client.control_state import ControlState
from quire.engine.client.journal import CoreJournal
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import AdapterRef, EngineCoreOutputs, EngineCoreRequest
from quire.engine.wire.output_parts import Started
from quire.environment import read_environment
from quire.errors import (
    BadAdapter,
    EngineError,
    InvalidParameter,
    InvalidType,
    ModelNotFound,
    NotBuiltYet,
    RequestError,
)
from quire.lora.resolver import FolderResolver, LoRAResolver, is_plain_name
from quire.server.adapters import ServedAdapters, adapter_id, parse_modules
from quire.server.context import Server

ADAPTERS = Path(__file__).parent / "adapters"


def test_a_request_is_a_name_an_id_and_a_folder():
    asked = LoRARequest("a", 3, "~/adapters/a")
    assert (asked.name, asked.adapter_id, asked.path) == ("a", 3, "~/adapters/a")
    assert asked.folder == Path.home() / "adapters" / "a"
    assert LoRARequest("a", 3, Path("/b")).lora_path == "/b"
    assert asked == LoRARequest("a", 4, "/other") and hash(asked) == hash(LoRARequest("a", 1, "/"))
    assert asked != LoRARequest("b", 3, "~/adapters/a")
    assert msgspec.convert(msgspec.to_builtins(asked), LoRARequest).folder == asked.folder


def test_a_repository_of_the_hub_is_not_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert LoRARequest("a", 1, "owner/na-me.2").folder == Path("owner/na-me.2")
    for path in ("name", "a/b/c", "./owner/name", "../name", "owner/.name", "owner/name/"):
        assert LoRARequest("a", 1, path).folder.is_absolute(), path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert LoRARequest("a", 1, "owner/name").folder == tmp_path / "owner" / "name"


def test_an_unknown_user_s_home_stays_as_it_is(monkeypatch):
    folder = Path.cwd() / "~nosuchuser" / "a"
    assert LoRARequest("a", 1, "~nosuchuser/a").folder == folder
    for name in ("QUIRE_LORA_RESOLVER_CACHE_DIR", "QUIRE_CACHE_ROOT"):
        monkeypatch.setenv(name, "~nosuchuser/a")
    assert read_environment().adapter_folder == folder
    with pytest.raises(ModelNotFound, match="There is no folder '~nosuchuser/a'"):
        EngineArgs(model="~nosuchuser/a").create_engine_config()
    config = {"profiler": "torch", "torch_profiler_dir": "~nosuchuser/a"}
    plan = EngineArgs(profiler_config=config).create_engine_config()
    assert plan.parallel.profiler.torch_profiler_dir == str(folder)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("", 1, "/a"), InvalidParameter),
        (("a", 0, "/a"), InvalidParameter),
        (("a", -1, "/a"), InvalidParameter),
        (("a", 1, ""), InvalidParameter),
        (("a", 1, "/a\0b"), InvalidParameter),
        ((1, 1, "/a"), InvalidType),
        (("a", True, "/a"), InvalidType),
        (("a", "1", "/a"), InvalidType),
        (("a", 1, None), InvalidType),
        (("a", 2**63, "/a"), InvalidParameter),
        (("a\udc80", 1, "/a"), InvalidParameter),
        (("a", 1, "/a\udc80"), InvalidParameter),
    ],
)
def test_what_is_none_is_refused(given, error):
    with pytest.raises(error) as caught:
        LoRARequest(*given)
    assert isinstance(caught.value, ValueError)


# options


def plan_of(**options):
    return EngineArgs(**options).create_engine_config().adapters


def test_options_become_a_plan():
    assert plan_of() is None
    plan = plan_of(enable_lora=True, dtype="float32")
    assert (plan.max_loras, plan.max_lora_rank, plan.max_cpu_loras) == (1, 16, 1)
    assert plan.lora_dtype == "float32" and plan.target_modules is None
    plan = plan_of(
        enable_lora=True, max_loras=3, max_cpu_loras=0, lora_dtype="bfloat16",
        lora_target_modules="o_proj",
    )  # fmt: skip
    assert (plan.max_cpu_loras, plan.lora_dtype) == (3, "bfloat16")
    assert plan.target_modules == ("o_proj",)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"enable_lora": True, "max_lora_rank": 20}, InvalidParameter, "it is one of 1, 8, 16"),
        ({"enable_lora": True, "max_loras": 0}, InvalidParameter, ">= 1"),
        (
            {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3},
            InvalidParameter,
            r"max_cpu_loras=3 is not allowed: it must be >= max_loras \(4\)",
        ),
        ({"max_loras": 4}, InvalidParameter, "it is about adapters, which enable_lora allows"),
        ({"enable_lora": True, "fully_sharded_loras": True}, NotBuiltYet, "fully_sharded_loras"),
        ({"enable_lora": True, "lora_dtype": "int8"}, InvalidParameter, "lora_dtype"),
    ],
)
def test_options_that_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        plan_of(**options)


# faces


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", kv_cache_memory_bytes=2**25, enable_lora=True, max_loras=2) as made:
        yield made


@pytest.fixture(scope="module")
def apart():
    args = {"dtype": "float32", "kv_cache_memory_bytes": 2**25}
    with LLM(**args, enable_lora=True, max_loras=2, enable_multiprocessing=True) as made:
        yield made


SHOUT = LoRARequest("shout", 1, ADAPTERS / "shout")
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


def test_an_adapter_of_the_hub_is_downloaded_when_it_is_read(monkeypatch, llm):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, **options: asked.append(repo) or str(ADAPTERS / "shout"),
    )
    texts = [
        llm.generate("def", PARAMS, lora_request=request)[0].outputs[0].text
        for request in (LoRARequest("hub", 91, "owner/name"), SHOUT, None)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert set(asked) == {"owner/name"}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: 1 / 0)
    with pytest.raises(RequestError, match="no folder 'owner/other'.*could not be fetched"):
        llm.generate("def", PARAMS, lora_request=LoRARequest("other", 92, "owner/other"))
    [again] = llm.generate("def", PARAMS, lora_request=LoRARequest("hub", 91, "owner/name"))
    assert again.outputs[0].text == texts[0], "it is still in memory"


def test_each_prompt_has_its_own_adapter(llm):
    base, shout = (
        llm.generate("def add(a, b):", PARAMS, lora_request=one, use_tqdm=False)[0].outputs[0].text
        for one in (None, SHOUT)
    )
    outputs = llm.generate(
        ["def add(a, b):"] * 3, PARAMS, lora_request=[SHOUT, None, SHOUT], use_tqdm=False
    )
    assert [output.outputs[0].text for output in outputs] == [shout, base, shout] != [base] * 3
    assert [output.lora_request for output in outputs] == [SHOUT, None, SHOUT]
    assert outputs[0].outputs[0].lora_request == SHOUT
    with pytest.raises(InvalidParameter, match="one for each of the 2 prompts"):
        llm.generate(["a", "b"], PARAMS, lora_request=[SHOUT], use_tqdm=False)
    with pytest.raises(InvalidType, match="it is a LoRARequest"):
        llm.generate("a", PARAMS, lora_request="shout", use_tqdm=False)


def test_chats_and_beams_have_adapters(llm):
    talk = [{"role": "user", "content": "def add(a, b):"}]
    base, shout = (
        llm.chat(talk, PARAMS, lora_request=one, use_tqdm=False)[0].outputs[0].text
        for one in (None, SHOUT)
    )
    assert base != shout
    beams = [
        llm.beam_search(["def add(a, b):"], BeamSearchParams(2, 8), lora_request=one)[0].sequences
        for one in (None, SHOUT)
    ]
    assert [beam.tokens for beam in beams[0]] != [beam.tokens for beam in beams[1]]
    assert beams[1][0].lora_request == SHOUT and beams[0][0].lora_request is None


def copy_of_shout(folder, **config):
    shutil.copytree(ADAPTERS / "shout", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return LoRARequest("bad", 7, folder)


def with_tensors(folder, change):
    """An adapter in whose tensors `change(name, tensor)` stands."""
    asked = copy_of_shout(folder)
    file = folder / "adapter_model.safetensors"
    tensors = dict(change(*item) for item in load_file(file).items())
    save_file(tensors, file)
    return asked


UNUSABLE = {
    "absent": (lambda folder: LoRARequest("bad", 7, folder), "There is no LoRA adapter in /"),
    "without tensors": (
        lambda folder: (
            copy_of_shout(folder),
            (folder / "adapter_model.safetensors").unlink(),
        )[0],
        "it has no adapter_model.safetensors",
    ),
    "another method": (lambda folder: copy_of_shout(folder, peft_type="IA3"), "peft_type is 'IA3'"),
    "too large": (
        lambda folder: copy_of_shout(folder, r=64),
        "LoRA rank 64 is greater than max_lora_rank 16",
    ),
    "of another model": (
        lambda folder: with_tensors(folder, lambda n, t: (n.replace("mlp", "other"), t)),
        "The adapter changes what this model does not have",
    ),
    "of another width": (
        lambda folder: with_tensors(folder, lambda n, t: (n, t[:, :3].contiguous())),
        "and this model needs",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "in a process of its own"])
def test_an_adapter_that_cannot_be_used_is_raised_before_anything_runs(
    llm, apart, is_apart, kind, tmp_path
):
    own = apart if is_apart else llm
    make, text = UNUSABLE[kind]
    asked = make(tmp_path / "adapter")
    each = [None, SHOUT, asked]
    talk = [{"role": "user", "content": "a"}]
    calls = [
        lambda: own.generate(["a"] * 3, PARAMS, lora_request=each, use_tqdm=False),
        lambda: own.generate("a", PARAMS, lora_request=asked, use_tqdm=False),
        lambda: own.chat([talk] * 3, PARAMS, lora_request=each, use_tqdm=False),
        lambda: own.enqueue(["a"] * 3, PARAMS, lora_request=each, use_tqdm=False),
        lambda: own.beam_search(["a"], BeamSearchParams(2, 4), lora_request=asked),
        lambda: own.check_lora(asked),
    ]
    for call in calls:
        with pytest.raises(BadAdapter, match=text):
            call()
    assert not own.llm_engine.has_unfinished_requests() and own.wait_for_completion() == []
    assert 7 not in own.list_loras()


def test_what_only_its_values_tell_costs_its_prompts_alone(llm, tmp_path, caplog):
    spoiled = with_tensors(tmp_path / "adapter", lambda n, t: (n, t.fill_(float("nan"))))
    llm.check_lora(spoiled)
    outputs = llm.generate(["a", "b"], PARAMS, lora_request=[spoiled, None], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].error.startswith("the LoRA adapter 'bad': ")
    assert outputs[0].outputs[0].error.endswith("holds NaN or infinity.")
    assert outputs[1].outputs[0].finish_reason == "length" and outputs[1].outputs[0].error is None
    [said] = [r.getMessage() for r in caplog.records if "requests failed" in r.getMessage()]
    assert said.startswith("1 of 2 requests failed;") and said.endswith(outputs[0].outputs[0].error)


def test_what_is_in_memory_and_unchanged_is_not_checked_again(llm, monkeypatch):
    llm.add_lora(SHOUT)
    worker = llm.llm_engine.model_executor.worker
    monkeypatch.setattr(worker, "check_adapter", lambda folder: 1 // 0)
    llm.check_lora(SHOUT)


def test_an_engine_without_adapters_says_so():
    with LLM(dtype="float32", kv_cache_memory_bytes=2**25) as plain:
        with pytest.raises(RequestError, match="LoRA is not enabled"):
            plain.generate("a", PARAMS, lora_request=SHOUT, use_tqdm=False)
        with pytest.raises(RequestError, match="LoRA is not enabled"):
            plain.llm_engine.add_lora(SHOUT)
        assert plain.llm_engine.list_loras() == set()


def test_verbs_of_a_real_engine(llm):
    assert llm.add_lora(SHOUT) and llm.list_loras() >= {1}
    assert llm.pin_lora(1) and llm.remove_lora(1) and not llm.remove_lora(1)


# restarts


def test_a_restarted_core_gets_its_adapters_and_pins():
    state = ControlState()
    for adapter, again in ((1, False), (2, True)):
        state.note(Utility("add_lora", ("name", adapter, f"/{adapter}", again)), True)
    state.note(Utility("pin_lora", (2,)), True)
    state.note(Utility("add_lora", ("other", 1, "/elsewhere", False)), True)
    state.note(Utility("sleep", (1, "abort")), None)
    assert state.replay() == [
        Utility("add_lora", ("other", 1, "/elsewhere", False)),
        Utility("add_lora", ("name", 2, "/2", False)),
        Utility("pin_lora", (2,)),
        Utility("sleep", (1, "keep")),
    ]
    state.note(Utility("remove_lora", (2,)), True)
    assert [call.args[0] for call in state.replay()] == ["other", 1]


def test_a_resumed_request_says_what_its_output_came_from():
    journal = CoreJournal(0)
    ref = AdapterRef("a", 1, "/a")
    for handle in (5, 6):
        request = EngineCoreRequest(handle, [1, 2], PARAMS, 0, 0.0, adapter=ref)
        journal.add(request)
    journal.take(
        EngineCoreOutputs(handles=[5], token_ids=[9], started=[Started(5, 0, 0.0, adapter=77)])
    )
    journal.died(())
    journal.restarted()
    sent = {request.handle: request.adapter for request in journal.due()}
    assert sent == {5: AdapterRef("a", 1, "/a", number=77), 6: ref}


# names on the command line and over HTTP


def test_forms_of_lora_modules():
    given = [
        "a=/adapters/a",
        '{"name": "b", "path": "/b,c", "base_model_name": "base"}',
        '[{"name": "c", "path": "/c", "is_3d_lora_weight": true}]',
        "d=relative/e=f",
    ]
    found = parse_modules(given)
    assert [(one.lora_name, one.lora_path) for one in found] == [
        ("a", "/adapters/a"), ("b", "/b,c"), ("c", "/c"), ("d", "relative/e=f")
    ]  # fmt: skip
    assert found[1].base_model_name == "base"
    assert found[0].lora_int_id == adapter_id("a") != adapter_id("b")


@pytest.mark.parametrize(
    "given",
    ["a", "=b", "a=", "a=b,c=d", "{}", "[1]", '{"name": "a"}', "[" * 100_000,
     '{"name": 1, "path": "/"}',
     '{"name": "a", "path": "/a", "trust": 1}', '{"name": "a", "path": ["/a"]}', "null", "\0=/a\0"],
    ids=range(13),
)  # fmt: skip
def test_other_forms_are_refused(given):
    with pytest.raises((InvalidParameter, InvalidType)):
        parse_modules([given])


def test_a_name_is_given_once():
    with pytest.raises(InvalidParameter, match="a name is given once"):
        parse_modules(["a=/a", "a=/b"])


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "C:a", "a\0", ".a", "x" * 300]
)
def test_names_that_lead_out_of_a_folder(name):
    assert not is_plain_name(name)
    assert is_plain_name("sql-v2.1 (new) é")


def library(tmp_path, **config):
    folder = tmp_path / "mine"
    folder.mkdir()
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base", **config})
    (folder / "adapter_config.json").write_text(text)


def resolving(load, *resolvers):
    """Adapters that these find, named r0, r1, ..."""
    named = {f"r{place}": resolver for place, resolver in enumerate(resolvers)}
    return ServedAdapters(load, may_change=True, resolvers=named, models=("alias", "/base"))


def test_a_folder_s_adapter_is_loaded_once(tmp_path):
    library(tmp_path)
    loaded = []

    async def load(asked):
        loaded.append(asked.lora_path)
        await asyncio.sleep(0)
        return True

    served = resolving(load, FolderResolver(tmp_path, ("base",)))

    async def find():
        return await asyncio.gather(*(served.find("mine") for _ in range(5)), served.find("other"))

    *found, other = asyncio.run(find())
    assert {one.lora_path for one in found} == {str(tmp_path / "mine")} == set(loaded)
    assert len(loaded) == 1 and other is None and not served._locks


class Resolver(LoRAResolver):
    """Finds `path` for any name, or raises it; notes what it is asked."""

    def __init__(self, path):
        self.path, self.asked = path, []

    async def resolve_lora(self, base_model_name, lora_name):
        self.asked.append((base_model_name, lora_name))
        if isinstance(self.path, Exception):
            raise self.path
        return self.path and LoRARequest("its own name", 77, self.path)


async def load_unless_bad(asked):
    if asked.lora_path == "/bad":
        raise RequestError("it is broken")
    return True


def test_resolvers_are_asked_in_their_order(caplog):
    """The next is asked where one knows nothing or fails; the result has the client's name."""
    resolvers = [Resolver(path) for path in (None, OSError("no net"), "/bad", "/good", "/never")]
    served = resolving(load_unless_bad, *resolvers)
    found = asyncio.run(served.find("org/../it"))
    assert (found.lora_name, found.lora_path) == ("org/../it", "/good")
    assert found.lora_int_id == adapter_id("org/../it")
    assert [r.asked for r in resolvers] == [[("/base", "org/../it")]] * 4 + [[]]
    assert "The LoRA resolver 'r1' failed" in caplog.text
    assert asyncio.run(served.find("org/../it")) is found and len(resolvers[0].asked) == 1


@pytest.mark.parametrize(
    ("paths", "error", "why"),
    [
        ([None], None, ""),
        ([None, "/bad", OSError()], RequestError, "was found but could not be loaded: it is brok"),
        ([OSError("no net"), None], EngineError, "the LoRA resolver 'r0', which might know it, fa"),
    ],
    ids=["unknown", "broken", "failed"],
)
def test_a_name_that_no_resolver_brings(paths, error, why):
    served = resolving(load_unless_bad, *map(Resolver, paths))
    if error is None:
        assert asyncio.run(served.find("it")) is None
        return
    with pytest.raises(error, match=why) as caught:
        asyncio.run(served.find("it"))
    assert "no net" not in str(caught.value), "a client learns nothing of its inside"


def test_a_resolver_that_returns_something_else_has_failed():
    class Wrong(LoRAResolver):
        async def resolve_lora(self, base_model_name, lora_name):
            return "/path"

    with pytest.raises(EngineError, match="'r0', which might know it, failed"):
        asyncio.run(resolving(load_unless_bad, Wrong()).find("it"))


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\0"])
def test_resolvers_are_not_asked_for_names_that_are_not_printable(name):
    resolver = Resolver("/good")
    assert asyncio.run(resolving(load_unless_bad, resolver).find(name)) is None
    served = ServedAdapters(load_unless_bad, resolvers={"r": resolver}, models=("base",))
    assert asyncio.run(served.find("it")) is None, "the operator has not allowed it"
    assert not resolver.asked


def served_slowly():
    """Adapters whose loads take a few turns of the loop; those of a folder "bad" fail."""
    loaded = []

    async def load(asked):
        for _ in range(3):
            await asyncio.sleep(0)
        if asked.lora_path == "/bad":
            raise RequestError("it is broken")
        loaded.append(asked.lora_path)
        return True

    return ServedAdapters(load, may_change=True), loaded


async def outcomes(served, *calls):
    """What each of several calls at once comes to: "ok", or the class of its error."""

    async def outcome(call):
        try:
            result = await call
        except RequestError as error:
            return type(error).__name__
        return "ok" if result is None else result

    found = await asyncio.gather(*map(outcome, calls))
    assert not served._locks
    return found


def test_loads_of_one_name_at_once_have_one_winner():
    served, loaded = served_slowly()
    asked = [LoRARequest("a", 1, "/x" if n % 2 else "/y") for n in range(8)]
    found = asyncio.run(outcomes(served, *map(served.add, asked)))
    assert found == ["ok"] + ["NameIsServed"] * 7
    assert loaded == ["/y"] and served.named["a"].request.lora_path == "/y"


def test_loads_of_one_name_go_on_after_one_that_failed():
    served, loaded = served_slowly()
    asked = [LoRARequest("a", 1, path) for path in ("/bad", "/x", "/y")]
    found = asyncio.run(outcomes(served, *map(served.add, asked)))
    assert found == ["RequestError", "ok", "NameIsServed"]
    assert served.named["a"].request.lora_path == "/x"


def test_an_unload_waits_for_the_load_before_it_and_a_load_for_the_unload():
    served, loaded = served_slowly()
    first, second = (LoRARequest("a", 1, path) for path in ("/x", "/y"))
    calls = (served.add(first), served.remove("a"), served.add(second), served.remove("b"))
    assert asyncio.run(outcomes(served, *calls)) == ["ok", True, "ok", False]
    assert loaded == ["/x", "/y"] and served.named["a"].request.lora_path == "/y"


def test_loads_in_place_end_with_the_last_of_them():
    served, loaded = served_slowly()
    asked = [LoRARequest("a", 1, f"/{n}", load_inplace=True) for n in range(3)]
    assert asyncio.run(outcomes(served, *map(served.add, asked))) == ["ok"] * 3
    assert loaded == ["/0", "/1", "/2"] and served.named["a"].request.lora_path == "/2"


def test_a_reply_is_called_by_its_adapter_s_name_after_an_unload_too():
    server = SimpleNamespace(names=("base", "alias"), adapters=ServedAdapters())
    asked = (None, "", "base", "alias", "sql")
    assert [Server.name_of(server, name) for name in asked] == ["base"] * 4 + ["sql"]


@pytest.mark.parametrize(
    "config",
    [{"peft_type": "IA3"}, {"base_model_name_or_path": "other"}, {"base_model_name_or_path": None},
     {"base_model_name_or_path": ["base"]}],
)  # fmt: skip
def test_anything_but_an_adapter_of_the_model_is_not_found(tmp_path, config):
    library(tmp_path, **config)
    served = resolving(None, FolderResolver(tmp_path, ("base",)))
    assert asyncio.run(served.find("mine")) is None
