"""The mailbox of a request by itself: what merges, what replaces, who is woken."""

import asyncio

import pytest

from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import RequestOutputKind
from tests.engine.frontend.async_engines import looped

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


class Completion:
    """A completion that gives each of its tokens once."""

    def __init__(self, index, *token_ids):
        self.handle = index
        self.is_ended = False
        self.token_ids = list(token_ids)

    def news(self):
        ids, self.token_ids = self.token_ids, []
        return output(self.handle, ids)


def output(index, ids, finished=False):
    return RequestOutput("r", None, [1], None, [CompletionOutput(index, "", ids)], finished)


def seen(found):
    return {completion.index: completion.token_ids for completion in found.outputs}


def mailbox(kind=DELTA):
    return RequestOutputCollector(kind, "r-1", "r")


def test_news_of_several_completions_come_together():
    box = mailbox()
    first, second = Completion(0, 5), Completion(1, 7)
    box.note(first)
    box.note(second)
    first.token_ids.append(6)
    box.note(first)
    assert seen(box.get_nowait()) == {0: [5, 6], 1: [7]}
    assert box.get_nowait() is None


@pytest.mark.parametrize(("kind", "ids"), [(DELTA, [5, 6]), (CUMULATIVE, [6])], ids=str)
def test_outputs_join_or_replace_and_the_last_one_ends_it(kind, ids):
    box = mailbox(kind)
    box.put(output(0, [5]))
    box.put(output(0, [6], finished=True))
    found = box.get_nowait()
    assert seen(found) == {0: ids} and found.finished


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE], ids=str)
def test_what_the_last_output_alone_says_is_kept(kind):
    box, last = mailbox(kind), output(0, [6], finished=True)
    last.kv_transfer_params = {"hidden_states_path": "file"}
    last.outputs[0].spec_decode_metrics = last.outputs[0].routed_experts = [1]
    box.put(output(0, [5]))
    box.put(last)
    found = box.get_nowait()
    assert found.kv_transfer_params == {"hidden_states_path": "file"}
    assert found.outputs[0].spec_decode_metrics == found.outputs[0].routed_experts == [1]


def test_a_completion_that_ended_since_has_said_all_in_its_last_output():
    box = mailbox()
    ended = Completion(0, 5)
    box.note(ended)
    ended.is_ended = True
    box.put(output(0, [5], finished=True))
    assert seen(box.get_nowait()) == {0: [5]}


def test_an_error_takes_the_place_of_everything():
    box = mailbox()
    box.put(output(0, [5]))
    box.put(LookupError("gone"))
    for _ in range(2):
        with pytest.raises(LookupError):
            box.get_nowait()


def test_a_closed_one_keeps_nothing():
    box = mailbox()
    box.note(Completion(0, 5))
    box.close()
    box.note(Completion(1, 5))
    box.put(output(0, [5]))
    assert box.get_nowait() is None


@looped
async def test_a_waiting_consumer_is_woken_by_news_outputs_and_errors():
    box = mailbox()
    loop = asyncio.get_running_loop()
    loop.call_soon(box.note, Completion(0, 5))
    assert seen(await box.get()) == {0: [5]}
    loop.call_soon(box.put, output(0, [6]))
    assert seen(await box.get()) == {0: [6]}
    loop.call_soon(box.put, LookupError("gone"))
    with pytest.raises(LookupError):
        await box.get()
