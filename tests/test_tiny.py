"""Whether it works at all, in a few seconds: `pytest tests/test_tiny.py`.

The embedded model through every large part once: text, a batch, a stream, a form, a vector. What
each part must do in detail is for the tests of that part.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from quire import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=256, max_num_seqs=8) as llm:
        yield llm


def test_a_prompt_alone_and_in_a_batch_has_the_same_text(llm):
    prompts = ["def add(a, b):", "import os\n", "class Stack:"]
    together = [o.outputs[0].text for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    alone = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].text for p in prompts]
    assert together == alone and "Return" in together[0]


def test_a_form_is_kept(llm):
    form = StructuredOutputsParams(regex=r"[0-9]{3}-[a-c]{2}")
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=20, structured_outputs=form)
    [output] = llm.generate("A number:", params, use_tqdm=False)
    assert re.fullmatch(r"[0-9]{3}-[a-c]{2}", output.outputs[0].text)


def test_a_stream_is_the_same_text_in_parts():
    async def streamed():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=256))
        try:
            texts = [
                o.outputs[0].text async for o in engine.generate("def add(a, b):", GREEDY, "1")
            ]
        finally:
            engine.shutdown()
        return texts

    texts = asyncio.run(streamed())
    assert len(texts) > 1 and "Return" in texts[-1]
    assert all(late.startswith(early) for early, late in zip(texts, texts[1:], strict=False))


def test_the_loop_of_docs_life_of_a_request_runs_as_it_stands(capsys):
    page = (ROOT / "docs" / "life_of_a_request.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(code.splitlines()) <= 60
    exec(compile(code, "life_of_a_request.md", "exec"), {})
    said = capsys.readouterr().out
    assert "request 0 ended: LENGTH" in said and "Return" in said
