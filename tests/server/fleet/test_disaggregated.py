"""Two servers, one of which computes prompts and the other goes on, on every route; and what
clients may not say.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from quire import LLM, SamplingParams
from tests.server.serve_process import serving

ROOT = Path(__file__).parents[3]
FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False}
TEXT = "def add(a, b):\n    return a + b\n" * 4
OPTIONS = {"temperature": 0, "max_tokens": 8}
ROUTES = {
    "/v1/completions": {"prompt": TEXT, **OPTIONS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], **OPTIONS},
    "/v1/responses": {"input": TEXT, "temperature": 0, "max_output_tokens": 8, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], **OPTIONS},
}


def config(role):
    extra = {"port": 0, "kv_recompute_threshold": 0}
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(folder))
        flags = ("--served-model-name", "m", "--block-size", "16")
        roles = ("kv_producer", "kv_consumer")
        own = [("--kv-transfer-config", json.dumps(config(role))) for role in roles]
        with serving(*flags, *own[0]) as prefill, serving(*flags, *own[1]) as decode:
            yield prefill, decode


def hits(server):
    return server.metric("vllm:external_prefix_cache_hits_total")


def plain(reply):
    text = json.dumps(reply.get("choices") or reply.get("output") or reply.get("content"))
    return json.loads(text, object_hook=lambda d: {k: v for k, v in d.items() if k != "id"})


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_brings_and_takes_params(route, servers):
    prefill, decode = servers
    body = {**ROUTES[route], "model": "m", "cache_salt": route.replace("/", "_")}
    expected = plain(prefill.post(route, body).json())
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    first = prefill.post(route, {**body, limit: 1, "kv_transfer_params": FIRST_LEG}).json()
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True and params["remote_num_tokens"] > 32
    before = hits(decode)
    second = decode.post(route, {**body, "kv_transfer_params": params}).json()
    assert plain(second) == expected
    assert hits(decode) - before == (params["remote_num_tokens"] - 1) // 16 * 16
    assert second.get("kv_transfer_params") is None


def test_python_brings_and_takes_params(servers):
    prefill, _ = servers
    first = prefill.post(
        "/v1/completions",
        {"prompt": TEXT, "model": "m", "max_tokens": 1, "kv_transfer_params": FIRST_LEG},
    ).json()
    given = {"kv_transfer_params": first["kv_transfer_params"]}
    with LLM(
        dtype="float32", block_size=16, kv_cache_memory_bytes=64 << 20, max_num_seqs=16,
        kv_transfer_config=config("kv_both"), enable_multiprocessing=False,
    ) as llm:  # fmt: skip
        [output] = llm.generate(
            TEXT, SamplingParams(temperature=0, max_tokens=8, extra_args=given), use_tqdm=False
        )
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16
        own = {"kv_transfer_params": FIRST_LEG}
        [kept] = llm.generate(
            TEXT, SamplingParams(temperature=0, max_tokens=1, extra_args=own), use_tqdm=False
        )
        assert kept.kv_transfer_params["remote_num_tokens"] == len(output.prompt_token_ids)


@pytest.mark.parametrize(
    "params",
    [{"do_remote_prefill": 1}, {**FIRST_LEG, "remote_prefiller": "x"}, {"remote_decoder": {}}],
    ids=str,
)
def test_params_of_other_types_are_a_bad_request(params, servers):
    body = {**ROUTES["/v1/completions"], "model": "m", "kv_transfer_params": params}
    answer = servers[1].post("/v1/completions", body)
    assert answer.status_code == 400 and "kv_transfer_params" in answer.json()["error"]["message"]


@pytest.mark.full
def test_the_proxy_of_the_example_streams(servers):
    spec = importlib.util.spec_from_file_location(
        "disaggregated_prefill", ROOT / "examples/servers/disaggregated_prefill.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    prefill, decode = servers
    body = {**ROUTES["/v1/completions"], "model": "m", "cache_salt": "proxy"}
    expected = prefill.post("/v1/completions", body).json()["choices"][0]["text"]

    async def ask(prefill_url):
        proxy = example.Proxy(prefill_url, decode.url)
        app = Starlette(routes=[Route("/v1/completions", proxy.__call__, methods=["POST"])])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            answer = await client.post("/v1/completions", json={**body, "stream": True})
        await proxy.client.aclose()
        lines = answer.text.split("\n\n")
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in data if chunk["choices"])

    before = hits(decode)
    assert asyncio.run(ask(prefill.url)) == expected
    assert hits(decode) > before
    assert asyncio.run(ask("http://127.0.0.1:9")) == expected, "without the other server"
