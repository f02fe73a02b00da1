"""Prefill and decode engines under streams, one of which is killed, stopped or cut off: every
answer is right, or one clear error, and no block is held afterwards.

Two servers compute a tiny model of random weights. Prompts are sent to both as a proxy sends them
(examples/servers/disaggregated_prefill.py); the answers are compared with those of one engine. The
counts of the metrics show that K/V was pulled where nothing was wrong.

    PYTHONPATH=src python benchmarks/kv_peers.py --streams 64

With `--faketime libfaketime.so.1` the wall clocks of both servers jump by days while they serve.
With `--namespaces`, as root, each server is a host of its own: a network namespace with a cable to
this one and a cable between both, which is cut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from quire.bench.report import add_output_flag, conclude
from quire.testing.checkpoints import make_checkpoint

_FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False}
_PROMPT, _BLOCK, _LEASE_S = 200, 16, 4.0
_READY_S, _ANSWER_S = 120.0, 90.0
_WHOLE = (_PROMPT - 1) // _BLOCK * _BLOCK


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass(frozen=True)
class Host:
    """Where a server runs: the address of its interface, that of its K/V, and what starts commands
    there.
    """

    address: str = "127.0.0.1"
    kv_address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


class Namespaces:
    """Two network namespaces with a cable between them, and one from each to this machine."""

    names = ("quire-kv-a", "quire-kv-b")

    def __enter__(self) -> list[Host]:
        self.__exit__()
        for number, name in enumerate(self.names):
            _ip("netns", "add", name)
            _ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
            here = f"quire-kv-{number}"
            _ip("link", "add", here, "type", "veth", "peer", "name", "out", "netns", name)
            _ip("addr", "add", f"10.201.{number}.1/24", "dev", here)
            _ip("link", "set", here, "up")
            self._up(name, "out", f"10.201.{number}.2/24")
        both = ("type", "veth", "peer", "name", "kv", "netns", self.names[1])
        _ip("link", "add", "kv", "netns", self.names[0], *both)
        for number, name in enumerate(self.names):
            self._up(name, "kv", f"10.201.9.{number + 1}/24")
        return [
            Host(f"10.201.{number}.2", f"10.201.9.{number + 1}", ("ip", "netns", "exec", name))
            for number, name in enumerate(self.names)
        ]

    @staticmethod
    def _up(name: str, device: str, address: str) -> None:
        _ip("netns", "exec", name, "ip", "addr", "add", address, "dev", device)
        _ip("netns", "exec", name, "ip", "link", "set", device, "up")

    def set_cable(self, state: str) -> None:
        """Let the cable between both be "down" or "up"."""
        _ip("netns", "exec", self.names[0], "ip", "link", "set", "kv", state)

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def set_clocks(offset: str) -> None:
    """Set the wall clocks of servers that run with libfaketime; the monotonic one goes on."""
    Path(os.environ["FAKETIME_TIMESTAMP_FILE"]).write_text(offset)


class Server:
    """`quire serve` with a connector."""

    def __init__(self, model: Path, role: str, log: Path, host: Host) -> None:
        self.port, self.kv_port, self.host = free_port(), free_port(), host
        config = {
            "kv_connector": "NixlConnector", "kv_role": role,
            "kv_connector_extra_config": {
                "host": host.kv_address, "port": self.kv_port, "kv_lease_duration": _LEASE_S,
                "kv_load_timeout": 1, "kv_recompute_threshold": 0, "peers": ["127.0.0.1"],
            },
        }  # fmt: skip
        command = [
            *(*host.enter, sys.executable, "-m", "quire", "serve", str(model)),
            *("--host", host.address, "--port", str(self.port)),
            *("--kv-transfer-config", json.dumps(config), "--max-model-len", "512"),
            *("--skip-tokenizer-init", "--dtype", "float32", "--cpu-threads", "1"),
            *("--block-size", str(_BLOCK), "--num-gpu-blocks-override", "2048"),
            *("--max-num-seqs", "64", "--served-model-name", "m"),
        ]  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.log = log

    @property
    def url(self) -> str:
        """The address of its interface."""
        return f"http://{self.host.address}:{self.port}"

    def wait(self) -> None:
        """Wait until it serves."""
        end = time.monotonic() + _READY_S
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise RuntimeError(f"{self.url} does not serve: {self.log.read_text()[-2000:]}")

    def core(self) -> int:
        """The process of its core."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            name = " ".join([child.name(), *child.cmdline()])
            if "EngineCore" in name or "QuireCore" in name or "core" in name.lower():
                return child.pid
        raise RuntimeError("the server has no core")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        found = re.findall(rf"^vllm:{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Cable:
    """The cable between two namespaces."""

    def __init__(self, namespaces: Namespaces, server: Server) -> None:
        self._namespaces = namespaces
        self.address, self.port = server.host.kv_address, server.kv_port

    async def open(self) -> None:
        """Do nothing: it is there."""

    def cut(self) -> None:
        """Let nothing through from now on."""
        self._namespaces.set_cable("down")

    def mend(self) -> None:
        """Let everything through again."""
        self._namespaces.set_cable("up")


class Link:
    """A relay between two engines, which can be cut."""

    address = "127.0.0.1"

    def __init__(self, port: int) -> None:
        self.target, self.port, self._writers = port, 0, list[asyncio.StreamWriter]()
        self.is_cut = False

    async def open(self) -> None:
        """Begin to relay."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        try:
            to, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self._writers += [writer, back]
        with contextlib.suppress(asyncio.CancelledError):  # the program ends
            await asyncio.gather(self._copy(reader, back), self._copy(to, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self.is_cut:
                    continue  # as a cable that is pulled: nobody is told
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        """Let nothing through from now on."""
        self.is_cut = True

    def mend(self) -> None:
        """Relay again."""
        self.is_cut = False
        for writer in self._writers:
            writer.close()
        self._writers.clear()


@dataclass
class Scene:
    """The engines, and what is done to them."""

    prefill: Server
    decode: Server
    link: Link | Cable
    outputs: int
    num_computed: int = 0
    """Prompts that the first engine has computed."""

    def fault(self, name: str) -> tuple[Callable[[], object], Callable[[], object]]:
        """The action by which a fault begins, and the one by which it ends."""
        which = self.decode if name.endswith("decode") else self.prefill
        if name == "none":
            return lambda: None, lambda: None
        if name == "cut link":
            return self.link.cut, self.link.mend
        if name == "clock jump":
            return partial(set_clocks, "+3d"), partial(set_clocks, "-2d")
        pid = which.core()
        if name.startswith("SIGKILL"):
            return lambda: os.kill(pid, signal.SIGKILL), lambda: None
        return lambda: os.kill(pid, signal.SIGSTOP), lambda: _go_on(pid)


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it hung, and was ended
        os.kill(pid, signal.SIGCONT)


async def ask(client: httpx.AsyncClient, scene: Scene, prompt: list[int]) -> list[int] | str:
    """The ids of an answer by two legs; or the text of an error."""
    body: dict[str, Any] = {
        "model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "max_tokens": scene.outputs, "detokenize": False,
    }  # fmt: skip
    try:
        own = {**body, "max_tokens": 1, "kv_transfer_params": _FIRST_LEG}
        first = await client.post(f"{scene.prefill.url}/v1/completions", json=own)
        params = first.json().get("kv_transfer_params") if first.is_success else None
    except httpx.TransportError:
        params = None
    scene.num_computed += 1
    if params:
        params |= {"remote_host": scene.link.address, "remote_port": scene.link.port}
        body["kv_transfer_params"] = params
    answer = await client.post(f"{scene.decode.url}/v1/completions", json=body)
    if not answer.is_success:
        return answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def run(scene: Scene, name: str, prompts: list[list[int]], right: list[list[int]]) -> dict:
    """One row of the table: a fault while all prompts are asked."""
    begin, end = scene.fault(name)
    before = scene.decode.metric("external_prefix_cache_hits")
    start = time.monotonic()
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=_ANSWER_S, limits=limits) as client:
        tasks = [asyncio.create_task(ask(client, scene, prompt)) for prompt in prompts]
        scene.num_computed = 0
        while name != "none" and scene.num_computed < len(prompts) // 2:
            await asyncio.sleep(0.002)
        begin()
        await asyncio.sleep(2.0 if name != "none" else 0.0)
        end()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    took = time.monotonic() - start
    wrong = sum(isinstance(a, list) and a != b for a, b in zip(found, right, strict=True))
    errors = [str(a) for a in found if not isinstance(a, list)]
    hangs = sum(isinstance(a, httpx.TimeoutException) for a in found)
    for server in (scene.prefill, scene.decode):
        server.wait()
    held = await _held(scene)
    hits = scene.decode.metric("external_prefix_cache_hits") - before
    row = {
        "fault": name, "right": len(found) - wrong - len(errors), "errors": len(errors),
        "wrong": wrong, "hang": hangs, "held": held, "pulled_tokens": int(max(0, hits)),
        "seconds": round(took, 1),
    }  # fmt: skip
    print(json.dumps(row), *errors[:2], flush=True)
    return row


async def _held(scene: Scene) -> float:
    """The share of blocks that are held once leases have ended. Both engines are asked once more:
    one that was started anew tells nothing before.
    """
    usage = 1.0
    await alone(scene.decode, [[5, 6, 7]], 1)
    await alone(scene.prefill, [[5, 6, 7]], 1)
    for _ in range(60):
        usage = max(s.metric("kv_cache_usage_perc") for s in (scene.prefill, scene.decode))
        if usage == 0:
            break
        await asyncio.sleep(0.25)
    return usage


FAULTS = (
    *("none", "SIGKILL prefill", "SIGSTOP prefill", "SIGKILL decode", "SIGSTOP decode"),
    "cut link",
)


async def table(
    args: argparse.Namespace, folder: Path, hosts: list[Host], namespaces: Namespaces | None
) -> list[dict]:
    """All rows."""
    model = folder / "model"
    make_checkpoint(model, {"num_hidden_layers": 4, "max_position_embeddings": 1024}, "llama")
    roles = ("kv_producer", "kv_consumer")
    servers = [
        Server(model, role, folder / f"{role}.log", host)
        for role, host in zip(roles, hosts, strict=True)
    ]
    rows = []
    try:
        for server in servers:
            server.wait()
        prefill, decode = servers
        link: Link | Cable = Link(prefill.kv_port)
        if namespaces is not None:
            link = Cable(namespaces, prefill)
        await link.open()
        scene = Scene(prefill, decode, link, args.outputs)
        for number, name in enumerate(args.faults.split(",")):
            draw = random.Random(number)
            prompts = [[draw.randrange(3, 90) for _ in range(_PROMPT)] for _ in range(args.streams)]
            right = await alone(scene.prefill, prompts, scene.outputs)
            rows.append(await run(scene, name, prompts, right))
            if name == "none" and rows[-1]["pulled_tokens"] != _WHOLE * args.streams:
                said = [line for s in servers for line in s.log.read_text().splitlines()]
                print(*(line for line in said if "WARNING" in line), sep="\n")
                raise RuntimeError("not all prompts were pulled")
    finally:
        for server in servers:
            server.close()
    return rows


async def alone(server: Server, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    """The answers of one engine."""
    body = {
        "model": "m", "prompt": prompts, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "max_tokens": outputs, "detokenize": False,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=4 * _ANSWER_S) as client:
        answer = await client.post(f"{server.url}/v1/completions", json=body)
    choices = answer.raise_for_status().json()["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda each: each["index"])]


def main() -> int:
    """Print a row for each fault; 1 if any has a wrong answer, a hang or a block that is held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--outputs", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--namespaces", action="store_true", help="each server is a host")
    parser.add_argument("--faketime", help="libfaketime.so.1, for clock jumps")
    add_output_flag(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUIRE_CACHE_DIR"] = str(Path(folder, "cache"))
        if args.faketime:
            args.faults += ",clock jump"
            os.environ |= {
                "LD_PRELOAD": str(Path(args.faketime).absolute()),
                "FAKETIME_TIMESTAMP_FILE": str(Path(folder, "clock")),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            set_clocks("+0")
        if args.namespaces:
            os.environ["QUIRE_CLUSTER_SECRET"] = "words of the kill table"
            namespaces = Namespaces()
            with namespaces as hosts:
                rows = asyncio.run(table(args, Path(folder), hosts, namespaces))
        else:
            rows = asyncio.run(table(args, Path(folder), [Host(), Host()], None))
    failures = [
        f"{row['fault']}: {name} {row[name]}"
        for row in rows
        for name in ("wrong", "hang", "held")
        if row[name]
    ]
    figures = {row["fault"]: f"{row['right']} right, {row['errors']} errors" for row in rows}
    return conclude(figures, failures, args.output_json)


if __name__ == "__main__":
    sys.exit(main())
