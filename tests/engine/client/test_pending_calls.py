"""Calls that wait for several cores: one answer, or the error that a core raised."""

import pytest

from quire.engine.client.pending_calls import PendingCalls
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import UtilityOutput
from quire.errors import EngineError, ProfilerAlreadyActive, RequestError


def test_the_answers_are_combined_in_the_order_of_the_cores():
    calls = PendingCalls()
    call_id, future = calls.begin(Utility("collective_rpc", ("rank",)), [0, 1])
    calls.answer(1, UtilityOutput(call_id, None, ["b"]))
    assert not future.done()
    calls.answer(0, UtilityOutput(call_id, None, ["a"]))
    assert future.result(timeout=0) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ProfilerAlreadyActive", ProfilerAlreadyActive),
        ("InvalidParameter", RequestError),
        ("TimeoutError", TimeoutError),
        ("KeyError", EngineError),
    ],
)
def test_an_error_keeps_the_class_that_callers_act_on(name, kind):
    calls = PendingCalls()
    call_id, future = calls.begin(Utility("profile", (True,)), [0])
    calls.answer(0, UtilityOutput(call_id, "why", None, name))
    error = future.exception(timeout=0)
    assert type(error) is kind and str(error) == "why"
