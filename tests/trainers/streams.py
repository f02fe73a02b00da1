"""Streams across weight updates, in every pause mode: python -m tests.trainers.streams [ENGINE].

An engine with one core, with one that drafts from the text, with an EAGLE-3 network, and with two
cores runs streams of two completions each while its weights are replaced, once in each mode. The
log-probabilities of each span of tokens are those of a forward by transformers with the weights of
the version that it reports. Where K/V of the old weights stays (`keep` without `clear_cache`, and
without a pause) that forward goes on from the old model's cache. A prompt that is asked for after
an update finds no block of before it, and the second time it finds those of the first.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from quire import AsyncEngineArgs, AsyncLLM, SamplingParams
from quire.testing import make_checkpoint
from tests.runner.drafting.draft_checkpoints import write_eagle3
from tests.trainers.dead_cores import whole_update

SHAPE = {
    "num_hidden_layers": 3, "vocab_size": 384, "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = [3 + i % 11 for i in range(70)]
"""What drafts from the text find something in."""
LENGTH, SEEN = 160, 6
TOLERANCE = 3e-4
MODES = {
    "abort": {"mode": "abort", "clear_cache": True},
    "wait": {"mode": "wait", "clear_cache": True},
    "keep, cache cleared": {"mode": "keep", "clear_cache": True},
    "keep": {"mode": "keep", "clear_cache": False},
    "no pause": None,
}
ENGINES: dict[str, dict[str, Any]] = {
    "one core": {},
    "n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "EAGLE-3": {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 2}},
    "two cores": {"data_parallel_size": 2},
}


class Policies:
    """The weights by version, as an engine and as transformers have them."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._modules = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in folders
        ]
        self.place_of = {"default": 0}
        self.last = "default"

    def next(self) -> tuple[str, Path]:
        """The other weights, under a name that none had."""
        place = 1 - self.place_of[self.last]
        self.last = f"version {len(self.place_of)}"
        self.place_of[self.last] = place
        return self.last, self.folders[place]

    def difference(self, completion: Any, spans: list[Any], keeps_cache: bool) -> float:
        """The largest one from a forward of each span's weights."""
        ids = completion.token_ids
        text = torch.tensor([PROMPT + ids])
        mine = torch.tensor([next(iter(p.values())).logprob for p in completion.logprobs])
        most, cache, at = 0.0, DynamicCache(), 0
        for start, end, version in spans:
            module = self._modules[self.place_of[version]]
            # the last token of a span is the first one whose K/V is of the weights after it
            upto = len(PROMPT) + end - 1
            with torch.no_grad():
                if keeps_cache:
                    logits = module(text[:, at:upto], past_key_values=cache).logits[0]
                else:
                    logits, at = module(text[:, :upto]).logits[0], 0
            first = len(PROMPT) + start - 1 - at
            right = logits[first : first + end - start].log_softmax(-1)
            right = right[range(end - start), ids[start:end]]
            most = max(most, float((mine[start:end] - right).abs().max()))
            at = upto
        return most


async def generated(
    engine: AsyncLLM, name: str, *, n: int = 1, length: int = 4, seen: asyncio.Event | None = None
) -> tuple[list[Any], int]:
    """The completions of a request, and the tokens that it has found."""
    params = SamplingParams(
        n=n, temperature=0.7, max_tokens=length, ignore_eos=True, logprobs=0, seed=len(name)
    )
    found: dict[int, Any] = {}
    async for output in engine.generate({"prompt_token_ids": PROMPT}, params, name):
        # an output has those that have got tokens
        found |= {one.index: one for one in output.outputs}
        counts = [len(one.token_ids) for one in found.values()]
        if seen is not None and len(counts) == n and min(counts) >= SEEN:
            seen.set()
    return [*found.values()], output.num_cached_tokens


