"""The second ask of a long prompt whose K/V the pool has no more: from host memory, from files,
from another engine, and computed; what a tier costs prompts that nobody has asked before; the
throughput of prompts that come in turn, three times as many as the pool has room for; and the time
from a core's death to the next token.

One engine has a tier and another one has none; they take turns, so that the machine's moods hit
both. Times are those to the first token. Files are read by an engine that was started anew, after
the kernel was told to drop them, and by another one, from the page cache.

    PYTHONPATH=src:. python -m benchmarks.kv_tiers [--only second-ask,peer,working-set,death]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kv_tier_kills import Crowd
from quire.bench.report import add_output_flag, conclude
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import build_core
from quire.engine.core.core import EngineCore
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.testing.checkpoints import make_checkpoint

PARTS = ("second-ask", "peer", "working-set", "death")
_OUTPUT = 16
_MOST_OVERHEAD = 0.02


class Asked:
    """A core, and the seconds of what it is asked."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._handle = 0

    def __call__(self, ids: list[int], extra: dict[str, Any] | None = None) -> tuple[float, float]:
        """Seconds to the first token, and to the last."""
        self._handle += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True, extra_args=extra
        )
        start, first = time.perf_counter(), 0.0
        self.core.add_request(EngineCoreRequest(self._handle, ids, params, 0, 0.0))
        while self._handle in self.core.scheduler.requests:
            if self.core.step().handles and not first:
                first = time.perf_counter() - start
        last = time.perf_counter() - start
        while self.core.has_work:
            self.core.step()  # stores end
        return first, last

    @property
    def hits(self) -> int:
        """Tokens that were loaded."""
        return self.core.scheduler.counters.external_hits


