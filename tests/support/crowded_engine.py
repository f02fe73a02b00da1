"""Requests that crowd an engine, and what an oracle would have answered."""

import torch

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest


def prompts():
    """Eight prompts that share prefixes of whole and of partial blocks."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, 96, (40,), generator=generator).tolist()
    lengths = (20, 20, 17, 13, 9, 5, 4, 1)
    heads = (20, 16, 12, 8, 8, 3, 0, 0)
    return [
        drawn[:head] + drawn[20 + i : 20 + i + length - head]
        for i, (length, head) in enumerate(zip(lengths, heads, strict=True))
    ]


def run(core, requests, preempt_every=None):
    """Tokens of every request and their log-probabilities, run together to the end."""
    steps = 0
    outputs = {handle: [] for handle in requests}
    for handle, (ids, params) in requests.items():
        core.add_request(EngineCoreRequest(handle, ids, params, seed=handle, arrival_time=0.0))
    while core.has_work:
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            perform(core, "reset_prefix_cache", (True,))
        out = core.step()
        for i, (handle, token) in enumerate(zip(out.handles, out.token_ids, strict=True)):
            place = out.logprobs.index.index(i)
            outputs[handle].append((token, float(out.logprobs.values[place, 0])))
        assert all(str(end.reason) == "length" for end in out.finished), out.finished
    return outputs


def engine(folder, **args):
    plan = make_plan(
        EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", block_size=4, **args
        )
    )
    return build_core(plan)


def greedy_after(ask, prompt, output):
    """The likeliest token at each position of `output`, given what is before it, and its
    log-probability.

    If these are the output's own tokens, greedy decoding from the prompt gives just this output.
    """
    logits = ask(torch.tensor(prompt + output[:-1]))[len(prompt) - 1 :]
    chances, likeliest = logits.log_softmax(-1).max(-1)
    return likeliest.tolist(), chances
