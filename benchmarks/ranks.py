"""Several ranks compared with one, bit by bit: sizes and kinds of models, with drafts, grammars,
adapters, prefix hits, preemption and a K/V tier; stored formats; mixers of every kind with hostile
values; networks that draft, pictures, poolers and recorded experts; and copies, with their own
experts or shared ones.

    python -m benchmarks.ranks [--only WORD] [--part K/N] [--list]

Each cell starts the ranks of its model. Exits with 1 if one differs in a bit, or has died.
"""

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from quire import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    embedded,
)
from quire.config.plan import EnginePlan
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.errors import EngineDeadError, EngineError
from quire.params import RequestOutputKind
from quire.testing import make_checkpoint
from tests.executor.ranks.test_stage_parts import NETWORKS
from tests.executor.test_shared_poolers import ask_pictures
from tests.executor.worker_cores import WISHES, Served, plan_of, requests, same_bits, serve
from tests.models.adapters.made import make_adapter
from tests.models.hostile.encoders import ENCODERS, make_encoder
from tests.models.hostile.models import HOSTILE, write
from tests.models.vision.spoken import write_spoken
from tests.quantization import coded_checkpoints
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS
from tests.runner.drafting.test_mtp import Oracle

SIZES = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 4": {"tensor_parallel_size": 4},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2 x pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
_FOUR = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128,
    "intermediate_size": 384,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "llama float32": ("llama", _FOUR, {}),
    "llama bfloat16": ("llama", _FOUR, {"dtype": "bfloat16"}),
    "llama int8": ("llama", _FOUR, {"dtype": "bfloat16", "quantization": "int8"}),
    "qwen3 float32": ("qwen3", _FOUR, {}),
    "gemma2 float32": ("gemma2", _FOUR, {}),
    "mixtral float32": (
        "mixtral", _FOUR | {"num_local_experts": 7, "intermediate_size": 96}, {}
    ),
}  # fmt: skip
MIXERS = (
    *("deepseek_v3", "mamba2", "qwen3_next", "falcon_h1", "gpt_oss", "gemma2", "kimi_linear"),
    *("mamba", "lfm2", "recurrent_gemma", "bailing_hybrid", "jamba", "llama4", "bloom", "mpt"),
    *("deepseek_v32", "minimax_m3", "minicpm3", "nemotron_h", "olmo2", "step3p5"),
)
"""Latents, recurrent states, both, sinks with experts, windows, and shared experts; states of each
kind, chunks, biases of distances, chosen tokens and blocks, norms of whole rows, gates of heads.
"""
STORED = (
    *("awq", "gptq-v1", "gptq-v2-8bit-channel", "compressed-w4a16", "compressed-w8a16"),
    *("fp8-blocks", "fp8-blocks-of-exponents"),
)
"""Formats of checkpoints; those with an order of their own are refused with several workers."""
PICTURES = ("llava", "qwen2_vl", "qwen3_vl", "gemma3")
"""Plain, with positions on several axes, with rows that enter several layers, with spans."""
_NINE = {
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144,
    "intermediate_size": 384,
}  # fmt: skip
_SIX = _NINE | {"num_attention_heads": 6, "hidden_size": 96}
OTHER_SIZES = {
    "tp 3": {"tensor_parallel_size": 3},
    "tp 3 x pp 2": {"tensor_parallel_size": 3, "pipeline_parallel_size": 2},
}
COPIES = {
    "dp 2 x tp 2": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "dp 2 x pp 2": {"data_parallel_size": 2, "pipeline_parallel_size": 2},
}
_SPREAD: dict[str, Any] = {"enable_expert_parallel": True}
SPREAD_OVER_RANKS = {f"{name} -ep": sizes | _SPREAD for name, sizes in COPIES.items()}
SPREAD = {f"ep {n}": {"data_parallel_size": n} | _SPREAD for n in (2, 4)} | SPREAD_OVER_RANKS
MIXTURES = ("deepseek_v3", "gpt_oss", "qwen3_next", "llama4", "nemotron_h")
"""Latents with a shared expert, sinks, recurrent states, choices that weigh inputs, experts alone
in their layers.
"""
_ALWAYS = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 99, 3]]}
_FEW = {"num_gpu_blocks_override": 22}
_TIER = {"kv_offloading_size": 0.02}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
ON_TOP: dict[str, dict[str, Any]] = {
    "": {},
    "drafts": {"speculative_config": _DRAFTS},
    "few blocks": _FEW,
}


def asked(folder: object = None) -> list[EngineCoreRequest]:
    """Requests of every kind, twice, so that the second ones find cached prefixes, and repeating
    ones.
    """
    found = [*requests(5), *requests(5), *requests(3, max_tokens=16)]
    for request in found[10:]:
        request.prompt_token_ids = (request.prompt_token_ids[:3] * 8)[:24]
    for handle, request in enumerate(found):
        request.handle = handle
    return found


