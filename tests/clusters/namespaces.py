"""Machines that are network namespaces, and a switch between them that loses, delays and reorders.

Each machine has an address and a TAP device, whose other end is here: a thread hands every frame on
as a bad link would. It needs the right to make namespaces (root) and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_BROADCAST = b"\xff" * 6


@dataclass
class Link:
    """A machine's link: the share of frames that are lost, how late the others come, and how much
    more at random, which reorders them. `is_cut`: nothing passes.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    is_cut: bool = False


@dataclass
class Machine:
    """A namespace with one device, `address` in the network of all."""

    name: str
    address: str
    tap: int
    link: Link = field(default_factory=Link)

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def pids(self) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()]

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def lose(self) -> None:
        """Make it disappear: its link first, so that nobody hears of its processes' end."""
        self.link.is_cut = True
        self.kill()


class Network:
    """Machines and the switch between them; to be closed, which leaves nothing."""

    def __init__(self, num_machines: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._stop_end, self._stop = os.pipe()
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._ports: dict[bytes, int] = {}
        self.num_lost = self.num_passed = 0
        self.machines: list[Machine] = []
        try:
            for number in range(num_machines):
                self.machines.append(_machine(f"quire{os.getpid()}-{number}", number + 1))
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what runs on the machines, and remove them."""
        for machine in self.machines:
            machine.kill()
        os.write(self._stop, b"\0")
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for machine in self.machines:
            os.close(machine.tap)
            subprocess.run(["ip", "netns", "del", machine.name], check=False)

    def _run(self) -> None:
        taps = {machine.tap: machine for machine in self.machines}
        poll = select.poll()
        for fd in (*taps, self._stop_end):
            poll.register(fd, select.POLLIN)
        number = 0
        while True:
            late_s = self._queue[0][0] - time.monotonic() if self._queue else None
            for fd, _ in poll.poll(None if late_s is None else max(0, int(late_s * 1000))):
                if fd == self._stop_end:
                    return
                frame = os.read(fd, 65536)
                self._ports[frame[6:12]] = fd
                for target in self._targets(fd, frame):
                    due = self._due(taps[fd].link, taps[target].link)
                    if due is None:
                        self.num_lost += 1
                        continue
                    number += 1
                    heapq.heappush(self._queue, (due, number, target, frame))
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._queue)
                self.num_passed += 1
                os.write(target, frame)

    def _targets(self, source: int, frame: bytes) -> list[int]:
        known = self._ports.get(frame[:6])
        if known is not None and frame[:6] != _BROADCAST:
            return [known]
        return [machine.tap for machine in self.machines if machine.tap != source]

    def _due(self, *links: Link) -> float | None:
        """When a frame over these links arrives; None: never."""
        due = time.monotonic()
        for link in links:
            if link.is_cut or self._random.random() < link.loss:
                return None
            due += link.delay_s + self._random.random() * link.jitter_s
        return due


def can_make_machines() -> str:
    """Why there can be no such machines here; "" if there can."""
    if os.geteuid() != 0:
        return "it needs root"
    if not os.path.exists("/dev/net/tun"):
        return "it needs /dev/net/tun"
    probe = f"quire{os.getpid()}-probe"
    try:
        done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    except FileNotFoundError:
        return "it needs the command ip"
    if done.returncode:
        return "it needs the right to make network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


def _machine(name: str, number: int) -> Machine:
    device = f"tap{os.getpid() % 10_000}_{number}"
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TAP | _IFF_NO_PI))
    address = f"10.77.0.{number}"
    inside = ["ip", "-n", name]
    for command in (
        ["ip", "netns", "add", name],
        ["ip", "link", "set", device, "netns", name],
        [*inside, "addr", "add", f"{address}/24", "dev", device],
        [*inside, "link", "set", device, "up"],
        [*inside, "link", "set", "lo", "up"],
    ):
        subprocess.run(command, check=True)
    return Machine(name, address, tap)
