"""Answer the same prompt with the embedded model and with two small adapters of it, in one batch.

The adapters are those of the tests, which PEFT has trained; `tools/train_adapters.py` makes them.
"""

from pathlib import Path

from quire import LLM, LoRARequest, SamplingParams

folder = Path(__file__).parents[1] / "tests" / "lora" / "adapters"
adapters = [
    None,
    LoRARequest("shout", 1, folder / "shout"),
    LoRARequest("comment", 2, folder / "comment"),
]
params = SamplingParams(temperature=0.0, max_tokens=24)

with LLM(enable_lora=True, max_loras=2) as llm:
    outputs = llm.generate(["def add(a, b):"] * 3, params, lora_request=adapters, use_tqdm=False)

for output in outputs:
    name = "the model" if output.lora_request is None else output.lora_request.lora_name
    print(f"--- {name}\n{output.prompt}{output.outputs[0].text}")
