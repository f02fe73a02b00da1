"""Put a load on a server and measure: throughput, latencies, goodput.

Open loop with --request-rate, closed loop with --max-concurrency, or both. The server may be any
that speaks OpenAI's API; prompts of exact length need its /tokenize.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.report import add_output_flag, at_least
from quire.environment import read_environment
from quire.errors import EngineError, InvalidParameter

if TYPE_CHECKING:
    from quire.bench.serving.load import Client, Outcome, RequestShape

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
"""Back end -> the path that it asks."""

_WORDS = """It was a clear morning and the river had risen in the night. Four people stood at the
bridge, counting boats: 12 red, 7 blue, 1 green. `for boat in boats: print(boat.name)` wrote one of
them; another laughed, drew a map, and asked whether the ferry would leave before noon."""
"""Text from whose tokens random prompts are drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire bench serve`."""
    parser.usage = "quire bench serve [flags]"
    where = parser.add_argument_group("server")
    where.add_argument("--backend", choices=sorted(ENDPOINTS), default="openai")
    where.add_argument("--base-url", help="default http://HOST:PORT")
    where.add_argument("--host", default="127.0.0.1")
    where.add_argument("--port", type=int, default=8000)
    where.add_argument("--endpoint", help="path, default that of the back end")
    where.add_argument("--model", help="default the first of /v1/models")
    where.add_argument("--served-model-name", help="the name in requests, if it is another")
    where.add_argument("--header", action="append", default=[], metavar="NAME=VALUE")
    where.add_argument("--ready-check-timeout-sec", type=float, default=0, metavar="S")
    what = parser.add_argument_group("requests")
    what.add_argument("--dataset-name", choices=["random", "custom"], default="random")
    what.add_argument("--dataset-path", type=Path, help='custom: lines of {"prompt": text}')
    what.add_argument("--num-prompts", type=at_least(1), default=1000)
    what.add_argument(
        "--random-input-len", "--input-len", type=at_least(1), default=1024, metavar="N"
    )
    what.add_argument(
        "--random-output-len", "--output-len", type=at_least(1), default=128, metavar="N"
    )
    what.add_argument(
        "--random-prefix-len", type=at_least(0), default=0, metavar="N", help="shared by all"
    )
    what.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths vary by +-R"
    )
    what.add_argument("--ignore-eos", action="store_true", help="random prompts do so anyway")
    what.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON")
    for name in ("temperature", "top-p", "min-p", "top-k"):
        what.add_argument(f"--{name}", type=float if name != "top-k" else int, metavar="X")
    what.add_argument("--seed", type=int, default=0)
    how = parser.add_argument_group("load")
    how.add_argument("--request-rate", type=float, default=math.inf, metavar="PER_S")
    how.add_argument("--burstiness", type=float, default=1.0, metavar="B")
    how.add_argument("--max-concurrency", type=at_least(1), metavar="N")
    how.add_argument("--num-warmups", type=at_least(0), default=0, metavar="N")
    how.add_argument("--request-timeout", type=float, default=6 * 3600, metavar="S")
    out = parser.add_argument_group("results")
    out.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="M,M")
    out.add_argument("--metric-percentiles", default="99", metavar="P,P")
    out.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS")
    out.add_argument("--disable-tqdm", action="store_true")
    out.add_argument("--label")
    out.add_argument("--metadata", nargs="+", default=[], metavar="K=V")
    out.add_argument("--save-result", action="store_true")
    out.add_argument("--save-detailed", action="store_true")
    out.add_argument("--append-result", action="store_true")
    out.add_argument("--result-dir", type=Path, default=Path())
    out.add_argument("--result-filename")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="latencies over time")
    add_output_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Send the load, print the table; 1 if a request failed."""
    if importlib.util.find_spec("aiohttp") is None:
        hint = "pip install 'quire[bench]'."
        raise InvalidParameter("bench", "serve", "needs the package aiohttp", hint)
    from quire.bench.serving.serve_metrics import METRICS, figures_of, parse_goodput, table

    metrics = [name for name in args.percentile_metrics.split(",") if name]
    for name in metrics:
        if name not in METRICS:
            raise InvalidParameter("--percentile-metrics", name, f"choose of {', '.join(METRICS)}")
    percentiles = [float(text) for text in args.metric_percentiles.split(",")]
    goodput = parse_goodput(args.goodput)
    metadata = dict(_pair("--metadata", word) for word in args.metadata)
    outcomes, duration, model = asyncio.run(_measure(args))
    figures = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": args.num_prompts,
        **metadata,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    figures |= figures_of(
        outcomes, duration, metrics=metrics, percentiles=percentiles, goodput=goodput
    )
    print(table(figures, metrics, percentiles))
    if args.save_detailed:
        figures |= _details(outcomes)
    _save(args, figures)
    if args.plot is not None:
        from quire.bench.serving.serve_plot import plot

        plot(outcomes, args.plot)
    for error in sorted({o.error for o in outcomes if not o.is_ok})[:5]:
        print(f"failed: {error}")
    return 1 if figures["failed"] else 0


async def _measure(args: argparse.Namespace) -> tuple[list[Outcome], float, str]:
    """Ask the server what it is, make the requests, send them."""
    from tqdm import tqdm

    from quire.bench.serving.load import Client, RequestShape, run_load

    base = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    headers = dict(_pair("--header", word) for word in args.header)
    for key in filter(None, read_environment().api_keys[:1]):
        # a header that was given rules
        headers.setdefault("Authorization", f"Bearer {key}")
    shape = RequestShape(args.request_rate, args.burstiness, args.max_concurrency, args.seed)
    _check(args, shape)
    async with LoadTarget(base, headers) as server:
        await server.wait(args.ready_check_timeout_sec)
        model = args.model or await server.first_model()
        prompts = await _prompts(args, server)
    name = args.served_model_name or model
    bodies = [(_body(args, name, prompt, length), size) for prompt, size, length in prompts]
    url = base + (args.endpoint or ENDPOINTS[args.backend])
    async with Client(url, headers, args.request_timeout) as client:
        await _warm_up(client, bodies, args.num_warmups)
        with tqdm(total=len(bodies), disable=args.disable_tqdm) as bar:
            outcomes, duration = await run_load(client, bodies, shape, lambda _: bar.update())
    return outcomes, duration, model


def _check(args: argparse.Namespace, shape: RequestShape) -> None:
    for name, value in (("--request-rate", shape.rate), ("--burstiness", shape.burstiness)):
        if not value > 0:
            raise InvalidParameter(name, value, "it must be above 0")
    if not 0 <= args.random_range_ratio < 1:
        raise InvalidParameter("--random-range-ratio", args.random_range_ratio, "choose of 0..1")
    if args.dataset_name == "custom" and args.dataset_path is None:
        raise InvalidParameter("--dataset-name", "custom", "it needs --dataset-path FILE")


async def _warm_up(client: Client, bodies: Sequence[tuple[dict[str, Any], int]], n: int) -> None:
    """Send the first request n times. Raises EngineError if it fails: so would all."""
    for _ in range(n):
        outcome = await client.send(*bodies[0], time.perf_counter())
        if not outcome.is_ok:
            raise EngineError(f"The first request failed: {outcome.error}")


Prompt = tuple[Any, int, int]
"""A prompt, its number of tokens, and the number to ask for."""


async def _prompts(args: argparse.Namespace, server: LoadTarget) -> list[Prompt]:
    draw = random.Random(args.seed)
    if args.dataset_name == "custom":
        texts = [json.loads(line)["prompt"] for line in args.dataset_path.open() if line.strip()]
        chosen = [texts[i % len(texts)] for i in range(args.num_prompts)]
        return [(text, 0, args.random_output_len) for text in chosen]
    # of a text: ids drawn from the whole vocabulary may be control tokens
    tokens = sorted(set(await server.tokenize(_WORDS)))
    prefix = draw.choices(tokens, k=args.random_prefix_len)
    prompts: list[Prompt] = []
    for _ in range(args.num_prompts):
        ids = prefix + draw.choices(tokens, k=_length(draw, args.random_input_len, args))
        prompt: Any = ids
        if args.backend == "openai-chat":
            prompt = await server.detokenize(ids)
        prompts.append((prompt, len(ids), _length(draw, args.random_output_len, args)))
    return prompts


def _length(draw: random.Random, middle: int, args: argparse.Namespace) -> int:
    spread = args.random_range_ratio * middle
    return max(1, draw.randint(math.floor(middle - spread), math.ceil(middle + spread)))


def _body(args: argparse.Namespace, model: str, prompt: Any, length: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.backend == "openai-chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": length}
    else:
        body |= {"prompt": prompt, "max_tokens": length}
    for name in ("temperature", "top_p", "min_p", "top_k"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    # a model may end its answer to random tokens at once
    if args.ignore_eos or args.dataset_name == "random":
        body["ignore_eos"] = True
    return body | args.extra_body


class LoadTarget:
    """The requests to a server besides the load. Raises EngineError if it refuses."""

    def __init__(self, base: str, headers: dict[str, str]) -> None:
        import aiohttp

        self._base = base
        self._session = aiohttp.ClientSession(headers=headers)

    async def __aenter__(self) -> LoadTarget:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def wait(self, seconds: float) -> None:
        """Until it answers, at most so long."""
        end = time.monotonic() + seconds
        while True:
            try:
                await self._ask("/v1/models")
                return
            except EngineError:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(0.5)

    async def first_model(self) -> str:
        """The first that it serves."""
        return str((await self._ask("/v1/models"))["data"][0]["id"])

    async def tokenize(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return list((await self._ask("/tokenize", body))["tokens"])

    async def detokenize(self, ids: list[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": ids}))["prompt"])

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        import aiohttp

        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, self._base + path, json=body) as response:
                if response.status != 200:
                    raise EngineError(f"{path}: {response.status} {(await response.text())[:300]}")
                return await response.json()
        except aiohttp.ClientError as error:
            raise EngineError(f"No answer from {self._base}{path}: {error}") from None


def _pair(flag: str, word: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not sign:
        raise InvalidParameter(flag, word, "write NAME=VALUE")
    return name, value


def _details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def _save(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Writes the figures where they were asked for: --output-json, --save-result."""
    text = json.dumps(figures)
    if args.output_json is not None:
        args.output_json.write_text(text + "\n", encoding="utf-8")
    if not (args.save_result or args.append_result):
        return
    crowd = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = figures["model_id"].rstrip("/").rpartition("/")[2]
    lead = args.label or args.backend
    name = f"{lead}-{figures['request_rate']}qps{crowd}-{model}-{figures['date']}.json"
    args.result_dir.mkdir(parents=True, exist_ok=True)
    file = args.result_dir / (args.result_filename or name)
    with file.open("a" if args.append_result else "w", encoding="utf-8") as stream:
        stream.write(text + "\n")
