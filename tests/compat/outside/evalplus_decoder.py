"""evalplus' decoder for vLLM."""

import sys

from evalplus.provider.vllm import VllmDecoder

if __name__ == "__main__":
    decoder = VllmDecoder(
        name=sys.argv[1], dataset="humaneval", tensor_parallel_size=1, batch_size=2,
        temperature=0.8, max_new_tokens=32, force_base_prompt=True,
    )  # fmt: skip
    assert len(decoder.codegen("def add(a, b):\n", do_sample=True, num_samples=2)) == 2
