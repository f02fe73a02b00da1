"""TRL's generation in process, with the weights of the folder: `sync_weights` is for later."""

import sys

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    made = VLLMGeneration(
        AutoModelForCausalLM.from_pretrained(sys.argv[1]), Accelerator(cpu=True), tokenizer,
        mode="colocate", max_model_length=512, max_completion_length=12, logprobs=0,
    )  # fmt: skip
    prompts = [tokenizer.encode("def add(a, b):")] * 2 + [tokenizer.encode("class Stack:")] * 2
    given, completions, logprobs, ids = made.generate(prompts, None, 2)
    assert given == prompts and completions[0] != completions[1]
    assert ids == [[[token] for token in row] for row in completions]
    assert all(value <= 0 for row in logprobs for (value,) in row)
    made.temperature = 0.0
    greedy = made.generate(prompts, None, 2)[1]
    assert greedy[0] == greedy[1] != greedy[2]
