"""What the model thought of: the likeliest tokens at each place, and of the prompt."""

from quire import LLM, SamplingParams

with LLM() as llm:
    [output] = llm.generate(
        "for i in range(",
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=0),
    )

for place in output.outputs[0].logprobs:
    print("  ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in place.values()))
