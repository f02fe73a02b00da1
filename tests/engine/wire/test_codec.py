"""What travels between processes: it arrives as it was sent, and nothing else gets in."""

import datetime
import pickle

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.encodable import NotEncodable
from quire.engine.wire import messages
from quire.engine.wire.messages import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    Hello,
    SchedulerStats,
    UtilityOutput,
    UtilityRequest,
    Welcome,
)
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.params import PoolingParams, SamplingParams
from quire.processes.codec import (
    INLINE_BYTES,
    MOST_FRAMES,
    NO_SUBJECT,
    BadMessage,
    MessageDecoder,
    MessageEncoder,
    core_header,
    read_core_header,
)
from quire.processes.functions import FUNCTION
from quire.step.columns import LogprobColumns, PooledOutput, PromptLogprobs, RoutedExperts
from quire.step.media import MediaItem
from quire.step.part import VerifiedDrafts
from quire.step.plan import NewRow, StepPlan

MESSAGES = [
    *(EngineCoreRequest, EngineCoreOutputs, UtilityRequest, UtilityOutput),
    *(Hello, Welcome, EngineCoreReadyResponse),
]


def over_the_wire(message):
    frames = MessageEncoder().encode(message)
    copies = [bytes(frame) for frame in frames]
    return MessageDecoder(type(message)).decode(copies)


def columns(rows, width):
    shape = (rows, width)
    return LogprobColumns(
        index=list(range(rows)),
        token_ids=np.arange(rows * width, dtype=np.int32).reshape(shape),
        values=-np.arange(rows * width, dtype=np.float32).reshape(shape),
        ranks=np.arange(rows, dtype=np.int32),
        counts=[width] * rows,
    )


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
    if isinstance(one, msgspec.Struct):
        fields = one.__struct_fields__
        return all(same(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("rows", [0, 1, 3, 200])
def test_outputs_arrive_as_they_were_sent(rows):
    two = columns(rows, 2)
    outputs = EngineCoreOutputs(
        handles=[7, 1 << 41],
        token_ids=[1, 2, 3],
        counts=[2, 1],
        finished=[Finished(7, FinishReason.STOP, "end"), Finished(8, FinishReason.ERROR, 3, "x")],
        started=[Started(7, 5, 1.5)],
        logprobs=columns(rows, 3),
        parts=[
            PromptLogprobs(7, two.token_ids, two.values, two.ranks),
            *([PooledOutput(8, two.values[:1, 0]), PooledOutput(9, two.values)] if rows else []),
            RoutedExperts(7, 2, np.ones((rows, 1, 2), np.int16)), VerifiedDrafts(7, 3, 1),
        ],
        stats=SchedulerStats(1, 2, 0.5),
        incarnation=4,
        utility_output=UtilityOutput(3, None, {"a": [1, None]}),
    )  # fmt: skip
    assert same(outputs, over_the_wire(outputs))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 50),
    max_tokens=st.integers(1, 500),
    seed=st.none() | st.integers(0, 2**63),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3),
    stop_token_ids=st.none() | st.lists(st.integers(0, 1000), max_size=4),
    logprobs=st.none() | st.integers(0, 5),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    extra_args=st.none() | st.dictionaries(st.text(), st.integers(-9, 9) | st.text(), max_size=3),
    ignore_eos=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(PARAMS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
def test_requests_arrive_as_they_were_sent(params, ids):
    params.update_from_generation_config({"eos_token_id": [5, 6]}, 7)
    request = EngineCoreRequest(3, ids, params, 2**64 - 1, 1.0, -4, "salt", ids[:2])
    assert over_the_wire(request) == request


def test_the_kind_of_a_request_arrives():
    """The two kinds have fields of the same names, so the type itself travels."""
    for params in (SamplingParams(), PoolingParams(), PoolingParams(task="embed", dimensions=8)):
        request = EngineCoreRequest(3, [1, 2], params, 0, 1.0)
        arrived = over_the_wire(request)
        assert arrived == request and type(arrived.params) is type(params)
        kinds = (arrived.sampling_params, arrived.pooling_params)
        assert kinds == ((params, None) if isinstance(params, SamplingParams) else (None, params))


def test_large_arrays_travel_beside_the_message_without_a_copy():
    array = np.arange(INLINE_BYTES, dtype=np.float64)
    frames = MessageEncoder().encode(UtilityOutput(1, None, {"big": array, "small": array[:3]}))
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.float64), array)
    held = [bytes(frame) for frame in frames]
    result = MessageDecoder(UtilityOutput).decode(held).result
    assert np.shares_memory(result["big"], np.frombuffer(held[1], dtype=np.uint8))
    assert (result["big"] == array).all()
    assert (result["small"] == array[:3]).all()
    with pytest.raises(ValueError, match="read-only"):
        result["big"][0] = 1


