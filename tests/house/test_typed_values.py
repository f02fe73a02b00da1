"""Every value that a public method passes to a core is of its declared type before it is queued.

A walk over the signatures of the engine's faces calls each method with hostile values, one argument
at a time. Whatever then reaches the client must be decoded by a core as it was; whatever is refused
must be refused by a request's error and leave nothing queued.
"""

import asyncio
import contextlib
import decimal
import inspect
import io

import numpy as np
import pytest

from quire import LLM, AsyncLLM, LLMEngine, LoRARequest, PoolingParams, SamplingParams
from quire.engine import EngineCore
from quire.engine.frontend.input_processor import InputProcessor, ModelLimits
from quire.engine.frontend.pooling_input import PoolingFacts
from quire.engine.unbuilt import Refused
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.declared_types import argument_types, check_message
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.errors import EngineError, InvalidType
from quire.models.pooling.spec import PoolerSpec
from quire.params.kinds import RequestOutputKind
from quire.processes.codec import MessageDecoder, MessageEncoder
from tests.engine.frontend.async_engines import core_of, make_async
from tests.engine.frontend.scripted_engines import make_engine

HOSTILE = [
    "x", b"x", ["x"], (1,), {"a": 1}, {1: "a"}, decimal.Decimal(1), -1, 0.0, 0.5, float("nan"),
    2**70, True, False, object(), len, np.int64(1), "\ud800", [[1]], SamplingParams(),
]  # fmt: skip
PARAMS = SamplingParams(max_tokens=1)
VALID = {
    "prompts": [[4, 5]], "prompt": [4, 5], "messages": [{"role": "user", "content": "hi"}],
    "params": PARAMS, "sampling_params": PARAMS, "pooling_params": PoolingParams(),
    "request_id": "r", "request_ids": "r", "lora_request": LoRARequest("a", 1, "/a"), "lora_id": 1,
    "method": "check_health", "path": "x", "func": len, "new_data_parallel_size": 1,
    "data_1": "a", "data_2": "b", "has_unfinished": True, "engine_index": 0,
    "request": {"init_info": {}}, "weight_version": "v", "version": "v", "handles": [1],
    "handle": 1, "deliver": print, "message": EngineCoreRequest(handle=1, prompt_token_ids=[1]),
}  # fmt: skip
"""Values for the arguments that must be given."""

STAY_HERE = {
    "chat_template", "chat_template_kwargs", "chat_template_content_format", "tools", "use_tqdm",
    "output_type", "limit_s",
}  # fmt: skip
"""Arguments that the caller's side alone reads; another error than a request's may end the call."""
RUN = {("collective_rpc", "method"), ("apply_model", "func")}
"""Functions, which a core in the caller's process runs: they may raise what they like, and are no
message. Nor are the arguments of workers' methods anything that is known here.
"""


class Wired:
    """A face of an engine on a scripted core, and what its client was given."""

    def __init__(self, kind):
        self.face, self.messages = self._made(kind)
        engine = getattr(self.face, "llm_engine", self.face)
        self.front_end = engine.front_end

    def _made(self, kind):
        def script(request):
            return list(range(10, 60))

        if issubclass(kind, AsyncLLM):
            engine = make_async(script)
            engine.__class__ = kind
            return engine, watched(core_of(engine))
        engine = make_engine(script)
        messages = watched(engine.front_end.client)
        if issubclass(kind, LLM):
            return kind.from_engine(engine), messages
        engine.__class__ = kind
        return engine, messages

    def call(self, name, *args, **kwargs):
        """Call a method and read all that it gives; the error that it ends with, if any."""

        async def run():
            if isinstance(self.face, AsyncLLM):
                self.face._start_handler()
            result = getattr(self.face, name)(*args, **kwargs)
            if inspect.isasyncgen(result):
                async for _ in result:
                    pass
            elif inspect.isawaitable(result):
                await result

        try:
            with contextlib.redirect_stderr(io.StringIO()):
                asyncio.run(asyncio.wait_for(run(), 20))
        except Exception as error:
            return error
        return None