def asked_again(folder: object = None) -> list[EngineCoreRequest]:
    """The same requests twice more, after their blocks have made room for others."""
    found = [*asked(), *asked()]
    for handle, request in enumerate(found):
        request.handle = handle
    return found


def of_hostile(folder: object = None) -> list[EngineCoreRequest]:
    """Requests for models of a hundred tokens."""
    found = asked()
    for request in found:
        request.prompt_token_ids = [3 + token % 90 for token in request.prompt_token_ids]
    return found


def adapted(root: Path, checkpoint: Path) -> list[EngineCoreRequest]:
    """Requests with one of three adapters or none, in turns."""
    refs: list[AdapterRef | None] = [None]
    for number in (1, 2, 3):
        folder = make_adapter(root / f"adapter-{number}", checkpoint, number)
        refs.append(AdapterRef(f"adapter{number}", number, str(folder)))
    found = asked()
    for request in found:
        request.adapter = refs[request.handle % 4]
    return found


def constrained() -> list[EngineCoreRequest]:
    """Requests with grammars, for the embedded model, which has a vocabulary."""
    kinds = ({"choice": ["yes", "no"]}, {"regex": "[a-f]{3,9}!"}, {"json": {"type": "object"}})
    return [
        EngineCoreRequest(
            handle,
            [60 + handle, 61, 62],
            SamplingParams(
                temperature=0.7,
                max_tokens=12,
                logprobs=2,
                structured_outputs=StructuredOutputsParams(**kind),
            ),
            seed=handle,
            arrival_time=0.0,
        )
        for handle, kind in enumerate(kinds)
    ]


def served(folder: Path | None, given: list[EngineCoreRequest], **wishes: Any) -> Served:
    """What a new engine answers."""
    core = build_core(planned(folder, **wishes))
    try:
        return serve(core, given)
    finally:
        core.shutdown()


def promised(folder: Path | None, **wishes: Any) -> bool:
    """Whether the plan says that ranks have the bits of one."""
    return bool(planned(folder, **wishes).parallel.same_bits_as_one_rank)


def planned(folder: Path | None, **wishes: Any) -> EnginePlan:
    """The plan of a checkpoint, or of the embedded model."""
    if folder is not None:
        return plan_of(folder, **wishes)
    args = EngineArgs(device="cpu", max_model_len=128, num_gpu_blocks_override=60, **wishes)
    return args.create_engine_config()


@dataclass(frozen=True)
class Cell:
    """A model with what is asked of it: `ask(sizes)` starts it with these ranks. `has_own(sizes)`:
    the plan promises the bits of one rank not, but always the same.
    """

    name: str
    ask: Callable[..., Any]
    sizes: Mapping[str, dict[str, Any]]
    has_own: Callable[..., bool] = lambda **sizes: False


def of_requests(
    name: str,
    make: Callable[[], Path | None],
    given: Callable[[Any], list[EngineCoreRequest]],
    wishes: dict[str, Any],
    sizes: Mapping[str, dict[str, Any]] = SIZES,
) -> Cell:
    """A cell of requests to a core; `given(folder)` makes them."""

    def ask(**own: Any) -> Served:
        folder = make()
        return served(folder, given(folder), **wishes, **own)

    def has_own(**own: Any) -> bool:
        return not promised(make(), **wishes, **own)

    return Cell(name, ask, sizes, has_own)


def embedded_cell(name: str, wishes: dict[str, Any]) -> Cell:
    """A cell of the embedded model, which has six heads."""
    sizes = SIZES | OTHER_SIZES
    return of_requests(f"embedded, {name}", lambda: None, lambda _: constrained(), wishes, sizes)


def made(root: Path, name: str, shape: dict[str, Any], family: str) -> Path:
    """A checkpoint."""
    return make_checkpoint(root / name.replace(" ", "-"), shape, family, dtype="float32")


def hostile(root: Path, name: str) -> Path:
    """A checkpoint with hostile values."""
    write(HOSTILE[name], root / name)
    return root / name


def spoken(root: Path, name: str) -> Path:
    """A checkpoint of a model that takes pictures."""
    (root / name).mkdir()
    write_spoken(name, root / name)
    return root / name


def formats(root: Path) -> Iterator[Cell]:
    """Checkpoints of formats in codes."""

    def stored(layout: str) -> Path:
        plain, folder = made(root, f"plain {layout}", _FOUR, "llama"), root / layout
        shutil.copytree(plain, folder)
        coded_checkpoints.write(plain, folder, (FORMATS | BYTE_FORMATS)[layout])
        return folder

    for layout in STORED:
        yield of_requests(f"format {layout}", cache(partial(stored, layout)), asked, {})