def test_strided_and_empty_arrays_keep_their_values():
    for array in (np.arange(200).reshape(10, 20)[::2, ::-3], np.zeros((0, 4), np.float32)):
        result = over_the_wire(UtilityOutput(1, None, array)).result
        assert result.shape == array.shape
        assert (result == array).all()


def test_types_of_torch_travel_by_their_names():
    value = ["a", torch.bfloat16, torch.Size([2, 3])]
    assert over_the_wire(UtilityRequest(1, "x", value)).args == ["a", torch.bfloat16, [2, 3]]


def test_what_cannot_travel_is_refused_by_name():
    for value in (
        object(),
        np.array([object()]),
        np.array(["a"]),
        test_what_cannot_travel_is_refused_by_name,
    ):
        with pytest.raises(NotEncodable, match="it has (a|an array of|the function) "):
            MessageEncoder().encode(UtilityOutput(1, None, value))  # fmt: skip


CYCLE = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**70, "has an int of more than 64 bits"), (-(2**64), "has an int of more than 64 bits"),
        ("\ud800", "has a text with a lone surrogate"),
        ({"\udfff": 1}, "has a text with a lone surrogate"),
        (CYCLE, "is nested too deeply, or holds itself"),
        ({"a": [CYCLE]}, "is nested too deeply, or holds itself"),
    ],
    ids=["int", "negative", "text", "key", "cycle", "deep cycle"],
)  # fmt: skip
def test_values_that_have_no_form_are_refused_as_others_are(value, text):
    with pytest.raises(NotEncodable, match=f"^it {text}$"):
        MessageEncoder().encode(UtilityOutput(1, None, [value]), is_strict=True)


def test_a_header_names_what_its_message_is_about():
    header = core_header(b"\x03", 2**63, 1 << 62)
    assert read_core_header(header) == (b"\x03", 2**63, 1 << 62)
    assert read_core_header(core_header(b"\x00", 1)).subject == NO_SUBJECT
    with pytest.raises(BadMessage, match="a header has 17 bytes"):
        read_core_header(header[:-1])


def test_bytes_are_not_a_message_whatever_its_checks_raise(monkeypatch):
    frames = MessageEncoder().encode(EngineCoreRequest(3, [1], SamplingParams()))

    def check(self):
        raise AttributeError("'str' object has no attribute 'items'")

    monkeypatch.setattr(SamplingParams, "validate", check)
    with pytest.raises(BadMessage, match="AttributeError"):
        MessageDecoder(EngineCoreRequest).decode(frames)


def test_a_text_with_a_lone_surrogate_leaves_as_its_escape_or_is_refused():
    outputs = EngineCoreOutputs(
        finished=[Finished(7, FinishReason.ERROR, None, "tensor \udc80")],
        logprobs=columns(200, 3),
        utility_output=UtilityOutput(3, "\ud800"),
    )
    arrived = over_the_wire(outputs)
    assert arrived.finished[0].message == "tensor \\udc80"
    assert arrived.utility_output.failure_message == "\\ud800"
    assert same(arrived.logprobs, outputs.logprobs)
    request = EngineCoreRequest(3, [1], SamplingParams(extra_args={"a": "\ud800"}), 0, 1.0)
    with pytest.raises(NotEncodable, match="lone surrogate"):
        MessageEncoder().encode(request, is_strict=True)


def test_a_message_has_a_bounded_number_of_frames():
    arrays = [np.full(INLINE_BYTES, number % 256, np.uint8) for number in range(3000)]
    frames = MessageEncoder().encode(UtilityOutput(1, None, arrays))
    assert len(frames) == MOST_FRAMES
    assert same(over_the_wire(UtilityOutput(1, None, arrays)).result, arrays)


def deep(levels):
    found = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "result",
    [2**70, deep(900), {"a": object()}, np.array([object()]), {1: {2**64}}],
    ids=["large int", "deep", "object", "array of objects", "in a set"],
)
def test_an_answer_is_made_of_any_result(result):
    arrived = over_the_wire(UtilityOutput.of_result(9, result))
    assert arrived.call_id == 9 and arrived.result is None and arrived.failure_type == "EngineError"
    assert arrived.failure_message.startswith("The result cannot be sent to another process: ")


def test_the_answer_with_a_plain_result_is_the_result():
    result = {"a": [1, None, "é"], "b": np.arange(500)}
    assert same(UtilityOutput.of_result(9, result), UtilityOutput(9, None, result))


