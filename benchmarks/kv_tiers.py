"""The second ask of a long prompt whose K/V the pool has no more: from host memory, from files,
from another engine, and computed again; what a tier costs prompts that nobody has asked before; and
the throughput of prompts that come in turn, three times as many as the pool has room for.

One engine has a tier and another one has none; they take turns, so that the machine's moods hit
both. Times are those to the first token. Files are read by an engine that was started anew, after
the kernel was told to drop them, and by another one, from the page cache.

    PYTHONPATH=src python benchmarks/kv_tiers.py --shape 0.6b --tokens 4000
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from quire.bench.report import add_output_flag, conclude
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import build_core
from quire.engine.core.core import EngineCore
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.testing.checkpoints import make_checkpoint

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
    asked = open_engine(model, args.set_tokens, config, room=4)
    draw = random.Random(2)
    prompts = [[draw.randrange(10, 900) for _ in range(args.set_tokens)] for _ in range(12)]
    for ids in prompts:
        asked(ids)
    start = time.perf_counter()
    for _ in range(2):
        for ids in prompts:
            asked(ids)
    took = time.perf_counter() - start
    asked.core.shutdown()
    return 2 * len(prompts) * args.set_tokens / took


def drop_from_page_cache(folder: Path) -> None:
    """Tell the kernel that the files are not read again."""
    for file in folder.rglob("*.kv"):
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def one_part(args: argparse.Namespace) -> int:
    """Measure another engine, or the working set, alone."""
    draw = random.Random(1)
    figures: dict[str, Any] = {"shape": args.shape}
    failures = []
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        make_checkpoint(model, args.shape)
        if args.only == "peer":
            ids = [draw.randrange(10, 900) for _ in range(args.tokens)]
            seconds, hits = from_a_peer(model, ids)
            figures |= {"tokens": args.tokens, "from_a_peer_s": round(seconds, 3), "pulled": hits}
            if hits < args.tokens // 2:
                failures.append(f"K/V was not pulled: {hits} tokens")
        else:
            without = working_set(model, args, None)
            with_tier = working_set(model, args, tier(args))
            figures |= {
                "prompts_of": args.set_tokens,
                "tokens_per_s_without_a_tier": round(without),
                "tokens_per_s_with_a_tier": round(with_tier),
            }
            if with_tier < without:
                failures.append("a tier makes prompts that come again slower")
    return conclude(figures, failures, args.output_json)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--host-gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3, help="fresh prompts for the overhead")
    parser.add_argument("--set-tokens", type=int, default=512, help="of a prompt of the set")
    parser.add_argument("--only", choices=("second-ask", "peer", "working-set"))
    add_output_flag(parser)
    args = parser.parse_args()
    if args.only in ("peer", "working-set"):
        return one_part(args)
    draw = random.Random(1)

    def prompt() -> list[int]:
        return [draw.randrange(10, 900) for _ in range(args.tokens)]

    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "model", Path(name) / "kv"
        make_checkpoint(model, args.shape)
        config = tier(args, folder)
        plain, tiered = open_engine(model, args.tokens), open_engine(model, args.tokens, config)
        first = prompt()
        computed = [plain(first), tiered(first)]
        on, off, cpu_on, cpu_off = [], [], [], []
        for _ in range(args.rounds):
            fresh = prompt()
            before = time.process_time()
            off.append(plain(fresh)[1])
            between = time.process_time()
            on.append(tiered(fresh)[1])
            cpu_off.append(between - before)
            cpu_on.append(time.process_time() - between)
        again = plain(first)[0]
        memory, hits = tiered(first)[0], [tiered.hits]
        tiered.core.shutdown()
        drop_from_page_cache(folder)
        cold = open_engine(model, args.tokens, config)
        from_disk, hits = cold(first)[0], [*hits, cold.hits]
        cold.core.shutdown()
        warm = open_engine(model, args.tokens, config)
        cached, hits = warm(first)[0], [*hits, warm.hits]
        warm.core.shutdown()
    figures: dict[str, Any] = {
        "shape": args.shape,
        "tokens": args.tokens,
        "first_ask_s": round(min(first for first, _ in computed), 3),
        "computed_again_s": round(again, 3),
        "from_memory_s": round(memory, 3),
        "from_files_in_page_cache_s": round(cached, 3),
        "from_files_s": round(from_disk, 3),
        "loaded_tokens": hits,
        "overhead": round(median(on) / median(off) - 1, 4),
        "processor_time_overhead": round(median(cpu_on) / median(cpu_off) - 1, 4),
    }
    failures = []
    if min(hits) < args.tokens // 2:
        failures.append(f"K/V was not loaded: {hits} tokens")
    if figures["overhead"] > _MOST_OVERHEAD:
        failures.append(f"a tier without hits costs {figures['overhead']:.1%}")
    return conclude(figures, failures, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