def networks(root: Path) -> Iterator[Cell]:
    """Networks that draft."""
    shape = _FOUR | {"num_hidden_layers": 4, "tie_word_embeddings": False}
    target = cache(partial(made, root, "target", shape, "llama"))
    for method, network in NETWORKS.items():

        def drafting(
            given: Callable[..., list[EngineCoreRequest]],
            wishes: dict[str, Any],
            method: str = method,
            network: Any = network,
            **own: Any,
        ) -> Served:
            folder = network(root / f"draft-{method}", target())
            drafts = {"method": method, "model": str(folder), **_ALWAYS}
            return served(target(), given(), speculative_config=drafts, **wishes, **own)

        yield Cell(f"drafts of {method}", partial(drafting, asked, {}), SIZES)
        yield Cell(f"drafts of {method} few blocks", partial(drafting, asked, _FEW), SIZES)
        wishes = {"num_gpu_blocks_override": 26} | _TIER
        yield Cell(f"drafts of {method} tier", partial(drafting, asked_again, wishes), SIZES)
    predicting = cache(lambda: Oracle("deepseek_v3").write(root / "mtp"))
    wishes = {"speculative_config": {"method": "mtp", **_ALWAYS}, "num_gpu_blocks_override": 150}
    yield of_requests("drafts of mtp", predicting, of_hostile, wishes)


def prompts_of_encoder(encoder: Callable[[], Any]) -> tuple[Path, list[list[int]]]:
    """The checkpoint of an encoder, and its prompts."""
    return encoder().folder, encoder().prompts


def pooled(
    name: str, make: Callable[[], tuple[Path, list[list[int]]]], wishes: dict[str, Any]
) -> Cell:
    """Prompts that are pooled."""

    def ask(**own: Any) -> Served:
        folder, prompts = make()
        given = [
            EngineCoreRequest(handle, ids, PoolingParams(task="embed"), 0, 0.0)
            for handle, ids in enumerate(prompts)
        ]
        return served(folder, given, runner="pooling", **wishes, **own)

    return Cell(f"pooled {name}", ask, SIZES)


def with_pictures(name: str, make: Callable[[], Path], **sizes: Any) -> Any:
    """Tokens and their log-probabilities after pictures."""
    return ask_pictures(name, make(), **sizes)


def by_copies(
    make: Callable[[], Path],
    given: Callable[[], list[EngineCoreRequest]] = asked,
    **sizes: Any,
) -> dict[str, Any]:
    """Tokens and their log-probabilities from an engine of several cores."""
    return asyncio.run(_of_copies(make(), given(), sizes))


async def _of_copies(
    folder: Path, given: list[EngineCoreRequest], sizes: dict[str, Any]
) -> dict[str, Any]:
    wishes = WISHES | {"cpu_threads": 4} | sizes
    args = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True, **wishes)
    engine = AsyncLLM.from_engine_args(args)
    try:
        return dict(await asyncio.gather(*(_answer(engine, each) for each in given)))
    finally:
        engine.shutdown()


async def _answer(engine: AsyncLLM, request: EngineCoreRequest) -> tuple[str, Any]:
    params = request.params
    assert isinstance(params, SamplingParams)
    params.seed, params.logprobs, params.output_kind = request.seed, 2, RequestOutputKind.FINAL_ONLY
    name, prompt = f"{request.handle}", {"prompt_token_ids": request.prompt_token_ids}
    async for output in engine.generate(prompt, params, name):
        last = output
    [completion] = last.outputs
    columns = [{t: p.logprob for t, p in each.items()} for each in completion.logprobs or ()]
    return name, (completion.token_ids, columns)