def tier(args: argparse.Namespace, folder: Path | None = None) -> dict[str, Any]:
    """The settings of a tier of memory, and of files where a folder is given."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": int(args.host_gib * 2**30)}
    if folder is not None:
        extra["spec_name"] = "TieringOffloadingSpec"
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder)}]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def open_engine(
    model: Path, num_tokens: int, config: dict[str, Any] | None = None, room: int = 1
) -> Asked:
    """An engine whose pool has room for so many prompts of `num_tokens`, with a connector or
    without.
    """
    length = num_tokens + _OUTPUT
    options = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=room,
        num_gpu_blocks_override=2 + room * -(-length // 32),
        kv_transfer_config=config,
    )
    core = build_core(make_plan(options))
    tiers = [each for each in core.features if hasattr(each, "is_opening")]
    while any(each.is_opening for each in tiers):
        core.step()
        time.sleep(0.05)
    return Asked(core)


def from_a_peer(model: Path, ids: list[int]) -> tuple[float, int]:
    """Seconds to the first token of a prompt that another engine has computed, and how many of its
    tokens were pulled.
    """
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"port": 0, "kv_lease_pool_share": 1.0},
    }
    first, second = (open_engine(model, len(ids), config) for _ in range(2))
    params: dict[str, Any] = {}
    asked = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
    )
    first.core.add_request(EngineCoreRequest(1, ids, asked, 0, 0.0))
    while 1 in first.core.scheduler.requests:
        for part in first.core.step().parts:
            params = part.params
    is_over = threading.Event()

    def turn() -> None:  # it serves in a thread of its own, and is told that leases have ended
        while not is_over.wait(0.05):
            first.core.step()

    other = threading.Thread(target=turn)
    other.start()
    taken = second(ids, {"kv_transfer_params": params})[0]
    is_over.set()
    other.join()
    hits = second.hits
    for each in (first, second):
        each.core.shutdown()
    return taken, hits


def working_set(model: Path, args: argparse.Namespace, config: dict[str, Any] | None) -> float:
    """Prompt tokens in a second of prompts that come in turn, three times as many as the pool has
    room for.
    """
    asked = open_engine(model, args.set_tokens, config, room=3)
    draw = random.Random(2)
    prompts = [[draw.randrange(10, 900) for _ in range(args.set_tokens)] for _ in range(9)]
    for ids in prompts:
        asked(ids)
    start = time.perf_counter()
    for ids in prompts:
        asked(ids)
    took = time.perf_counter() - start
    asked.core.shutdown()
    return len(prompts) * args.set_tokens / took


async def after_a_death(
    model: Path, args: argparse.Namespace, config: dict[str, Any] | None
) -> tuple[float, int]:
    """Seconds from the death of a core, which generates from a long prompt, to the next token, and
    the bytes that its next life has loaded.
    """
    crowd = Crowd(1, config, args.death_tokens, model=str(model), skip_tokenizer_init=True)
    sent: list[float] = []

    def kill() -> None:
        sent.append(time.monotonic())
        crowd.core().kill()

    crowd.client.watch(dies=True)
    crowd.at(8, kill)
    [(ids, reason)] = await crowd.run()
    assert reason == "length", "the stream goes on"
    await crowd.ask_once()  # the counts of the last steps come with others
    resumed, loaded = crowd.client.resumed_at, crowd.client.loaded
    crowd.engine.shutdown()
    assert resumed is not None and len(ids) > 8, "a new core has answered"
    return resumed - sent[0], loaded


def drop_from_page_cache(folder: Path) -> None:
    """Tell the kernel that the files are not read again."""
    for file in folder.rglob("*.kv"):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def second_ask(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A prompt from everywhere that a tier has it, and the overhead of prompts without hits."""
    draw = random.Random(1)
    config = tier(args, folder)
    plain, tiered = open_engine(model, args.tokens), open_engine(model, args.tokens, config)
    ids = [draw.randrange(10, 900) for _ in range(args.tokens)]
    computed = [plain(ids)[0], tiered(ids)[0]]
    on, off, cpu_on, cpu_off = [], [], [], []
    for _ in range(args.rounds):  # which push the prompt out of the pool, too
        fresh = [draw.randrange(10, 900) for _ in range(-(-args.tokens // args.rounds))]
        before = time.process_time()
        off.append(plain(fresh)[1])
        between = time.process_time()
        on.append(tiered(fresh)[1])
        cpu_off.append(between - before)
        cpu_on.append(time.process_time() - between)
    plain.core.shutdown()
    memory, hits = tiered(ids)[0], [tiered.hits]
    tiered.core.shutdown()
    drop_from_page_cache(folder)
    files = []
    for _ in range(2):
        asked = open_engine(model, args.tokens, config)
        files.append(asked(ids)[0])
        hits.append(asked.hits)
        asked.core.shutdown()
    return {
        "tokens": args.tokens,
        "computed_s": round(min(computed), 3),
        "from_memory_s": round(memory, 3),
        "from_files_s": round(files[0], 3),
        "from_files_in_page_cache_s": round(files[1], 3),
        "loaded_tokens": hits,
        "overhead": round(median(on) / median(off) - 1, 4),
        "processor_time_overhead": round(median(cpu_on) / median(cpu_off) - 1, 4),
    }


def measured(part: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a part."""
    if part == "second-ask":
        return second_ask(model, folder, args)
    if part == "peer":
        draw = random.Random(1)
        ids = [draw.randrange(10, 900) for _ in range(args.tokens)]
        seconds, hits = from_a_peer(model, ids)
        return {"from_a_peer_s": round(seconds, 3), "pulled_tokens": hits}
    if part == "working-set":
        without, with_tier = (working_set(model, args, each) for each in (None, tier(args)))
        return {
            "prompts_of": args.set_tokens,
            "tokens_per_s_without_a_tier": round(without),
            "tokens_per_s_with_a_tier": round(with_tier),
        }
    (without, _), (with_tier, loaded) = (
        asyncio.run(after_a_death(model, args, each)) for each in (None, tier(args))
    )
    return {
        "prompt_of": args.death_tokens,
        "death_to_token_without_a_tier_s": round(without, 2),
        "death_to_token_with_a_tier_s": round(with_tier, 2),
        "loaded_after_death_mib": round(loaded / 2**20),
    }


def failures_of(figures: dict[str, Any], tokens: int) -> list[str]:
    """What is not as it has to be."""
    found = []
    hits = [*figures.get("loaded_tokens", []), figures.get("pulled_tokens", tokens)]
    if min(hits) < 0.95 * tokens:
        found.append(f"K/V was not loaded: {hits} tokens")
    if figures.get("overhead", 0.0) > _MOST_OVERHEAD:
        found.append(f"a tier without hits costs {figures['overhead']:.1%}")
    for name, is_better in (("tokens_per_s", max), ("death_to_token", min)):
        pair = [v for key, v in figures.items() if key.startswith(name)]
        if pair and is_better(pair) != pair[1]:
            found.append(f"{name}: {pair[0]} without a tier and {pair[1]} with one")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--host-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=4, help="fresh prompts for the overhead")
    parser.add_argument("--set-tokens", type=int, default=512, help="of a prompt of the set")
    parser.add_argument("--death-tokens", type=int, default=2000, help="of the prompt of a stream")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    add_output_flag(parser)
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    figures: dict[str, Any] = {"shape": args.shape}
    with tempfile.TemporaryDirectory() as name:
        os.environ["QUIRE_CACHE_DIR"] = str(Path(name) / "cache")
        model = make_checkpoint(Path(name) / "model", args.shape)
        for part in args.only.split(","):
            found = measured(part, model, Path(name) / "kv", args)
            print(part, found, flush=True)
            figures |= found
    return conclude(figures, failures_of(figures, args.tokens), args.output_json)


if __name__ == "__main__":
    sys.exit(main())
