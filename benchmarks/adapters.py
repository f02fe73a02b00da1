"""What adapters cost a decode step: rows of a batch with an adapter each, beside rows without.

A worker decodes rows of a context of so many tokens, without a scheduler and without prompts: what
was before is zeros. Rows without adapters, with adapters of q_proj and v_proj (PEFT's default) and
with adapters of every linear layer take turns, so that the machine's moods hit all of them. The
floor is what reading the adapters takes at the speed at which the smallest batch reads the weights.

    PYTHONPATH=src python benchmarks/adapters.py --batch 1 8 32 --rank 16
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from quire.bench.report import add_output_flag, conclude
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import worker_config
from quire.executor.uniproc import open_uniproc
from quire.executor.worker import Worker
from quire.models.adapters.weights import AdapterWeights, LowRank
from quire.models.decoder import DecoderModel
from quire.models.parameters import parameters
from quire.params import SamplingParams
from quire.step.plan import NewRow, StepPlan
from quire.testing.model_shapes import SHAPES, make_config

KINDS = {"none": (), "q, v": ("q", "v"), "all linear": ("q", "k", "v", "o", "gate", "up", "down")}
_CONTEXT = 64
_BLOCK = 32
_WARM = 2


def open_worker(shape: str, dtype: str, batch: int, rank: int) -> Worker:
    """A worker with random weights and a slot for each row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_config(shape, SHAPES[shape].family) | {"torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config))
        args = EngineArgs(
            model=name,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, 64),
            block_size=_BLOCK,
            num_gpu_blocks_override=1 + batch * 1024 // _BLOCK,
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=2 * batch,
            max_lora_rank=rank,
        )
        return open_uniproc(worker_config(make_plan(args))).worker


def adapter(model: DecoderModel, kinds: Sequence[str], rank: int, number: int) -> AdapterWeights:
    """One of those leaves of every layer."""
    assert model.adapters is not None
    draw, products = torch.Generator().manual_seed(number), {}
    for name, leaf in parameters(model.spec).items():
        target = name.removesuffix(".weight")
        if target in model.adapters.targets and target.rpartition(".")[2] in kinds:
            a = torch.randn(rank, leaf.shape[1], generator=draw) * leaf.shape[1] ** -0.5
            b = torch.randn(leaf.shape[0], rank, generator=draw) * 0.01
            dtype = model.adapters.room.dtype
            products[target] = LowRank(a.to(dtype), b.to(dtype))
    return AdapterWeights(products, {}, number.to_bytes(8, "little") * 4)


class Decodes:
    """Steps of so many rows; slots 1 .. batch have adapters of q and v, those after them of all."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step = 0

    def load(self, adapters: Sequence[AdapterWeights], first: int) -> None:
        """Put adapters into the slots from `first` on."""
        loads = [(first + i, self._worker.keep_adapter(a)) for i, a in enumerate(adapters)]
        self._launch(StepPlan(self._next(), [], [], [], [], [], adapter_loads=loads))

    def seconds(self, slots: Sequence[int], steps: int) -> list[float]:
        """Those of each step of rows with adapters in these slots, 0 for none."""
        rows = list(range(len(slots)))
        added = [_row(row, slot) for row, slot in zip(rows, slots, strict=True)]
        found = []
        for number in range(_WARM + steps):
            began = time.perf_counter()
            self._launch(StepPlan(self._next(), [], added, [], rows, []))
            added = []
            if number >= _WARM:
                found.append(time.perf_counter() - began)
        self._launch(StepPlan(self._next(), rows, [], [], [], []))
        return found

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _launch(self, plan: StepPlan) -> None:
        step = self._worker.launch(plan)
        step.sample()
        step.result()


def _row(row: int, slot: int) -> NewRow:
    count = 1024 // _BLOCK
    return NewRow(
        row=row,
        handle=row,
        token_ids=[5 + row] * (_CONTEXT + 1),
        num_prompt_tokens=_CONTEXT + 1,
        num_computed_tokens=_CONTEXT,
        block_ids=(list(range(1 + row * count, 1 + (row + 1) * count)),),
        params=SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True),
        seed=0,
        adapter=slot,
    )


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of a step of each kind, by batch."""
    most = max(args.batch)
    worker = open_worker(args.shape, args.dtype, most, args.rank)
    model = worker.get_model()
    assert isinstance(model, DecoderModel)
    decodes, sizes = Decodes(worker), {}
    for place, (kind, leaves) in enumerate(list(KINDS.items())[1:]):
        every = [adapter(model, leaves, args.rank, 1 + place * most + i) for i in range(most)]
        decodes.load(every, 1 + place * most)
        sizes[kind] = every[0].nbytes / model.weight_bytes
    results: dict[str, object] = {"bytes of one adapter over those of the weights": sizes}
    fastest = 0.0
    for batch in args.batch:
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(args.rounds):
            for place, kind in enumerate(KINDS):
                first = 1 + (place - 1) * most
                slots = [first + i if place else 0 for i in range(batch)]
                found[kind] += decodes.seconds(slots, args.steps)
        fastest = fastest or median(found["none"])
        results[f"batch {batch}"] = _described(found, batch, sizes, fastest)
    return results


def _described(
    found: dict[str, list[float]], batch: int, sizes: dict[str, float], fastest: float
) -> dict[str, object]:
    """`fastest`: seconds of the smallest batch, which reads the weights once."""
    base = median(found["none"])
    rows: dict[str, object] = {"none": f"{base * 1e3:.1f} ms"}
    for kind, size in sizes.items():
        slower, floor = median(found[kind]) / base - 1, batch * size * fastest / base
        rows[kind] = f"{median(found[kind]) * 1e3:.1f} ms, {slower:+.1%} (floor {floor:+.1%})"
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6, help="of a round, after two to warm up")
    parser.add_argument("--rounds", type=int, default=3)
    add_output_flag(parser)
    args = parser.parse_args()
    return conclude(measure(args), (), args.output_json)


if __name__ == "__main__":
    sys.exit(main())