def watched(core):
    """The list to which everything that the core is asked is added."""
    messages = []

    def noting(name):
        original = getattr(core, name)

        def noted(message):
            messages.append(message)
            return original(message)

        return noted

    for name in ("add_request", "abort_requests", "call"):
        setattr(core, name, noting(name))
    return messages


def hole_in(message):
    """Why a core would not get a message as it is; None if it would."""
    try:
        if isinstance(message, Utility):
            argument_types(getattr(EngineCore, message.method)).check(None, *message.args)
            MessageEncoder().encode([*message.args], is_strict=True)
            return None
        kind = EngineCoreRequest if isinstance(message, EngineCoreRequest) else list[int]
        frames = [bytes(frame) for frame in MessageEncoder().encode(message, is_strict=True)]
        arrived = MessageDecoder(kind).decode(frames)
    except (TypeError, ValueError) as error:
        return str(error)
    return None if repr(arrived) == repr(message) else "it arrives as another"


def public_methods(kind):
    """(name, parameters) of what a program can call and give something."""
    for name in dir(kind):
        entry = inspect.getattr_static(kind, name)
        if name.startswith("_") or isinstance(entry, property | classmethod | Refused):
            continue
        if callable(method := getattr(kind, name, None)):
            parameters = list(inspect.signature(method).parameters.values())[1:]
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            yield name, [each for each in parameters if each.kind not in kinds]


def arguments(parameters, name=None, value=None):
    """Arguments of a call: what must be given is valid, and `name` has the value."""
    named = {each.name: VALID[each.name] for each in parameters if each.default is each.empty}
    if name is not None:
        named[name] = value
    only = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
    return [named.pop(each) for each in only], named


def walk(kind, names=None):
    """ "method argument=value: what is wrong" for each hole."""
    wired = Wired(kind)
    for name, parameters in public_methods(kind):
        if not parameters or (names is not None and name not in names):
            continue
        error = wired.call(name, *arguments(parameters)[0], **arguments(parameters)[1])
        if not isinstance(error, EngineError | None):
            yield f"{name}: {type(error).__name__}: {error}"
        wired = Wired(kind)
        for parameter in parameters:
            for value in HOSTILE:
                positional, named = arguments(parameters, parameter.name, value)
                error = wired.call(name, *positional, **named)
                is_run = (name, parameter.name) in RUN or parameter.name in ("args", "kwargs")
                found = None if is_run else next(filter(None, map(hole_in, wired.messages)), None)
                if found is None and error is not None:
                    if wired.front_end.outputs.num_unfinished:
                        found = "something stays queued"
                    elif not (
                        is_run or isinstance(error, EngineError) or parameter.name in STAY_HERE
                    ):
                        found = f"{type(error).__name__}: {error}"
                if found is not None:
                    yield f"{name} {parameter.name}={value!r:.40}: {found}"
                if error is not None or name in ("close", "shutdown") or wired.messages:
                    wired = Wired(kind)


@pytest.mark.parametrize("kind", [LLMEngine, LLM, AsyncLLM])
def test_what_public_methods_pass_to_a_core_is_typed(kind):
    assert list(walk(kind)) == []


class Leaky(LLMEngine):
    """With two holes: what it passes on is not looked at."""

    def add_urgent(self, request_id: str, priority: int = 0) -> None:
        self.front_end.client.add_request(EngineCoreRequest(5, [4], PARAMS, priority=priority))

    def doze(self, level: int = 1) -> None:
        self.front_end.client.call(Utility("sleep", (level, "keep")))

    def keep_waiting(self, request_id: str, count: int = 0) -> None:
        self.add_request(request_id, [4], PARAMS)
        if count:
            raise EngineError("it is too late")


def test_the_walk_finds_planted_holes():
    found = list(walk(Leaky, ("add_urgent", "doze", "keep_waiting", "sleep")))
    named = {line.partition("=")[0] for line in found}
    assert named == {"add_urgent priority", "doze level", "keep_waiting count"}
    assert any("add_urgent priority='x'" in line for line in found)
    assert any("add_urgent priority=0.5" in line for line in found)
    assert any("something stays queued" in line for line in found)


