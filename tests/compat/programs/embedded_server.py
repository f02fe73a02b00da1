"""A program that runs vLLM's app on a server of its own, with an engine of its own."""

import asyncio
import json
import sys

import httpx
import psutil
import uvicorn
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.api_server import (
    build_app,
    build_async_engine_client,
    init_app_state,
    run_server,
)
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


def parsed(words):
    args = make_arg_parser(FlexibleArgumentParser(description="a program")).parse_args(words)
    validate_parsed_serve_args(args)
    return args


async def serve_app(args):
    context = UsageContext.OPENAI_API_SERVER
    plan = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=context)
    engine = AsyncLLM.from_vllm_config(plan, usage_context=context, disable_log_stats=True)
    app = build_app(args)
    await init_app_state(engine, app.state, args)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        body = {"model": "tiny", "prompt": "def f(", "max_tokens": 4}
        refused = await client.post("/v1/completions", json=body)
        keys = {"Authorization": "Bearer k"}
        reply = await client.post("/v1/completions", json=body, headers=keys)
        long = {"model": "tiny", "prompt": "def f(" * 50_000}
        await client.post("/tokenize", json=long, headers=keys)
        had = num_text_processes()
    server.should_exit = True
    await running
    left = num_text_processes()
    engine.shutdown()
    tokens = reply.json()["usage"]["completion_tokens"]
    return [refused.status_code, reply.status_code, tokens, had, left]


def num_text_processes():
    children = psutil.Process().children(recursive=True)
    return sum("quire.server.text_process" in child.cmdline() for child in children)


async def hold_an_engine(args):
    async with build_async_engine_client(args) as engine:
        return engine.vllm_config.model_config.max_model_len


async def main():
    args = parsed([*sys.argv[1:], "--served-model-name", "tiny", "--api-key", "k"])
    found = {"served": await serve_app(args), "max_model_len": await hold_an_engine(args)}
    for more, options in ((["--headless"], {}), ([], {"ssl_keyfile": "x"})):
        try:
            await run_server(parsed([*sys.argv[1:], *more]), **options)
        except ValueError as error:
            found.setdefault("refused", []).append(str(error).partition("=")[0])
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
