"""Whether a tenant can measure what another one has asked for: times to the first token of prompts
that the other has stored under its own salt, and of prompts that nobody has asked for.

Both kinds take turns in random order. The figure is the area under the curve (ROC) of telling one
kind from the other by time: 0.5 is a coin. A tier without salts is measured, too: it must be told
from a coin, or the measurement says nothing.

    PYTHONPATH=src python benchmarks/kv_tenants.py [--rounds 100]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from pathlib import Path

from quire.bench.report import add_output_flag, conclude
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import build_core
from quire.engine.core.core import EngineCore
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.testing.checkpoints import make_checkpoint

_TOKENS = 256


def ask(core: EngineCore, handle: int, ids: list[int], salt: str | None) -> float:
    """Seconds to the one token of an answer."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    core.add_request(EngineCoreRequest(handle, ids, params, 0, 0.0, cache_salt=salt))
    while handle in core.scheduler.requests:
        core.step()
    took = time.perf_counter() - start
    while core.has_work:
        core.step()  # stores end
    return took


def area(ones: list[float], others: list[float]) -> float:
    """How often one of the first is larger than one of the second."""
    wins = sum((one > other) + 0.5 * (one == other) for one in ones for other in others)
    return wins / (len(ones) * len(others))


def measure(core: EngineCore, rounds: int, draw: random.Random, salts: tuple[str, str]) -> float:
    """The area for prompts that are asked for under the second salt."""
    theirs, mine = salts
    times: dict[bool, list[float]] = {True: [], False: []}
    handle = draw.randrange(1 << 20) << 8
    for _ in range(rounds):
        stored, fresh = ([draw.randrange(10, 900) for _ in range(_TOKENS)] for _ in range(2))
        handle += 4
        ask(core, handle, stored, theirs)
        ask(core, handle + 1, [draw.randrange(10, 900) for _ in range(_TOKENS)], theirs)
        both = [(True, stored), (False, fresh)]
        draw.shuffle(both)
        for number, (is_stored, ids) in enumerate(both, 2):
            times[is_stored].append(ask(core, handle + number, ids, mine))
    return area(times[False], times[True])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    add_output_flag(parser)
    args = parser.parse_args()
    draw = random.Random(1)
    extra = {"cpu_bytes_to_use": 256 << 20}
    with tempfile.TemporaryDirectory() as name:
        model = make_checkpoint(Path(name) / "model", "tiny")
        options = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=_TOKENS + 8,
            num_gpu_blocks_override=64,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )
        core = build_core(make_plan(options))
        measure(core, 5, draw, ("warm", "up"))
        apart = measure(core, args.rounds, draw, ("theirs", "mine"))
        together = measure(core, args.rounds, draw, ("ours", "ours"))
    spread = math.sqrt((2 * args.rounds + 1) / (12 * args.rounds**2))
    figures = {
        "rounds": args.rounds,
        "area_with_salts": round(apart, 3),
        "area_with_one_salt": round(together, 3),
        "spread_of_a_coin": round(spread, 3),
    }
    failures = []
    if abs(apart - 0.5) > 3 * spread:
        failures.append(f"a tenant can tell what another has asked for: {apart:.3f}")
    if together < 0.5 + 5 * spread:
        failures.append(f"the measurement cannot tell a hit: {together:.3f}")
    return conclude(figures, failures, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
