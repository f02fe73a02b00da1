"""Engine cores over a tiny model, at depth 1 on the CPU and at depth 2 on a device that is late."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from quire import EngineArgs, SamplingParams
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import EngineError
from quire.executor.platform import Platform
from quire.ops import select
from quire.runner.devices.stream_device import StreamDevice
from quire.runner.forward.forward import EagerForward
from quire.step.columns import PromptLogprobs
from tests.support.late_driver import LateDriver
from tests.support.output_parts import of_kind
from tests.support.simulation import invariants

EOS = 7


def plain_ops():
    return select(device="cpu", dtype=torch.float32, providers=["torch"])


WISHES = {
    "max_num_seqs": 5, "max_num_batched_tokens": 12, "max_model_len": 48, "block_size": 4,
    "dtype": "float32", "seed": 1,
}  # fmt: skip


def plan_of(folder, **wishes):
    defaults = WISHES | {"num_gpu_blocks_override": 30, "enforce_eager": True, "device": "cpu"}
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, **defaults | wishes)
    return args.create_engine_config()


def late_target(seed, arena_bytes=1 << 14):
    driver = LateDriver(seed)
    device = StreamDevice(driver, arena_bytes=arena_bytes)
    return Platform(device, plain_ops(), _run_eagerly, driver=driver), driver


def _run_eagerly(model, *_):
    return EagerForward(model)


def open_core(folder, *, late_seed=None, offload=None, **wishes):
    """Depth 2 on a late device, from which weights may be offloaded, or depth 1 on the CPU."""
    if late_seed is None:
        return build_core(plan_of(folder, **wishes)), None
    target, driver = late_target(late_seed)
    plan = plan_of(folder, async_scheduling=True, **wishes)
    return build_core(plan.changed(offload=offload), target), driver


def tokens(core):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    core.add_request(EngineCoreRequest(0, [20, 21, 22], params, seed=0, arrival_time=0.0))
    found = []
    while core.has_work:
        found += core.step().token_ids
    return found


@dataclass
class Life:
    """What is done to a core: requests by the step at which they come, and what disturbs them."""

    seed: int
    num_requests: int = 14
    arrivals: dict[int, int] = field(default_factory=dict)
    requests: list = field(default_factory=list)
    aborted: dict[int, int] = field(default_factory=dict)
    """Handle -> it is aborted when so many of its tokens have come."""

    def __post_init__(self):
        draw = random.Random(self.seed)
        starts = [[draw.randrange(10, 200) for _ in range(8)] for _ in range(2)]
        for handle in range(self.num_requests):
            prompt = draw.choice(starts)[: draw.choice((0, 4, 8))]
            prompt = prompt + [draw.randrange(10, 200) for _ in range(draw.randint(1, 14))]
            if self.requests and draw.random() < 0.3:
                prompt = self.requests[-1].prompt_token_ids  # as of n > 1
            params = self.params(draw, handle)
            self.requests.append(
                EngineCoreRequest(handle, prompt, params, seed=handle, arrival_time=0.0)
            )
            self.arrivals[handle] = draw.randrange(20)
            if draw.random() < 0.2:
                self.aborted[handle] = draw.randint(1, 6)

    def params(self, draw, handle):
        fields = {"max_tokens": draw.choice((1, 2, 7, 18)), "temperature": 0.0}
        fields |= draw.choice(
            (
                {},
                {"temperature": 1.0},
                {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
                {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3},
                {"temperature": 1.3, "frequency_penalty": 1.5},
                {"min_tokens": 5, "max_tokens": 11, "logit_bias": {EOS: 4.0}},
                {"logprobs": 2, "prompt_logprobs": 1},
                {"temperature": 1.0, "logprobs": 3, "logit_bias": {11: -100.0}},
            )
        )
        is_stuck = draw.random() < 0.1  # no token can be drawn, which the device finds out
        if is_stuck:
            fields["allowed_token_ids"] = [3]
        params = SamplingParams(**fields)
        if is_stuck:
            params.bad_words, params._bad_words_token_ids = ["3"], [[3]]
        params.update_from_generation_config({}, EOS)
        return params

    def run(self, core, *, disturbed):
        """Tokens, endings, logprobs by handle; `disturbed`: preempt now and then."""
        found = Found()
        draw, step = random.Random(self.seed + 1), 0
        waiting = list(self.requests)
        while waiting or core.has_work:
            for request in [r for r in waiting if self.arrivals[r.handle] <= step]:
                waiting.remove(request)
                core.add_request(request)
            if disturbed and draw.random() < 0.1:
                perform(core, "reset_prefix_cache", (True,))
            found.take(core.step())
            invariants.check(core.scheduler)
            for handle, count in self.aborted.items():
                if len(found.tokens.get(handle, ())) >= count:
                    core.abort_requests([handle])
            step += 1
            if step > 3000:
                raise EngineError("no progress")
        invariants.check_idle(core.scheduler)
        return found


@dataclass
class Found:
    """What came out of a core."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    prompts: dict = field(default_factory=dict)

    def take(self, out):
        counts = out.counts or [1] * len(out.handles)
        handles = [h for h, n in zip(out.handles, counts, strict=True) for _ in range(n)]
        for handle, token in zip(handles, out.token_ids, strict=True):
            self.tokens.setdefault(handle, []).append(token)
        if out.logprobs is not None:
            for m, index in enumerate(out.logprobs.index):
                width = out.logprobs.counts[m]
                entry = (out.logprobs.token_ids[m][:width].tolist(), int(out.logprobs.ranks[m]))
                self.logprobs.setdefault(handles[index], []).append(entry)
        for prompt in of_kind(PromptLogprobs, out):
            self.prompts[prompt.handle] = (prompt.token_ids.tolist(), prompt.ranks.tolist())
        for end in out.finished:
            assert end.handle not in self.ends, "a request ended twice"
            self.ends[end.handle] = (end.reason, end.stop_reason, end.message)
