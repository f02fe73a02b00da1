"""Outputs with a form: JSON by a schema, a regular expression, a choice, a grammar."""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["novel", "essay", "play"]}, "maxItems": 2},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputsParams(json=BOOK),
    "regex": StructuredOutputsParams(regex=r"v\d{1,2}\.\d{1,2}\.\d{1,2}(-rc\d)?"),
    "choice": StructuredOutputsParams(choice=["positive", "neutral", "negative"]),
    "grammar": StructuredOutputsParams(
        grammar='start: call\ncall: NAME "(" (call ("," call)~0..1)? ")"\nNAME: /[a-z]{2,8}/\n'
    ),
}

with LLM() as llm:
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=80, structured_outputs=form)
        for form in FORMS.values()
    ]
    outputs = llm.generate(["# An entry of the library\nentry = "] * len(params), params)
    for name, output in zip(FORMS, outputs, strict=True):
        completion = output.outputs[0]
        print(f"{name:8} {completion.finish_reason:7} {completion.text}")
    print(json.loads(outputs[0].outputs[0].text)["year"])
