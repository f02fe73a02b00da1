"""One step's columns, cut into those of each front end: nothing is lost, nothing is mixed up."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.shared_cores.split_outputs import outputs_by_client
from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs, SchedulerStats
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.step.columns import LogprobColumns, PooledOutput, PromptLogprobs
from quire.step.part import VerifiedDrafts

NUM_CLIENTS = 3


def columns(index):
    count = len(index)
    return LogprobColumns(
        index=index,
        token_ids=np.array([[place, -1] for place in index], np.int32).reshape(count, 2),
        values=np.array([[-place, 0] for place in index], np.float32).reshape(count, 2),
        ranks=np.array(index, np.int32),
        counts=[1] * count,
    )


@st.composite
def steps(draw):
    clients = draw(st.lists(st.integers(0, NUM_CLIENTS - 1), max_size=12))
    handles = [(client << CLIENT_SHIFT) + place for place, client in enumerate(clients)]
    counts = draw(st.none() | st.lists(st.integers(0, 3), min_size=len(handles),
                                       max_size=len(handles)))  # fmt: skip
    total = len(handles) if counts is None else sum(counts)
    index = [place for place in range(total) if draw(st.booleans())]
    ended = [handle for handle in handles if draw(st.booleans())]
    arrays = (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32), np.zeros(1, np.int32))
    return EngineCoreOutputs(
        handles=handles,
        token_ids=list(range(total)),
        counts=counts,
        finished=[Finished(handle, FinishReason.STOP) for handle in ended],
        started=[Started(handle, 1, 0.5) for handle in ended],
        parts=[
            *(PromptLogprobs(handle, *arrays) for handle in ended),
            *(PooledOutput(handle, arrays[1][0]) for handle in ended if draw(st.booleans())),
            *(VerifiedDrafts(handle, 3, handle % 4) for handle in handles if draw(st.booleans())),
        ],
        logprobs=columns(index) if draw(st.booleans()) else None,
        stats=SchedulerStats(num_running_reqs=4),
        timestamp=3.5,
        engine_index=2,
        incarnation=5,
    )


def rows(step):
    """What each request is told, by its handle."""
    return {
        int(one.request_id): (
            one.new_token_ids,
            one.finish_reason,
            one.events,
            one.new_prompt_logprobs is not None,
            one.pooling_output is not None,
            one.num_cached_tokens,
            [
                (type(part), getattr(part, "num_accepted", None))
                for part in step.parts
                if part.handle == int(one.request_id)
            ],
            None
            if one.new_logprobs is None
            else (one.new_logprobs.index, one.new_logprobs.token_ids.tolist()),
        )
        for one in step
    }


@settings(deadline=None, max_examples=200)
@given(steps())
def test_each_front_end_gets_its_own_rows(step):
    parts = outputs_by_client(step)
    found = {}
    for client, part in parts.items():
        assert {handle >> CLIENT_SHIFT for handle in rows(part)} <= {client}
        assert (part.engine_index, part.incarnation, part.timestamp) == (2, 5, 3.5)
        found |= rows(part)
    assert found == rows(step)
    is_whole = len(parts) == 1
    assert all(part.stats == (step.stats if is_whole else None) for part in parts.values())