# values inside arguments


def mutable(struct):
    return [name for name in struct.__struct_fields__ if not name.startswith("_")]


def request_with(name, value):
    params = SamplingParams(max_tokens=1)
    setattr(params, name, value)
    return [4, 5], params, None


def pooling_with(name, value):
    params = PoolingParams()
    setattr(params, name, value)
    return [4, 5], params, None


def adapter_with(name, value):
    adapter = LoRARequest("a", 1, "/a")
    setattr(adapter, name, value)
    return [4, 5], SamplingParams(max_tokens=1), adapter


def prompt_with(name, value):
    return {"prompt_token_ids": [4, 5], name: value}, SamplingParams(max_tokens=1), None


LIMITS = ModelLimits(
    1000,
    4096,
    serves_adapters=True,
    pooling=PoolingFacts(PoolerSpec(("embed",), activates=True), 8, "both"),
)
"""Of an engine that generates and pools."""

KEYS = ("prompt", "prompt_token_ids", "cache_salt", "token_type_ids", "multi_modal_data")
INSIDE = [
    *((request_with, name) for name in mutable(SamplingParams)),
    *((pooling_with, name) for name in mutable(PoolingParams)),
    *((adapter_with, name) for name in mutable(LoRARequest)),
    *((prompt_with, name) for name in KEYS),
]


@pytest.mark.parametrize(("make", "name"), INSIDE, ids=lambda each: getattr(each, "__name__", each))
def test_what_arguments_contain_is_typed(make, name):
    for value in HOSTILE:
        wired = Wired(LLMEngine)
        front_end = wired.front_end
        front_end.inputs = InputProcessor(front_end.tokenizer, LIMITS, seed=0)
        prompt, params, adapter = make(name, value)
        error = wired.call("add_request", "r", prompt, params, lora_request=adapter)
        assert error is None or isinstance(error, EngineError), (name, value, error)
        for message in wired.messages:
            # processors and folders of a core in this process may be given more than can be sent
            if name not in ("extra_args", "lora_path"):
                assert hole_in(message) is None, (name, value)


def test_a_message_is_checked_by_the_types_of_its_own_fields():
    good = EngineCoreRequest(1, [1, 2], SamplingParams(stop=["a"], logit_bias={3: 1.0}))
    good.adapter = AdapterRef("a", 1, "/a")
    check_message(good)
    params = good.params
    for struct, name, value in (
        (good, "arrival_time", "x"), (good, "arrival_time", float("nan")), (good, "seed", True),
        (good, "prompt_token_ids", (1,)), (good, "prompt_token_ids", [1, 2.0]),
        (good, "params", None), (good, "adapter", "a"), (good, "resumable", 1),
        (params, "stop", ["a", b"a"]), (params, "logit_bias", {"3": 1.0}),
        (params, "logit_bias", {3: "1"}), (params, "temperature", decimal.Decimal(1)),
        (params, "output_kind", 1), (params, "bad_words", {"a"}), (params, "n", np.int64(1)),
    ):  # fmt: skip
        before = getattr(struct, name)
        setattr(struct, name, value)
        with pytest.raises(ValueError, match=rf"^{name}=.* is not allowed"):
            check_message(good)
        setattr(struct, name, before)
    check_message(good)


def test_arguments_are_checked_by_their_annotations():
    def verb(level: int, mode: RequestOutputKind | None = None, tags: list[str] | None = None):
        raise AssertionError("it is not called")

    types = argument_types(verb)
    types.check(np.int64(3), tags=("a",))
    types.check(level=3, mode=RequestOutputKind.DELTA, tags=["a"])
    for named in (
        {"level": True},
        {"level": 1.0},
        {"level": 1, "mode": 1},
        {"level": 1, "tags": [1]},
    ):
        with pytest.raises(InvalidType):
            types.check(**named)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sign'"):
        types.check(1, sign=2)
