"""Texts a second that embedding servers answer when 64 clients send one text after the other, and
how long an answer takes: ours beside infinity's on torch.

The servers are up together and take turns, and the best round of each counts. Clients are one
process that speaks plain HTTP, so that it takes little of the processors that the servers need.

    PYTHONPATH=src python benchmarks/embedding_servers.py --model FOLDER \\
        --infinity ENV/bin/infinity_emb
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

from quire.bench.report import add_output_flag, finish

SENTENCE = "The quick brown fox jumps over the lazy dog and runs on until the night falls, says {}."
QUIRE = [sys.executable, "-m", "quire.cli.main"]


class EmbeddingServer:
    """A server's process, and where it answers."""

    def __init__(self, command: list[str], port: int, path: str) -> None:
        self.port, self.path = port, path
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def wait(self) -> None:
        """Wait until it answers. Raises SystemExit if it ends first."""
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1)
                return
            except OSError:
                time.sleep(0.3)
            if self._process.poll() is not None:
                assert self._process.stderr is not None
                raise SystemExit(self._process.stderr.read()[-2000:])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


async def client(server: EmbeddingServer, model: str, texts: list[str], took: list[float]) -> None:
    """Send the texts one after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for text in texts:
        body = json.dumps({"model": model, "input": text}).encode()
        head = f"POST {server.path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        start = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
        assert answer.startswith("HTTP/1.1 200") and length, answer
        vector = json.loads(await reader.readexactly(int(length[1])))["data"][0]["embedding"]
        took.append(time.perf_counter() - start)
        assert len(vector) > 1
    writer.close()


async def load(
    server: EmbeddingServer, model: str, num_clients: int, each: int
) -> tuple[float, float]:
    """Texts a second, and the median time of an answer in seconds."""
    texts = [SENTENCE.format(i) for i in range(num_clients * each)]
    took: list[float] = []
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(num_clients):
            group.create_task(client(server, model, texts[i::num_clients], took))
    return len(texts) / (time.perf_counter() - start), statistics.median(took)


def servers(args: argparse.Namespace) -> dict[str, EmbeddingServer]:
    """All of them by name, started."""
    ours = [*QUIRE, "serve", args.model, "--served-model-name", "m", "--disable-log-stats"]
    found = {
        f"quire {dtype}": EmbeddingServer(
            [*ours, "--dtype", dtype, "--port", str(9100 + n)], 9100 + n, "/v1/embeddings"
        )
        for n, dtype in enumerate(args.dtypes)
    }
    if args.infinity:
        theirs = [args.infinity, "v2", "--model-id", args.model, "--served-model-name", "m"]
        theirs += ["--engine", "torch", "--device", "cpu", "--port", "9200"]
        found["infinity"] = EmbeddingServer(
            [*theirs, "--no-bettertransformer"], 9200, "/embeddings"
        )
    return found


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--infinity", help="infinity's command")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--each", type=int, default=16, help="texts of a client and round")
    parser.add_argument("--rounds", type=int, default=3)
    add_output_flag(parser)
    args = parser.parse_args()
    running = servers(args)
    found: dict[str, Any] = {}
    try:
        for server in running.values():
            server.wait()
            asyncio.run(load(server, "m", args.clients, 2))
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
        for _ in range(args.rounds):
            for name, server in running.items():
                rounds[name].append(asyncio.run(load(server, "m", args.clients, args.each)))
    finally:
        for server in running.values():
            server.close()
    for name, all_of_it in rounds.items():
        rate, median = max(all_of_it)
        found[name] = {"texts_per_s": rate, "median_s": median}
        print(f"{name:20} {rate:7.0f} texts/s, an answer in {median * 1e3:6.1f} ms")
    finish(found, args.output_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
