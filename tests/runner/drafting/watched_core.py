"""A core whose drafts are watched, and requests for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quire import SamplingParams
from quire.engine.wire.messages import EngineCoreRequest
from quire.runner.drafting.pace import FixedPace
from tests.runner.late_engines import open_core

K = 3


@dataclass
class Watched:
    """What a drafter did: (known ids, drafts) of each row after each step, the tokens of each pass,
    and counts.
    """

    guesses: list = field(default_factory=list)
    sizes: list = field(default_factory=list)
    num_drafts: int = 0
    num_right: int = 0


def open_with(folder, draft, method, *, count=K, late_seed=None, pace=None, **wishes):
    """A core with drafts of up to `count` tokens, and what its drafter does. `draft` None: the
    folder of the model is the draft's. `pace` None: as many drafts as there may be.
    """
    config = {"method": method, "num_speculative_tokens": count}
    if draft is not None:
        config["model"] = str(draft)
    core, _ = open_core(folder, late_seed=late_seed, speculative_config=config, **wishes)
    drafting = core.executor.worker.model_runner.heads.of(SamplingParams()).drafting
    drafting.pace = pace or FixedPace(count)
    watched, propose = Watched(), drafting.drafter.propose

    run = getattr(drafting.drafter, "_run", None)

    def watch_pass(rows, way, plan, states):
        watched.sizes.append(plan.num_tokens)
        return run(rows, way, plan, states)

    if run is not None:
        drafting.drafter._run = watch_pass

    def watch(rows, step):
        watched.num_drafts += int(step.drafts.sum())
        watched.num_right += sum(len(new) - 1 for new in step.new_tokens)
        counts = propose(rows, step)
        for row, n in zip(step.sampled, counts, strict=True):
            known = int(rows.num_tokens[row])
            ids = rows.token_ids[row].tolist()
            watched.guesses.append((ids[:known], ids[known : known + n]))
        return counts

    drafting.drafter.propose = watch
    return core, watched


def serve(core, life, **keywords):
    found = life.run(core, **keywords)
    core.shutdown()
    return found


def assert_same(found, right, life):
    for handle in set(range(life.num_requests)) - set(life.aborted):
        assert found.tokens.get(handle) == right.tokens.get(handle)
        assert found.ends.get(handle) == right.ends.get(handle)
        assert found.logprobs.get(handle) == right.logprobs.get(handle)
        assert found.prompts.get(handle) == right.prompts.get(handle)


def requests(vocab):
    """Greedy requests whose prompts take several chunks, and share a cached beginning."""
    draw = torch.Generator().manual_seed(5)
    start = torch.randint(5, vocab, (16,), generator=draw).tolist()
    for handle, (cached, own) in enumerate([(0, 21), (16, 5), (16, 9), (0, 3), (8, 17)]):
        prompt = start[:cached] + torch.randint(5, vocab, (own,), generator=draw).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        yield EngineCoreRequest(handle, prompt, params, seed=handle, arrival_time=0.0)


def run_requests(core, vocab, *, together):
    waiting = list(requests(vocab))
    while waiting or core.has_work:
        if waiting and (together or not core.has_work):
            core.add_request(waiting.pop(0))
        core.step()
    core.shutdown()
