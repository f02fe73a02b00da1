"""A prompt as embeddings: between those of its words, one that no word has."""

from pathlib import Path

import torch
from safetensors.torch import load_file

import quire.embedded
from quire import LLM, SamplingParams

table = load_file(Path(quire.embedded.path()) / "model.safetensors")["model.embed_tokens.weight"]
greedy = SamplingParams(temperature=0.0, max_tokens=12)

with LLM(enable_prompt_embeds=True) as llm:
    ids = llm.get_tokenizer().encode("def add(a, b):")
    rows = table[torch.tensor(ids)]
    between = (rows[1] + rows[2]) / 2
    changed = torch.cat([rows[:2], between[None], rows[2:]])
    prompts = [{"prompt_token_ids": ids}, {"prompt_embeds": rows}, {"prompt_embeds": changed}]
    by_ids, by_rows, other = llm.generate(prompts, greedy)

assert by_ids.outputs[0].token_ids == by_rows.outputs[0].token_ids
for output in (by_rows, other):
    print(len(output.prompt_token_ids), repr(output.outputs[0].text))