def cells(root: Path) -> Iterator[Cell]:
    """All cells. Their files are written when one of them is asked."""
    for name, (family, shape, wishes) in MODELS.items():
        make = cache(partial(made, root, name, shape, family))
        for top, more in ON_TOP.items():
            if top == "few blocks" and family == "gemma2":  # layers with and without a window
                more = {"num_gpu_blocks_override": 40}
            yield of_requests(f"{name} {top}".strip(), make, asked, wishes | more)
        if name == "llama float32":
            for top, more in (("tier", {}), ("tier drafts", ON_TOP["drafts"])):
                wishes = _FEW | _TIER | more
                yield of_requests(f"{name} {top}", make, asked_again, wishes)
            wishes = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
            given = partial(adapted, root)
            yield of_requests(f"{name} adapters", make, given, wishes)
            yield Cell(f"{name} copies", partial(by_copies, make), COPIES)
        if name == "mixtral float32":
            wishes = {"enable_expert_parallel": True}
            yield of_requests(f"{name} experts spread", make, asked, wishes)
            wishes = {"enable_return_routed_experts": True}
            yield of_requests(f"{name} experts recorded", make, asked, wishes)
            yield Cell(f"{name} copies", partial(by_copies, make), COPIES)
            spread = f"{name} copies that share experts"
            yield Cell(spread, partial(by_copies, make), SPREAD)
            for top in ("drafts", "few blocks"):
                ask = partial(by_copies, make, asked_again, **ON_TOP[top])
                yield Cell(f"{spread} {top}", ask, SPREAD_OVER_RANKS)
    yield from formats(root)
    for name in MIXERS:
        make = cache(partial(hostile, root, name))
        room = {"num_gpu_blocks_override": 150}
        yield of_requests(f"hostile {name}", make, of_hostile, room)
        if name in MIXTURES:
            ask = partial(by_copies, make, of_hostile, **room)
            yield Cell(f"hostile {name} copies that share experts", ask, SPREAD)
    yield from networks(root)
    for name in PICTURES:
        make = cache(partial(spoken, root, name))
        yield Cell(f"pictures {name}", partial(with_pictures, name, make), SIZES)
    for name in ("bert-relu", "T5EncoderModel", "qwen3"):
        encoder = cache(partial(make_encoder, ENCODERS[name], root / f"encoder-{name}"))
        # prompts that see themselves are not cut, and keep nothing
        whole = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": None}
        yield pooled(name, partial(prompts_of_encoder, encoder), whole)
    causal = cache(partial(made, root, "causal", _FOUR, "qwen3"))
    yield pooled("qwen3, causal", lambda: (causal(), [r.prompt_token_ids for r in asked()]), {})
    for name, shape in (("six", _SIX), ("nine", _NINE)):
        make = cache(partial(made, root, f"{name} heads", shape, "llama"))
        for top, more in ON_TOP.items():
            yield of_requests(f"{name} heads {top}".strip(), make, asked, more, OTHER_SIZES)
    for top, more in (("", {}), (", drafts", {"speculative_config": _DRAFTS})):
        yield embedded_cell(f"grammars{top}", more)
    drafts = {"method": "eagle3", "model": embedded.draft_head(), "num_speculative_tokens": 3}
    wishes = {"speculative_config": drafts}
    yield embedded_cell("draft head", wishes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cells whose name has this word")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="K/N", help="every Nth model, from the Kth on"
    )
    parser.add_argument("--list", action="store_true", help="name the cells, and start nothing")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    bad, (first, step) = 0, args.part
    with tempfile.TemporaryDirectory() as root:
        for cell in islice(cells(Path(root)), first - 1, None, step):
            wanted = [size for size in cell.sizes if args.only in f"{cell.name}, {size}"]
            if args.list:
                print(*(f"{cell.name}, {size}" for size in wanted), sep="\n")
            elif wanted:
                bad += compare(cell, wanted)
    return 1 if bad else 0


def part(text: str) -> tuple[int, int]:
    """`K/N`, where K is at most N."""
    first, step = (int(number) for number in text.split("/"))
    if not 1 <= first <= step:
        raise ValueError
    return first, step


def compare(cell: Cell, sizes: list[str]) -> int:
    """Run a cell with one rank and with each of the sizes; returns how many differ or die."""
    right, bad = cell.ask(), 0
    for size in sizes:
        wishes, start = cell.sizes[size], time.perf_counter()
        try:
            found = cell.ask(**wishes)
        except EngineDeadError as error:
            bad += 1
            print(f"{cell.name}, {size}: DIED: {str(error)[:120]}", flush=True)
            continue
        except EngineError as error:
            print(f"{cell.name}, {size}: refused: {str(error)[:120]}", flush=True)
            continue
        seconds = time.perf_counter() - start
        has_own = cell.has_own(**wishes)
        kind = "its own bits, twice the same" if has_own else "same bits"
        is_same = same(found, cell.ask(**wishes) if has_own else right)
        bad += not is_same
        print(
            f"{cell.name}, {size}: {kind if is_same else 'DIFFERENT'}{noted(found)}, "
            f"{seconds:.1f} s",
            flush=True,
        )
    return bad


def same(one: Any, other: Any) -> bool:
    """Whether two answers are equal to the last bit, and not empty."""
    if isinstance(one, Served):
        return bool(one.tokens or one.pooled) and same_bits(one, other)
    return bool(one) and one == other


def noted(found: Any) -> str:
    """What became of drafts and rows."""
    if not isinstance(found, Served):
        return ""
    return f", {found.num_accepted} drafts right, {found.num_preemptions} preemptions"


if __name__ == "__main__":
    sys.exit(main())
