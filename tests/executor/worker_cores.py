"""Cores on one worker or on several of one process, and the requests that they serve."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire import EngineArgs, SamplingParams
from quire.engine.core.builder import core_over, worker_config
from quire.engine.wire.messages import EngineCoreRequest
from quire.executor.uniproc import open_uniproc
from quire.step.columns import PooledOutput, PromptLogprobs, RoutedExperts
from tests.support.output_parts import of_kind
from tests.support.simulation import invariants

WISHES = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 4,
    "num_gpu_blocks_override": 60, "dtype": "float32", "device": "cpu", "cpu_threads": 2,
}  # fmt: skip


def plan_of(folder, **wishes):
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **WISHES | wishes)
    return args.create_engine_config()


def open_core(folder, num_workers, **wishes):
    plan = plan_of(folder, **wishes)
    return core_over(plan, open_uniproc(worker_config(plan), num_workers=num_workers))


KINDS = (
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.1, "top_k": 20, "min_p": 0.02},
)


def requests(count=7, max_tokens=9):
    """Greedy and drawn, with prompts shorter and longer than a step."""
    draw = np.random.default_rng(5)
    return [
        EngineCoreRequest(
            handle,
            draw.integers(10, 250, int(draw.integers(2, 30))).tolist(),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, **KINDS[handle % len(KINDS)]),
            seed=handle,
            arrival_time=0.0,
        )
        for handle in range(count)
    ]


@dataclass
class Served:
    """Tokens, log-probabilities in the order of the tokens, pooled prompts, recorded experts by
    position, and endings, by handle; how many drafts were right, and how often a request lost its
    row.
    """

    tokens: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    prompts: dict = field(default_factory=dict)
    pooled: dict = field(default_factory=dict)
    experts: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    num_accepted: int = 0
    num_preemptions: int = 0


def serve(core, given=None):
    """A new request every other step, until all have ended."""
    found, coming, step = Served(), list(requests() if given is None else given), 0
    while coming or core.has_work:
        if coming and step % 2 == 0:
            core.add_request(coming.pop(0))
        step += 1
        out = core.step()
        invariants.check(core.scheduler)
        counts = out.counts or [1] * len(out.handles)
        handles = [h for h, n in zip(out.handles, counts, strict=True) for _ in range(n)]
        found.num_accepted += len(handles) - len(out.handles)
        for handle, token in zip(handles, out.token_ids, strict=True):
            found.tokens.setdefault(handle, []).append(token)
        if out.logprobs is not None:
            columns = zip(out.logprobs.index, out.logprobs.values, out.logprobs.counts, strict=True)
            for place, values, count in columns:
                found.logprobs.setdefault(handles[place], []).append(values[:count])
        found.prompts |= {one.handle: one.values for one in of_kind(PromptLogprobs, out)}
        found.pooled |= {one.handle: one.values for one in of_kind(PooledOutput, out)}
        for one in of_kind(RoutedExperts, out):
            of_tokens = enumerate(one.values.tolist(), one.first)
            found.experts.setdefault(one.handle, {}).update(of_tokens)
        found.ends |= {one.handle: one for one in out.finished}
    invariants.check_idle(core.scheduler)
    found.num_preemptions = core.scheduler.counters.num_preemptions
    return found


def same_bits(one, other):
    """Whether tokens, log-probabilities and what was pooled are equal to the last bit, and the
    recorded experts.
    """
    return (one.tokens, one.experts) == (other.tokens, other.experts) and all(
        mine.keys() == theirs.keys()
        and all(np.array_equal(mine[handle], theirs[handle]) for handle in mine)
        for mine, theirs in (
            (one.logprobs, other.logprobs),
            (one.prompts, other.prompts),
            (one.pooled, other.pooled),
        )
    )
