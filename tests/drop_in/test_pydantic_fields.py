"""Programs have our values as fields of pydantic's models."""

import pydantic
import pytest

from quire import PoolingParams, PromptType, SamplingParams


class Asked(pydantic.BaseModel):
    params: SamplingParams
    pooling: PoolingParams | None = None
    prompt: PromptType | None = None


def test_an_instance_stays_itself_and_a_mapping_becomes_one():
    params = SamplingParams(n=2, stop="x")
    assert Asked(params=params).params is params
    assert Asked(params={"n": 2, "stop": "x"}).params == params
    assert Asked(params=params, pooling={"dimensions": 8}).pooling == PoolingParams(dimensions=8)
    assert Asked(params=params, prompt={"prompt_token_ids": [3, 4]}).prompt == {
        "prompt_token_ids": [3, 4]
    }


def test_what_the_parameters_refuse_is_an_error_of_validation():
    with pytest.raises(pydantic.ValidationError, match="n=0 is not allowed"):
        Asked(params={"n": 0})
    with pytest.raises(pydantic.ValidationError, match="no_such_field"):
        Asked(params={"no_such_field": 0})


def test_dumps_are_read_again():
    asked = Asked(params=SamplingParams(n=2, top_k=4), prompt="a")
    assert Asked.model_validate_json(asked.model_dump_json()).params == asked.params
    assert asked.model_dump()["params"]["top_k"] == 4


def test_the_schema_names_the_fields():
    schema = Asked.model_json_schema()
    params = schema["properties"]["params"]["properties"]
    assert {"n", "temperature", "structured_outputs"} <= params.keys()
    assert not [name for name in params if name.startswith("_")]
    assert "$ref" not in str(params)
