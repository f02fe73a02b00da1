"""Continue a few prompts with the embedded model."""

from quire import LLM, SamplingParams

prompts = ["def add(a, b):", "import os\n\n", "class Stack:"]

with LLM() as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48))

for output in outputs:
    print(output.prompt + output.outputs[0].text)
    print("-" * 40)