async def scene(engine: AsyncLLM, policies: Policies, mode: str, count: int) -> str:
    """Streams, an update, and what follows; returns what is wrong, or an empty text."""
    before = policies.last
    waits = [asyncio.Event() for _ in range(count)]
    running = [
        asyncio.create_task(
            generated(engine, f"{before} {mode} {i}", n=2, length=LENGTH, seen=waits[i])
        )
        for i in range(count)
    ]
    await asyncio.gather(*(each.wait() for each in waits))
    if MODES[mode] is not None:
        await engine.pause_generation(**MODES[mode])
    version, folder = policies.next()
    if MODES[mode] is None:
        await whole_update(engine, folder, version)
        later = asyncio.create_task(generated(engine, f"{version} later"))
    else:
        later = asyncio.create_task(generated(engine, f"{version} later"))  # it waits
        await asyncio.sleep(0)
        await whole_update(engine, folder, version)
        await engine.resume_generation()
    outputs = [found for found, _ in await asyncio.gather(*running)]
    differs = partial(asyncio.to_thread, policies.difference)
    most, wrong, num_spans = 0.0, [], set()
    for output in outputs:
        if len(output) != 2:
            wrong.append(f"{len(output)} completions")
        for one in output:
            spans = [
                tuple(span) for span in one.weight_versions or [(0, len(one.token_ids), before)]
            ]
            versions = [version for *_, version in spans]
            num_spans.add(len(spans))
            goes_on = mode not in ("abort", "wait")
            if versions != [before, version][: 1 + goes_on]:
                wrong.append(f"spans {spans}")
                continue
            if one.finish_reason != ("abort" if mode == "abort" else "length"):
                wrong.append(f"finish reason {one.finish_reason}")
            most = max(most, await differs(one, spans, mode in ("keep", "no pause")))
    after = await later
    again = await asyncio.gather(*(generated(engine, f"{version} again {i}") for i in range(count)))
    for [one], _ in (after, *again):
        spans = [tuple(span) for span in one.weight_versions]
        most = max(most, await differs(one, spans, False))
        if [version for *_, version in spans] != [version]:
            wrong.append(f"later: spans {spans}")
    # with a cleared cache the stream itself computes blocks of the new weights
    if mode != "keep, cache cleared" and after[1]:
        wrong.append(f"{after[1]} tokens of the old weights were found")
    if not max(num_cached for _, num_cached in again):
        wrong.append("no block was found the second time")
    if most > TOLERANCE:
        wrong.append("log-probabilities differ")
    tokens = sum(len(one.token_ids) for output in outputs for one in output)
    print(
        f"  {mode}: {tokens} tokens of {2 * count} completions in {sorted(num_spans)} spans, "
        f"largest difference {most:.1e}; {'; '.join(wrong) or 'right'}",
        flush=True,
    )
    return "; ".join(wrong)


async def play(name: str, base: Path, folders: list[Path]) -> int:
    """All modes with one engine; returns how many were wrong."""
    wishes = dict(ENGINES[name])
    if name == "EAGLE-3":
        drafts = write_eagle3(base / "drafts", folders[0], vocab=80)
        wishes["speculative_config"] = wishes["speculative_config"] | {"model": str(drafts)}
    print(name, flush=True)
    policies = Policies(folders)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(folders[0]), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24,
            max_model_len=256, dtype="float32", weight_transfer_config={"backend": "ipc"},
            block_size=16, **wishes,
        )
    )  # fmt: skip
    count = 4 if name == "two cores" else 1
    try:
        return sum([bool(await scene(engine, policies, mode, count)) for mode in MODES])
    finally:
        engine.shutdown()


async def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as base:
        folders = [
            make_checkpoint(Path(base) / str(s), SHAPE, "llama", s, "float32") for s in (3, 4)
        ]
        failed = sum([await play(name, Path(base), folders) for name in names or ENGINES])
    print("failed:", failed)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(asyncio.wait_for(main(sys.argv[1:]), 230)))
