"""The table of control verbs: what its entries make of faces, calls and answers."""

import asyncio
import inspect

import pytest

from quire import LLM, LLMEngine, LoRARequest
from quire.engine import AsyncLLM
from quire.engine.client.control_state import REPEATABLE
from quire.engine.control_verbs import UTILITIES, AwaitedControl, BlockingControl, combined
from quire.engine.core.core import EngineCore
from quire.engine.wire.control_calls import Utility, Verb
from quire.testing.scripted_core import ScriptedCore

VERBS = [
    name
    for kind in AwaitedControl.__mro__
    for name, entry in vars(kind).items()
    if isinstance(entry, Verb)
]
ARGUMENTS = {
    "collective_rpc": ("check_health",),
    "save_sharded_state": ("folder",),
    "check_lora": (LoRARequest("a", 1, "/a"),),
    "add_lora": (LoRARequest("a", 1, "/a"),),
    "remove_lora": (1,),
    "pin_lora": (1,),
    "init_weight_transfer_engine": ({"init_info": {}},),
    "_receive_weights": ({},),
    "_commit_weight_update": (None,),
    "_abandon_weight_update": ("why",),
    "_spoil_weights": ("why",),
    "set_weight_version": ("a",),
    "hand_over": ([1],),
    "update_weight_version": ("a",),
}


class Blocking(BlockingControl):
    """Gives `answer` and notes the calls."""

    def __init__(self, answer=()):
        self.calls, self.answer = [], answer

    def _call(self, call):
        self.calls.append(call)
        return self.answer


class Awaited(AwaitedControl):
    def __init__(self, answer=()):
        self.calls, self.answer = [], answer

    async def _call(self, call):
        self.calls.append(call)
        return self.answer


def call_of(name):
    face = Awaited()
    asyncio.run(getattr(face, name)(*ARGUMENTS.get(name, ())))
    [call] = face.calls
    return call


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("core", [EngineCore, ScriptedCore])
def test_a_core_takes_what_every_verb_sends(core, name):
    call = call_of(name)
    assert call.method in UTILITIES
    inspect.signature(getattr(core, call.method)).bind(None, *call.args)


@pytest.mark.parametrize("face", [LLM, LLMEngine, AsyncLLM])
def test_a_verb_is_a_method_with_the_signature_and_docstring_of_its_entry(face):
    signature = inspect.signature(face.sleep)
    assert [str(each) for each in signature.parameters.values()][:2] == ["self", "level: int = 1"]
    assert signature.return_annotation is None
    assert inspect.signature(face.stop_profile).return_annotation == list[str]
    assert face.sleep.__name__ == "sleep" and face.sleep.__doc__.startswith("Stop scheduling")
    assert inspect.iscoroutinefunction(face.sleep) is (face is AsyncLLM)


def test_each_face_waits_in_its_way():
    blocking, awaited = Blocking(True), Awaited(True)
    assert blocking.wake_up(tags=("weights",)) is True
    assert asyncio.run(awaited.wake_up(tags=("weights",))) is True
    assert blocking.calls == awaited.calls == [Utility("wake_up", (["weights"],))]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tag'"):
        blocking.wake_up(tag="weights")


def test_answers_are_what_the_signature_says_whatever_the_wire_makes_of_them():
    assert Blocking([None, "a", "b"]).stop_profile() == ["a", "b"]
    assert Blocking([None]).start_profile() is None
    assert Blocking(["generate"]).get_supported_tasks() == ("generate",)
    assert Blocking([]).list_loras() == set()


def test_a_timeout_stays_with_the_caller():
    face = Blocking([1])
    face.collective_rpc("check_health", timeout=2.0, kwargs={"a": 1})
    assert face.calls == [Utility("collective_rpc", ("check_health", None, [], {"a": 1}), 2.0)]


@pytest.mark.parametrize(
    ("method", "answers", "one"),
    [
        ("wake_up", [True, False], False),
        ("is_sleeping", [True, True], True),
        ("collective_rpc", [[1], [2, 3]], [1, 2, 3]),
        ("get_weight_version", ["default", "default"], "default"),
        ("no_verb_of_a_core", [7], 7),
    ],
)
def test_several_answers_become_one(method, answers, one):
    assert combined(Utility(method), answers) == one


def test_what_has_effects_on_workers_is_not_sent_twice():
    of_updates = {
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
        *("update_weights", "prepare_weight_update", "commit_weight_update"),
    }
    others = {"collective_rpc", "profile", "hand_over"}
    assert set(UTILITIES) - REPEATABLE == others | of_updates
