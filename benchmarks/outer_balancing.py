"""Servers that somebody else balances between, over machines that are network namespaces.

    python -m benchmarks.outer_balancing [--only WORD] [--streams 32]

Two machines, and streams that a client on the first sends to their servers in turn, over the link:
hybrid (each machine balances between its own copies), external (a server for each copy) and
multi-port (each machine starts a server for each of its copies). Every stream must end with the
text of one server; when a machine is lost, those of its servers end with one error each, and no
other stream notices. Exits with 1 otherwise. It needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machines import SMALL, START_S, Connect, Stream, is_ready, report, wait
from quire.testing.checkpoints import make_checkpoint
from tests.clusters.namespaces import Machine, Network, can_make_machines

PORT, HEALTH_PORT = 8000, 9256
_CLONE_NEWNET = 0x40000000
LOST_S = 20.0
"""Seconds in which a client gives up on a machine that is lost: its own time limit."""


def from_machine(machine: Machine, address: str, port: int) -> Connect:
    """A connection to `address` that begins on `machine`, where a thread moves to make it."""

    def there(timeout_s: float) -> socket.socket:
        with open(f"/run/netns/{machine.name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_connection((address, port), min(timeout_s, LOST_S))

    def connect(timeout_s: float) -> socket.socket:
        with ThreadPoolExecutor(1) as traveller:
            return traveller.submit(there, timeout_s).result()

    return connect


class Servers:
    """The servers of one mode: `flags` of each machine, and the ports on each."""

    def __init__(
        self, network: Network, folder: Path, flags: Sequence[Sequence[str]], ports: Sequence[int]
    ) -> None:
        self._network = network
        self._log = folder / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.places = [
            (machine, port) for port in ports for machine in network.machines[: len(flags)]
        ]
        for machine, own in zip(network.machines, flags, strict=False):
            command = [sys.executable, "-m", "quire", "serve", *SMALL, *own]
            command += ["--host", "0.0.0.0", "--port", str(PORT), "--shutdown-timeout", "1"]
            with self._log.open("ab") as log:
                done = subprocess.Popen(machine.command(*command), stderr=log)
            self._processes.append(done)

    def connects(self) -> list[Connect]:
        """How a client on the first machine reaches each server."""
        client = self._network.machines[0]
        return [from_machine(client, machine.address, port) for machine, port in self.places]

    def wait_until_ready(self) -> None:
        """Wait for /ready of each server."""
        deadline = time.monotonic() + START_S
        for connect in self.connects():
            while time.monotonic() < deadline:
                if is_ready(connect):
                    break
                time.sleep(0.3)
            else:
                raise TimeoutError(self._log.read_text())

    def streams(self, count: int) -> list[Stream]:
        """Streams to the servers in turn."""
        connects = self.connects()
        return [Stream(connects[number % len(connects)], number) for number in range(count)]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(60)
        for machine in self._network.machines:
            machine.link.is_cut = False


@contextmanager
def serving(
    network: Network, flags: Sequence[Sequence[str]], ports: Sequence[int]
) -> Iterator[Servers]:
    """Servers that are ready, for a block."""
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(network, Path(folder), flags, ports)
        try:
            servers.wait_until_ready()
            yield servers
        finally:
            servers.close()


def run_mode(
    network: Network,
    name: str,
    flags: Sequence[Sequence[str]],
    ports: Sequence[int],
    count: int,
    expected: list[str],
) -> bool:
    """One mode: the right texts, and a machine that is lost."""
    with serving(network, flags, ports) as servers:
        streams = servers.streams(count)
        wait(streams)
        is_good = report(name, streams, expected, START_S)
        if len(ports) > 1:
            client = network.machines[0]
            each = [from_machine(client, m.address, HEALTH_PORT) for m in network.machines]
            is_good &= all(map(is_ready, each))
        streams = servers.streams(count)
        time.sleep(0.3)
        network.machines[1].lose()
        wait(streams)
        is_good &= report(f"{name}, a machine is lost", streams, expected, LOST_S + 5)
        others = streams[:: len(flags)]  # those of the first machine
        return is_good and not any(stream.error for stream in others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="modes whose name has this word")
    parser.add_argument("--streams", type=int, default=32)
    args = parser.parse_args()
    if why := can_make_machines():
        print(f"No machines here: {why}.")
        return 2
    network = Network(2)
    print("| mode | streams with their text | errors | longest pause (s) |")
    print("| --- | --- | --- | --- |")
    is_good = True
    try:
        with tempfile.TemporaryDirectory() as model:
            make_checkpoint(model, "tiny", family="qwen3_moe", dtype="float32")
            two = [("--model", model, "--data-parallel-size", "2")] * 2
            four = [("--model", model, "--data-parallel-size", "4", "--nnodes", "2")] * 2
            modes = {
                "hybrid": (
                    [
                        (*each, "--node-rank", str(node), "--data-parallel-hybrid-lb")
                        for node, each in enumerate(four)
                    ],
                    [PORT],
                ),
                "external": (
                    [(*each, "--data-parallel-rank", str(rank)) for rank, each in enumerate(two)],
                    [PORT],
                ),
                "multi-port": (
                    [
                        (*each, "--node-rank", str(node), "--data-parallel-multi-port-external-lb")
                        for node, each in enumerate(four)
                    ],
                    [PORT, PORT + 1],
                ),
            }
            expected = texts_of_one(network, model, args.streams)
            for name, (flags, ports) in modes.items():
                if args.only in name:
                    is_good &= run_mode(network, name, flags, ports, args.streams, expected)
    finally:
        network.close()
    return 0 if is_good else 1


def texts_of_one(network: Network, model: str, count: int) -> list[str]:
    """The texts of one server on the first machine."""
    with serving(network, [("--model", model)], [PORT]) as servers:
        streams = servers.streams(count)
        wait(streams)
        return [stream.text for stream in streams]


if __name__ == "__main__":
    sys.exit(main())
