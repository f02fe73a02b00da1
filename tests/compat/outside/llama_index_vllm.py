"""LlamaIndex's `Vllm`: complete and chat."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.vllm import Vllm

if __name__ == "__main__":
    llm = Vllm(
        model=sys.argv[1], trust_remote_code=True, max_new_tokens=16, temperature=0,
        vllm_kwargs={"max_model_len": 1024},
    )  # fmt: skip
    first = llm.complete("def fibonacci(n):").text
    assert first and first == llm.complete("def fibonacci(n):").text
    assert llm.chat([ChatMessage(role="user", content="hello")]).message.content
