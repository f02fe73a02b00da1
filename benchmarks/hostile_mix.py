"""Minutes of everything at once on a running server: does anything grow, does any answer change?

    python -m benchmarks.hostile_mix --minutes 45

Clients read streams, leave them, send texts that are too long, bodies that are none and heads that
never end; they store responses and talks, follow schemas, and between all that ask requests whose
answers are known. Every two minutes the engine core is killed. `/health` is probed throughout.
Files, threads and memory of the server's first process, which lives for the whole run, are sampled,
and their slopes printed; at the end nothing may run, and the server has to end with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.hostile import Server, of, text, watching

KNOWN = ("def add(a, b):", "import os\n", "class Stack:\n    def push(self, item):")
KILL_EVERY_S = 120.0
SAMPLE_EVERY_S = 5.0
MOST_GROWTH_BYTES_PER_MINUTE = 1 << 20
MOST_GROWTH_PER_MINUTE = 0.5
"""Of open files and threads."""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Clients:
    """Concurrent clients, each of whom does one random thing after the other."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._right: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.is_over = False
        self._things: tuple[Callable[[random.Random], None], ...] = (
            self._known, self._known, self._known_stream, self._known_stream, self._left_stream,
            self._chat, self._responses, self._conversation, self._messages, self._schema,
            self._too_long, self._long, self._noise, self._wrong_type, self._half_head,
        )  # fmt: skip

    def learn(self) -> None:
        """Note the answers to the known prompts."""
        for prompt in KNOWN:
            status, data = self._ask("/v1/completions", _known(prompt))
            assert status == 200, data
            self._right[prompt] = json.loads(data)["choices"][0]["text"]

    def work(self, number: int) -> None:
        """One client until all is over."""
        draw = random.Random(self._seed * 1000 + number)
        while not self.is_over:
            thing = draw.choice(self._things)
            try:
                thing(draw)
                self.done[thing.__name__] += 1
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(f"{thing.__name__}: {error!r}")

    def _ask(self, path: str, body: bytes | None, method: str = "POST") -> tuple[int, bytes]:
        connection = self._server.connect()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def _expect(self, name: str, reply: tuple[int, bytes], *right: int) -> Any:
        status, data = reply
        if status not in (*right, 503):
            self.wrong.append(f"{name}: {status} {data[:150]!r}")
            return None
        return json.loads(data) if status == 200 else None

    def _known(self, draw: random.Random) -> None:
        prompt = draw.choice(KNOWN)
        found = self._expect("known", self._ask("/v1/completions", _known(prompt)), 200)
        if found and found["choices"][0]["text"] != self._right[prompt]:
            self.wrong.append(f"known: {found['choices'][0]!r}")

    def _known_stream(self, draw: random.Random) -> None:
        prompt = draw.choice(KNOWN)
        status, data = self._ask("/v1/completions", _known(prompt, stream=True))
        if status != 200:
            return
        lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
        said = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
        if said != self._right[prompt] or not data.endswith(b"data: [DONE]\n\n"):
            self.wrong.append(f"stream: {said!r} {data[-100:]!r}")

    def _left_stream(self, draw: random.Random) -> None:
        connection = self._server.connect()
        body = of(prompt="x", max_tokens=1000, ignore_eos=True, stream=True, n=draw.randint(1, 3))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if draw.random() < 0.8:
            connection.getresponse().read1(100)
        connection.close()

    def _chat(self, draw: random.Random) -> None:
        messages = [{"role": "user", "content": f"Number {draw.random()}"}]
        body = of(messages=messages, max_tokens=draw.randint(1, 40), temperature=1.0)
        self._expect("chat", self._ask("/v1/chat/completions", body), 200)

    def _responses(self, draw: random.Random) -> None:
        made = self._expect(
            "responses", self._ask("/v1/responses", of(input="a", max_output_tokens=16)), 200
        )
        if made and draw.random() < 0.5:
            reply = self._ask(f"/v1/responses/{made['id']}", None, "DELETE")
            self._expect("deleted", reply, 200, 404)

    def _conversation(self, draw: random.Random) -> None:
        items = [{"role": "user", "content": text(draw.randint(1, 100_000))}]
        self._expect("conversation", self._ask("/v1/conversations", of(items=items)), 200)

    def _messages(self, draw: random.Random) -> None:
        messages = [{"role": "user", "content": "hello"}]
        body = of(messages=messages, max_tokens=draw.randint(1, 20))
        self._expect("messages", self._ask("/v1/messages", body), 200, 529)

    def _schema(self, draw: random.Random) -> None:
        form = {"json": {**SCHEMA, "title": str(draw.randint(0, 1000))}}
        body = of(prompt="a", max_tokens=30, structured_outputs=form)
        self._expect("schema", self._ask("/v1/completions", body), 200)

    def _too_long(self, draw: random.Random) -> None:
        body = of(prompt=text(draw.randint(100_000, 2_000_000)), max_tokens=1)
        self._expect("too long", self._ask("/v1/completions", body), 400)

    def _long(self, draw: random.Random) -> None:
        body = of(prompt=text(draw.randint(5_000, 300_000)))
        self._expect("long", self._ask("/tokenize", body), 200)

    def _noise(self, draw: random.Random) -> None:
        body = draw.randbytes(draw.randint(1, 5000))
        self._expect("noise", self._ask("/v1/chat/completions", body), 400)

    def _wrong_type(self, draw: random.Random) -> None:
        body = of(**{draw.choice(["n", "stop", "logit_bias", "tools", "prompt"]): {"a": [1e300]}})
        self._expect("wrong type", self._ask("/v1/completions", body), 400)

    def _half_head(self, draw: random.Random) -> None:
        with socket.create_connection((self._server.host, self._server.port)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
            time.sleep(draw.random())


def _known(prompt: str, **fields: Any) -> bytes:
    return of(prompt=prompt, max_tokens=48, temperature=0, ignore_eos=True, **fields)


def kill_cores(server: Server, clients: Clients) -> None:
    """Kill the core every `KILL_EVERY_S`."""
    while not clients.is_over:
        until = time.monotonic() + KILL_EVERY_S
        while time.monotonic() < until and not clients.is_over:
            time.sleep(0.5)
        if clients.is_over:
            return
        for child in psutil.Process(server.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if any("core_main" in word for word in child.cmdline()):
                    child.send_signal(signal.SIGKILL)
                    clients.done["killed cores"] += 1
                    break


def slope(samples: list[tuple[float, ...]], place: int) -> float:
    """How fast a figure grows per minute: the median of all pairs' slopes (Theil and Sen), without
    the first third of the samples.
    """
    kept = samples[len(samples) // 3 :]
    kept = kept[:: max(1, len(kept) // 300)]
    pairs = [
        (late[place] - early[place]) / (late[0] - early[0])
        for number, late in enumerate(kept)
        for early in kept[:number]
    ]
    return 60 * statistics.median(pairs) if pairs else 0.0


def main() -> int:
    """Run it; 1 if something grew, was wrong or was left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    server = Server(None, ())
    clients = Clients(server, args.seed)
    clients.learn()
    threads = [
        threading.Thread(target=clients.work, args=(number,)) for number in range(args.clients)
    ]
    threads.append(threading.Thread(target=kill_cores, args=(server, clients)))
    owner = psutil.Process(server.process.pid)
    samples: list[tuple[float, ...]] = []
    start = time.monotonic()
    with watching(server) as watch:
        for thread in threads:
            thread.start()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it early
            while (at_s := time.monotonic() - start) < 60 * args.minutes:
                figures = owner.memory_info().rss, owner.num_fds(), owner.num_threads()
                samples.append((at_s, *figures))
                time.sleep(SAMPLE_EVERY_S)
        clients.is_over = True
        for thread in threads:
            thread.join()
    time.sleep(3)
    _, metrics = clients._ask("/metrics", None, "GET")
    gauges = ("num_requests_running{", "num_requests_waiting{", "kv_cache_usage_perc{")
    left = [
        line
        for line in metrics.decode().splitlines()
        if any(gauge in line for gauge in gauges) and float(line.split()[-1])
    ]
    family = [owner, *owner.children(recursive=True)]
    server.stop()
    left += [repr(process) for process in family if process.is_running()]
    growth = [slope(samples, place) for place in (1, 2, 3)]
    print(f"{samples[-1][0] / 60:.1f} minutes, {args.clients} clients: {dict(clients.done)}")
    print(
        f"growth a minute: {growth[0] / 2**20:+.3f} MiB (of {samples[-1][1] >> 20} MiB), "
        f"{growth[1]:+.2f} files, {growth[2]:+.2f} threads; peak of all processes "
        f"{watch.peak_bytes >> 20} MiB"
    )
    print(
        f"/health: p50 {watch.percentile(0.5):.1f} ms, p99 {watch.percentile(0.99):.1f} ms, "
        f"longest {watch.percentile(1.0):.0f} ms"
    )
    print(
        f"wrong: {len(clients.wrong)} {clients.wrong[:5]}; left: {left}; "
        f"exit {server.process.returncode}"
    )
    is_stable = (
        growth[0] < MOST_GROWTH_BYTES_PER_MINUTE and max(growth[1:]) < MOST_GROWTH_PER_MINUTE
    )
    return (
        0 if is_stable and not clients.wrong and not left and not server.process.returncode else 1
    )


if __name__ == "__main__":
    sys.exit(main())
