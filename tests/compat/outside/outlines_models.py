"""outlines over an `LLM`: free text, a choice, a schema, an expression, several prompts at once."""

import re
import sys
from typing import Literal

import outlines
from outlines.types import Regex
from pydantic import BaseModel
from vllm import LLM, SamplingParams


class Person(BaseModel):
    name: str
    age: int


if __name__ == "__main__":
    model = outlines.from_vllm_offline(LLM(sys.argv[1], max_model_len=1024))
    long = SamplingParams(max_tokens=200, temperature=0)
    assert model("Say something.", sampling_params=long)
    assert model("Yes or no?", Literal["yes", "no"]) in ("yes", "no")
    Person.model_validate_json(model("A person:", Person, sampling_params=long))
    assert re.fullmatch("[0-9]{3}", model("A number:", Regex("[0-9]{3}")))
    chosen = model.batch(["a", "b"], Literal["yes", "no"])
    assert len(chosen) == 2 and all(text in ("yes", "no") for (text,) in chosen)
    assert len(model("two", sampling_params=SamplingParams(n=2, max_tokens=5))) == 2
