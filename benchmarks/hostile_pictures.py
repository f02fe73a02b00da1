"""Text streams beside hostile pictures: is the 99th percentile of their gaps that of the same
streams beside plain requests?

    python -m benchmarks.hostile_pictures --seconds 20

32 streams draw text while 32 clients send one request after the other: plain ones, then requests
with pictures that have to be refused (bombs, torn files, 10,000 of them, private addresses, files,
placeholders typed as text), then pictures that are answered. Every reply is looked at.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import itertools
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.hostile import Server, of, post
from benchmarks.picture_encoder import jpeg, write_model
from quire.bench.report import add_output_flag, at_least, conclude
from quire.config.args.command_line import QuireParser

MOST = 1.2
"""Of the gaps beside plain requests."""
FLAGS = ("--max-num-seqs", "96", "--max-model-len", "1024", "--served-model-name", "m")
TEMPLATE = "{% for m in messages %}{{ m.content }} w9 {% endfor %}"
CHAT = "/v1/chat/completions"


def main(words: Sequence[str] | None = None) -> int:
    """Measure as the command line says; the exit code says whether the promise holds."""
    parser = QuireParser(prog="python -m benchmarks.hostile_pictures", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three parts")
    parser.add_argument("--streams", type=at_least(1), default=32)
    parser.add_argument("--clients", type=at_least(1), default=32)
    parser.add_argument("--layers", type=at_least(2), default=4, help="of the encoder")
    add_output_flag(parser)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), torch.float32, args.layers)
        (Path(folder) / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
        flags = (*FLAGS, "--chat-template", f"{folder}/template.jinja")
        server = Server(folder, flags)
        try:
            return run(server, args)
        finally:
            server.stop()


def run(server: Server, args: argparse.Namespace) -> int:
    """Measure the three parts."""
    figures: dict[str, float | int | str] = {}
    failures: list[str] = []
    kinds = {"plain": plain(), "hostile": hostile(), "pictures": pictures()}
    for name, bodies in kinds.items():
        gaps, replies = beside(server, bodies, args)
        figures[f"{name}_p50_ms"] = float(np.percentile(gaps, 50)) * 1e3
        figures[f"{name}_p99_ms"] = float(np.percentile(gaps, 99)) * 1e3
        figures[f"{name}_longest_ms"] = max(gaps) * 1e3
        figures[f"{name}_replies"] = ", ".join(f"{n} x {r}" for r, n in sorted(replies.items()))
        is_right = [reply.startswith("4" if name == "hostile" else "200") for reply in replies]
        if not all(is_right):
            failures.append(f"other replies to {name}: {figures[f'{name}_replies']}")
    ratio = float(figures["hostile_p99_ms"]) / float(figures["plain_p99_ms"])
    figures["ratio_of_p99"] = ratio
    if ratio > MOST:
        failures.append(f"p99 beside hostile pictures is {ratio:.2f} of that beside plain requests")
    return conclude(figures, failures, args.output_json)


def beside(
    server: Server, bodies: Iterator[bytes], args: argparse.Namespace
) -> tuple[list[float], Counter[str]]:
    """The gaps of streams beside requests with these bodies, and the replies to those."""
    gaps: list[float] = []
    replies: Counter[str] = Counter()
    is_over, lock = threading.Event(), threading.Lock()

    def ask() -> None:
        while not is_over.is_set():
            with lock:
                body = next(bodies)
            reply = post(server, CHAT, body)
            with lock:
                replies[reply] += 1

    def read() -> None:
        while not is_over.is_set():
            found = stream_gaps(server, is_over)
            with lock:
                gaps.extend(found)

    threads = [threading.Thread(target=read) for _ in range(args.streams)]
    threads += [threading.Thread(target=ask) for _ in range(args.clients)]
    for thread in threads:
        thread.start()
    time.sleep(args.seconds)
    is_over.set()
    for thread in threads:
        thread.join()
    return gaps, replies


def stream_gaps(server: Server, is_over: threading.Event) -> list[float]:
    """Seconds between the pieces of one stream."""
    body = of(model="m", prompt="w1 w2", max_tokens=500, ignore_eos=True, stream=True)
    connection = server.connect()
    found: list[float] = []
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        last = None
        for line in reply:
            if is_over.is_set():
                break
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    found.append(now - last)
                last = now
    except (OSError, http.client.HTTPException) as error:
        raise SystemExit(f"a stream was cut: {error!r}") from None
    finally:
        connection.close()
    return found


def chat(*parts: object) -> bytes:
    """A request for four tokens."""
    message = {"role": "user", "content": list(parts)}
    return of(model="m", messages=[message], max_tokens=4, ignore_eos=True)


def plain() -> Iterator[bytes]:
    """Requests of text."""
    return itertools.repeat(chat({"type": "text", "text": "w1 w2 w3"}))


def hostile() -> Iterator[bytes]:
    """One of each kind, again and again."""
    torn = jpeg(1)[:700]
    tall = bomb(30_000, 30_000)
    many = [shown(jpeg(2))] * 10_000
    return itertools.cycle(
        [
            chat(shown(torn)),
            chat(shown(tall, "png")),
            chat(shown(b"\x89PNG\r\n\x1a\n" + bytes(1000), "png")),
            chat({"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}),
            chat({"type": "image_url", "image_url": {"url": "http://[::ffff:127.0.0.1]/a.png"}}),
            chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
            chat({"type": "text", "text": "<image> <image>"}, shown(jpeg(3))),
            chat(*({"type": "image_url", "image_url": {"url": "data:,"}} for _ in many)),
        ]
    )


def pictures() -> Iterator[bytes]:
    """Pictures that nobody has seen."""
    return (chat(shown(jpeg(seed)), {"type": "text", "text": "w1"}) for seed in itertools.count(10))


def shown(data: bytes, kind: str = "jpeg") -> dict[str, object]:
    """A part of a message."""
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few kilobytes that says it is large."""
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