def test_a_result_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MOST_RESULT_BYTES", 1000)
    assert UtilityOutput.of_result(9, b"x" * 900).failure_message is None
    for result in (b"x" * 1000, [np.zeros(100)] * 2):
        text = "The result cannot be sent to another process: it has more than 1000 bytes."
        assert UtilityOutput.of_result(9, result).failure_message == text


def array_frame(dtype, shape, place):
    header = msgspec.msgpack.encode((dtype, shape, place))
    return msgspec.msgpack.encode((1, None, msgspec.msgpack.Ext(3, header), ""))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [array_frame("|O", (1,), b"12345678")],
        [array_frame("<f4", (3,), b"1234")],
        [array_frame("<f4", (-1, -4), b"1234" * 4)],
        [array_frame("<f4", (2**62, 4), b"")],
        [array_frame("<f4", (1,) * 70, b"1234")],
        [array_frame("<f4", (1,), 1)],
        [array_frame("<f4", (1,), 0)],
        [array_frame("<f4", (1,), -1), b"1234"],
        [array_frame("<f4, <i4", (1,), b"12345678")],
        [msgspec.msgpack.encode((1, None, msgspec.msgpack.Ext(1, pickle.dumps(print)), ""))],
        [msgspec.msgpack.encode((1, None, msgspec.msgpack.Ext(99, b""), ""))],
        [msgspec.msgpack.encode((1, None, msgspec.msgpack.Ext(5, b"load"), ""))],
        [msgspec.msgpack.encode((1, None, msgspec.msgpack.Ext(5, b"\xff"), ""))],
        [b"\x91" * 10**6],
        [pickle.dumps(UtilityOutput)],
    ],
    ids=range(17),
)
def test_hostile_frames_are_refused(frames):
    with pytest.raises(BadMessage):
        MessageDecoder(UtilityOutput).decode(frames)


def test_functions_come_from_processes_of_the_engine_alone(monkeypatch):
    monkeypatch.setattr("quire.processes.codec.unpack_function", lambda data: len)
    frames = [msgspec.msgpack.encode([msgspec.msgpack.Ext(FUNCTION, b"")])]
    assert MessageDecoder(list).decode(frames) == [len]
    with pytest.raises(BadMessage, match="extension"):
        MessageDecoder(list, takes_functions=False).decode(frames)


def test_an_array_of_another_type_than_the_message_has_is_refused():
    good = columns(2, 3)
    for name in ("token_ids", "values", "ranks"):
        bad = msgspec.structs.replace(good, **{name: getattr(good, name).astype(np.float64)})
        with pytest.raises(BadMessage, match="was expected"):
            over_the_wire(EngineCoreOutputs(logprobs=bad))
    frames = MessageEncoder().encode((0, [], None, [], [], ([0], [1, 2], [0.5], [1], [1])))
    with pytest.raises(BadMessage):
        MessageDecoder(EngineCoreOutputs).decode(frames)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary() | st.datetimes(timezones=st.just(datetime.UTC)),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(MESSAGES), st.lists(st.binary(max_size=80), max_size=3), VALUES, st.data())
def test_no_bytes_do_more_than_be_refused(kind, frames, value, data):
    well_formed = msgspec.msgpack.encode(value)
    cut = data.draw(st.integers(0, len(well_formed)))
    whole = bytes(
        MessageEncoder().encode(EngineCoreOutputs(handles=[1], logprobs=columns(2, 2)))[0]
    )
    end = data.draw(st.integers(0, len(whole)))
    for first in (well_formed, well_formed[:cut], pickle.dumps(value), whole[:end], *frames):
        try:
            message = MessageDecoder(kind).decode([first, *frames])
        except BadMessage:
            continue
        assert isinstance(message, kind)


def test_the_media_of_a_plan_travel_in_frames_of_their_own():
    pixels = np.arange(300.0, dtype=np.float32).reshape(3, 100)
    positions = np.arange(300, dtype=np.int32).reshape(3, 100)
    item = MediaItem(b"a", "image", 4, [(1, 3), (4, 6)], {"pixel_values": pixels}, True)
    new = NewRow(0, 5, [1] * 100, 100, 0, ([1],), SamplingParams(), 0)
    new = msgspec.structs.replace(new, embedded=list(item.spans()), positions=positions)
    plan = StepPlan(1, [], [new], [], [], [], dropped_outputs=[b"b"], encodings=[item])
    frames = MessageEncoder().encode(plan)
    assert len(frames) == 3
    got = MessageDecoder(StepPlan).decode(frames)
    assert got.encodings[0].places == item.places and got.dropped_outputs == [b"b"]
    assert np.array_equal(got.encodings[0].inputs["pixel_values"], pixels)
    (row,) = got.added
    assert np.array_equal(row.positions, positions) and row.embedded == list(item.spans())
