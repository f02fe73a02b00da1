"""A core whose pool has room for one prompt, and what it is asked."""

from __future__ import annotations

import random

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.testing import make_checkpoint

BLOCK, PROMPT, OUTPUT = 4, 41, 6
BLOCKS = 14
"""Of the pool: room for one prompt of the working set."""
MIXED = {
    "num_hidden_layers": 4, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


def small_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "llama"
    return make_checkpoint(folder, {"num_hidden_layers": 2}, "llama")


def folders_of(kinds, tmp_path_factory):
    """Gives the folder of each kind, a shape with changes and options, when it is asked for."""
    made = {}

    def folder(name):
        if name not in made:
            shape, changes, _ = kinds[name]
            made[name] = tmp_path_factory.mktemp("model") / shape
            make_checkpoint(made[name], changes, shape)
        return made[name]

    return folder


def open_plan(folder, host_bytes=1 << 22, disk=None, **options):
    args = {
        "dtype": "float32", "block_size": BLOCK, "max_model_len": 52, "max_num_seqs": 2,
        "num_gpu_blocks_override": BLOCKS, "cpu_threads": 1, "device": "cpu",
        "skip_tokenizer_init": True, "enforce_eager": True, "max_num_batched_tokens": 24,
    }  # fmt: skip
    if host_bytes:
        extra = {"cpu_bytes_to_use": host_bytes}
        if disk is not None:
            tier = {"type": "fs", "root_dir": str(disk), "capacity_bytes": 1 << 24}
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        args["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
    return make_plan(EngineArgs(model=str(folder), **args | options))


def open_core(folder, *args, **options):
    return build_core(open_plan(folder, *args, **options))


def prompts(count=3, seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(3, 90) for _ in range(PROMPT)] for _ in range(count)]


def tier_of(core):
    return core.executor.worker.model_runner.transfers


def ids_of(answer):
    return [token for token, _ in answer]


class Ask:
    """Asks a core for the answers of prompts, and counts what its steps compute."""

    def __init__(self, core, logprobs=0):
        self.core, self.computed, self.cached, self.handle = core, 0, [], 0
        self.stats, self.logprobs = [], logprobs
        launch = core.executor.launch

        def counted(plan):
            self.computed += plan.num_tokens
            return launch(plan)

        core.executor.launch = counted

    def __call__(self, ids, salt=None):
        self.handle += 1
        self.add(self.handle, ids, salt)
        return self.run()[self.handle]

    def add(self, handle, ids, salt=None):
        own = SamplingParams(
            temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=self.logprobs
        )
        request = EngineCoreRequest(handle, ids, own, seed=0, arrival_time=0.0, cache_salt=salt)
        self.core.add_request(request)

    def run(self):
        found = {}
        while self.core.has_work:
            out = self.core.step()
            self.stats.append(out.stats)
            self.cached += [start.num_cached_tokens for start in out.started]
            counts = out.counts or [1] * len(out.handles)
            handles = [h for h, n in zip(out.handles, counts, strict=True) for _ in range(n)]
            for i, (handle, token) in enumerate(zip(handles, out.token_ids, strict=True)):
                chance = 0.0
                if out.logprobs is not None:
                    chance = float(out.logprobs.values[list(out.logprobs.index).index(i), 0])
                found.setdefault(handle, []).append((token, chance))
            assert all(str(end.reason) == "length" for end in out.finished), out.finished
        assert self.core.scheduler.transfers is None or self.core.scheduler.memory.pool.usage == 0
        return found

    @property
    def external_hits(self):
        return self.core.scheduler.counters.external_hits


def alone(folder, wanted, **options):
    ask = Ask(open_core(folder, host_bytes=0, enable_prefix_caching=False, **options))
    return [ask(ids) for ids in wanted]


def check_restored(ask, wanted, expected):
    """The prompts, most of which the pool has no more, have the expected answers, and the counts
    say that they were loaded.
    """
    hits, computed, since = ask.external_hits, ask.computed, len(ask.cached)
    assert [ask(ids) for ids in wanted] == expected
    cached = ask.cached[since:]
    hits = ask.external_hits - hits
    assert hits >= len(wanted) * PROMPT // 2 and sum(cached) >= hits
    assert ask.computed - computed == len(wanted) * (PROMPT + OUTPUT - 1) - sum(cached)
