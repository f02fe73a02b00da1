"""Start, flags, stop: the process as an operator sees it."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

from tests.server.serve_process import SMALL, serving

LONG = {"prompt": "def", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def lines_of(server, body):
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        yield from (line for line in reply.iter_lines() if line)


def last_choice(lines):
    assert lines[-1] == "data: [DONE]"
    return json.loads(lines[-2].removeprefix("data: "))["choices"][0]


@pytest.mark.full
def test_sigterm_lets_running_requests_end():
    with serving() as server:
        lines = lines_of(server, {**LONG, "max_tokens": 400, "return_token_ids": True})
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [first, *lines]
        assert last_choice(rest)["finish_reason"] == "length"
        # Pieces are merged where the client reads slower than the core writes: tokens are counted.
        pieces = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
        tokens = sum(len(piece["choices"][0]["token_ids"]) for piece in pieces)
        assert tokens == 400
        assert server.wait() == 0, server.log
        with pytest.raises(httpx.ConnectError):
            server.get("/health")


@pytest.mark.full
def test_a_second_signal_aborts_and_ends_well():
    with serving() as server:
        lines = lines_of(server, LONG)
        first = next(lines)
        rest = [first]
        reader = threading.Thread(target=lambda: rest.extend(lines))
        server.process.send_signal(signal.SIGTERM)
        reader.start()
        server.line_with("Shutting down")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
        reader.join(30)
        assert last_choice(rest)["finish_reason"] == "abort"


@pytest.mark.full
def test_the_drain_has_a_bound():
    with serving("--shutdown-timeout", "0") as server:
        lines = lines_of(server, LONG)
        first = next(lines)
        server.process.send_signal(signal.SIGINT)
        assert last_choice([first, *lines])["finish_reason"] == "abort"
        assert server.wait() == 0, server.log


@pytest.mark.full
def test_a_config_file_gives_flags_and_the_command_line_rules(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "served-model-name: [from-file, alias]\nmax_model_len: 256\nenable-access-log: true\n"
        "disable-log-stats: false\nallowed-origins:\n  - https://page.example\n"
    )
    with serving("--config", str(file), "--max-model-len", "512") as server:
        cards = server.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["from-file", "alias"]
        assert cards[0]["max_model_len"] == 512
        headers = {"Origin": "https://page.example"}
        allowed = server.get("/v1/models", headers=headers).headers
        assert allowed["access-control-allow-origin"] == "https://page.example"
        other = server.get("/v1/models", headers={"Origin": "https://evil.example"}).headers
        assert "access-control-allow-origin" not in other
    assert '"GET /v1/models" 200' in server.log


def run_serve(*flags):
    command = [sys.executable, "-m", "quire.cli.main", "serve", *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_explain_prints_the_plan():
    done = run_serve("--explain")
    assert done.returncode == 0, done.stderr
    assert "max_model_len" in done.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "99999"], "port"),
        (["--config", "/no/such/file.yaml"], "--config"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--headless"], "QUIRE_CLUSTER_SECRET"),
        (["--api-server-count", "0"], "api_server_count"),
        (["--api-server-count", "2", "--max-stored-responses", "9"], "max_stored_responses"),
        (["--ssl-certfile", "/no/such/file.pem"], "--ssl-certfile"),
        (["--host", "203.0.113.1", "--port", "0"], "--host"),
        (["--host", "no such name", "--port", "0"], "--host"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(flags, named):
    done = run_serve(*flags)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_core_that_is_killed_costs_no_stream():
    """64 streams of the official client, the core process killed in the middle: every text is
    whole, and the one that it would have been.
    """
    prompts = [f"def f{number}(a, b):" for number in range(64)]
    fields = {"model": "", "max_tokens": 48, "temperature": 0}

    async def all_of(server, after_first):
        from openai import AsyncOpenAI

        first = asyncio.Event()

        async def one(client, prompt):
            events = await client.completions.create(prompt=prompt, stream=True, **fields)
            text = ""
            async for event in events:
                text += event.choices[0].text
                first.set()
            return text

        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=120) as client:
            tasks = [asyncio.create_task(one(client, prompt)) for prompt in prompts]
            await first.wait()
            after_first()
            return await asyncio.gather(*tasks)

    with serving() as server:
        right = asyncio.run(all_of(server, lambda: None))
        [core] = psutil.Process(server.process.pid).children()
        found = asyncio.run(all_of(server, core.kill))
        assert found == right
        assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
        assert server.get("/health").status_code == 200
