"""Random adapters, models that they are merged into, and steps without a scheduler."""

import hashlib
import json
import shutil
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.engine.core.builder import worker_config
from quire.executor.uniproc import open_uniproc
from quire.models.adapters.weights import AdapterWeights, LowRank
from quire.models.families import find_family, read_spec
from quire.models.loading.random_weights import RandomLeaves
from quire.models.loading.transforms import from_leaves
from quire.models.parameters import parameters
from quire.models.rules import tensor_map
from quire.params import SamplingParams
from quire.step.plan import Chunk, NewRow, StepPlan


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def leaf_shape(decoder, leaf):
    """[out, in] of a leaf that adapters may change; a tied head is none of the parameters."""
    found = parameters(decoder).get(leaf + ".weight")
    return (decoder.vocab, decoder.dim) if found is None else found.shape


def random_adapter(folder, leaves, rank, seed, *, size=1.0, dtype=torch.float32):
    """An adapter of these leaves; what it adds is about `size` times as large as the products."""
    decoder, draw = read_spec(config_of(folder)), torch.Generator().manual_seed(seed)
    products = {}
    for leaf in sorted(leaves):
        out, width = leaf_shape(decoder, leaf)
        spread = 0.02 if leaf in ("embed", "head") else out**-0.5
        a = torch.randn(rank, width, generator=draw) * width**-0.5
        b = torch.randn(out, rank, generator=draw) * spread * size
        products[leaf] = LowRank(a.to(dtype), b.to(dtype))
    values = b"".join(low.a.float().numpy().tobytes() for low in products.values())
    return AdapterWeights(products, {}, hashlib.sha256(values + bytes([seed])).digest())


def merged(folder, adapter, to):
    """The checkpoint that `folder` was made as, with seed 0, and an adapter merged into it."""
    config, draw = config_of(folder), RandomLeaves(0)
    tensors = {}
    for stored in tensor_map(find_family(config), read_spec(config)):
        leaves = [_merged(draw(leaf).float(), leaf, adapter) for leaf in stored.leaves]
        whole = from_leaves(stored, leaves) if stored.steps else leaves[0]
        tensors[stored.name] = whole.contiguous()
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def _merged(weight, leaf, adapter):
    low = adapter.products.get(leaf.name.removesuffix(".weight"))
    if low is None or not leaf.name.endswith(".weight"):
        return weight
    return weight + low.b.float() @ low.a.float()


@dataclass
class Asked:
    """A prompt and its adapter's slot (0: none); the tokens and log-probabilities that it got."""

    prompt: list
    slot: int = 0
    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)


class Steps:
    """Runs requests through a worker: prompts in chunks, then greedy decodes, rows side by side."""

    def __init__(self, folder, *, slots=0, rank=8, max_len=64, rows=32, platform=None, **args):
        if slots:
            args |= {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
        options = {"dtype": "float32", "block_size": 16, "max_num_seqs": rows} | args
        plan = make_plan(
            EngineArgs(
                model=str(folder),
                skip_tokenizer_init=True,
                max_model_len=max_len,
                num_gpu_blocks_override=2 * rows * (2 + max_len // 16) + 2,
                **options,
            )
        )
        self.executor = open_uniproc(worker_config(plan), platform=platform)
        self._step = 0

    @property
    def runner(self):
        return self.executor.worker.model_runner

    @property
    def banks(self):
        return self.runner.model.adapters

    def load(self, *adapters):
        """Put adapters into slots 1, 2, ..."""
        loads = [(i + 1, self.executor.worker.keep_adapter(a)) for i, a in enumerate(adapters)]
        self._launch([], [], [], [], adapter_loads=loads)

    def run(self, requests, num_tokens, *, chunk=1000, stop_at=None):
        """Run all to the end; with `stop_at` every request leaves its row after so many tokens and
        comes back as one whose prompt includes them, in another row.
        """
        self._run(requests, stop_at or num_tokens, chunk, first_row=0)
        if stop_at:
            self._run(requests, num_tokens, chunk, first_row=len(requests))
        return requests

    def _run(self, requests, num_tokens, chunk, first_row):
        rows = range(first_row, first_row + len(requests))
        known = [asked.prompt + asked.tokens for asked in requests]
        added = [
            self._new_row(row, ids, asked)
            for row, ids, asked in zip(rows, known, requests, strict=True)
        ]
        done = [0] * len(requests)
        while any(len(asked.tokens) < num_tokens for asked in requests):
            decode, chunks, order = [], [], []
            for i, row in enumerate(rows):
                if done[i] >= len(known[i]) and len(requests[i].tokens) < num_tokens:
                    decode.append(row)
                    order.append(i)
            late = []
            for i, row in enumerate(rows):
                if (left := len(known[i]) - done[i]) > 0:
                    count = min(left, chunk)
                    done[i] += count
                    chunks.append(Chunk(row, count, count == left))
                    late += [i] * (count == left)
            self._step_tokens(requests, order + late, added, decode, chunks)
            added = []
        self._launch(list(rows), [], [], [])

    def _step_tokens(self, requests, order, added, decode, chunks):
        states = [n for n, size in enumerate(self.runner.rows.block_sizes) if size is None]
        zero = [new.block_ids[n][0] for new in added for n in states]
        output = self._launch([], added, decode, chunks, zero_blocks=zero)
        columns = output.logprobs
        for place, i in enumerate(order):
            requests[i].tokens.append(output.result.token_ids[place])
            requests[i].logprobs.append(columns.values[columns.index.index(place)].tolist())

    def _new_row(self, row, ids, asked):
        rows, first, blocks = self.runner.rows, 1, []
        for table in rows.tables:
            blocks.append([first + row * table.shape[1] + i for i in range(table.shape[1])])
            first += table.size
        return NewRow(
            row=row,
            handle=row,
            token_ids=list(ids),
            num_prompt_tokens=len(asked.prompt),
            num_computed_tokens=0,
            block_ids=tuple(blocks),
            params=SamplingParams(temperature=0.0, logprobs=5),
            seed=0,
            adapter=asked.slot,
        )

    def _launch(self, removed, added, decode, chunks, **more):
        self._step += 1
        step = self.executor.launch(
            StepPlan(self._step, removed, added, [], decode, chunks, **more)
        )
        step.sample(None)
        return step.result()

    def close(self):
        self.executor.shutdown()
