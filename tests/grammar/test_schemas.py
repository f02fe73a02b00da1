"""Of generated schemas, every output that ended by itself is valid, as `jsonschema` says."""

import json
import os
import re

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidParameter
from quire.params import StructuredOutputsParams
from tests.grammar.schemas import bounded_schema, without_strings

NUM_SCHEMAS = 100
PROMPT = "# The settings as JSON\nsettings = "
TWO_BLANKS = re.compile(r"\s\s")


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=32, max_model_len=1024, disable_log_stats=True) as engine:
        yield engine


def check(schema, completion):
    """Whether the output ended by itself; it is then valid, and not padded with blanks."""
    assert completion.finish_reason in ("stop", "length"), completion.error
    if completion.finish_reason == "length":
        return False
    jsonschema.Draft202012Validator(schema).validate(json.loads(completion.text))
    assert not TWO_BLANKS.search(without_strings(completion.text))
    assert completion.text == completion.text.strip()
    return True


def servable(llm, seeds):
    """The schemas that the library takes, with their parameters."""
    found = []
    for seed in seeds:
        form = StructuredOutputsParams(json=bounded_schema(seed))
        try:
            llm.llm_engine.front_end.inputs.generation._forms.check(form)
        except InvalidParameter:
            continue
        found.append((seed, form))
    return found


def run(llm, seeds):
    found = servable(llm, seeds)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=300, structured_outputs=form)
        for seed, form in found
    ]
    outputs = llm.generate([PROMPT] * len(found), params, use_tqdm=False)
    ended = [
        check(bounded_schema(seed), output.outputs[0])
        for (seed, _), output in zip(found, outputs, strict=True)
    ]
    return len(found), sum(ended)


def test_every_output_that_stops_is_valid(llm):
    num_served, num_ended = run(llm, range(NUM_SCHEMAS))
    assert num_served > 0.95 * NUM_SCHEMAS
    assert num_ended > 0.9 * num_served


@pytest.mark.slow
@pytest.mark.skipif("QUIRE_TEST_MANY" not in os.environ, reason="QUIRE_TEST_MANY=1 runs 1,000")
def test_a_thousand_schemas(llm):
    num_served, num_ended = run(llm, range(1000, 2000))
    print(f"{num_served} schemas served, {num_ended} outputs ended by themselves, all valid")
    assert num_served > 950 and num_ended > 0.9 * num_served
