"""LangChain's `VLLM`: invoke, batch, stop, a chain."""

import sys

from langchain_community.llms import VLLM
from langchain_core.prompts import PromptTemplate

if __name__ == "__main__":
    llm = VLLM(
        model=sys.argv[1], trust_remote_code=True, max_new_tokens=16, top_k=10, top_p=0.95,
        temperature=0.8, vllm_kwargs={"seed": 1, "max_model_len": 1024},
    )  # fmt: skip
    assert llm.invoke("def fibonacci(n):")
    assert len(llm.batch(["a", "b"])) == 2
    for (generation,) in llm.generate(["import os", "class A:"], stop=["\n"]).generations:
        assert "\n" not in generation.text
    assert isinstance((PromptTemplate.from_template("{q}?") | llm).invoke({"q": "why"}), str)
