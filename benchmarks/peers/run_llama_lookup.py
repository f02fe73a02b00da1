"""llama.cpp through `Llama.generate` of llama-cpp-python, one prompt after the other, greedy, with
LlamaPromptLookupDecoding where drafts are asked for; the kind is bf16.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Generate, serve
from run_llama_cpp import find_weights


def open_engine(request: dict[str, Any]) -> Generate:
    """A context for one prompt, on all threads."""
    drafts = request["speculative_config"]
    model = Llama(
        str(find_weights(Path(request["model"]), Path(request["cache"]), request)),
        n_ctx=request["max_len"],
        n_batch=request["max_len"],
        n_threads=request["num_threads"],
        n_threads_batch=request["num_threads"],
        draft_model=drafts
        and LlamaPromptLookupDecoding(
            max_ngram_size=drafts["prompt_lookup_max"],
            num_pred_tokens=drafts["num_speculative_tokens"],
        ),
        verbose=False,
    )

    def generate(prompts: list[list[int]], length: int) -> tuple[list[list[int]], None]:
        outputs = []
        for ids in prompts:
            model.reset()  # what is left of the prompt before may begin like this one
            outputs.append(list(islice(model.generate(ids, temp=0.0), length)))
        return outputs, None

    return generate


if __name__ == "__main__":
    serve(open_engine)
