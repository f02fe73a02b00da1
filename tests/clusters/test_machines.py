"""Machines that are network namespaces: the bad link between them, and a row of the benchmark that
has an engine on them.
"""

import subprocess
import sys

import pytest

from tests.clusters.namespaces import Network, can_make_machines
from tests.house.package import ROOT

pytestmark = pytest.mark.skipif(bool(can_make_machines()), reason=can_make_machines() or "root")

LISTEN = """
import socket
listener = socket.create_server(('', 5000))
print('up', flush=True)
found, _ = listener.accept()
count = 0
while data := found.recv(1 << 20):
    count += len(data)
print(count, flush=True)
"""
SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])).sendall(b'x' * 200_000)
"""


def test_a_link_loses_and_reorders_and_can_be_cut():
    network = Network(2)
    try:
        here, there = network.machines
        listener = subprocess.Popen(
            there.command(sys.executable, "-c", LISTEN), stdout=subprocess.PIPE, text=True
        )
        assert listener.stdout.readline() == "up\n"
        send = here.command(sys.executable, "-c", SEND, there.address, "0.5")
        there.link.is_cut = True
        assert subprocess.run(send, capture_output=True, check=False).returncode == 1
        there.link.is_cut = False
        there.link.loss, there.link.jitter_s = 0.05, 0.005
        network.num_lost = 0
        send[-1] = "10"
        assert subprocess.run(send, check=False).returncode == 0
        assert listener.stdout.readline() == "200000\n"
        assert network.num_lost > 0
        assert listener.wait(10) == 0
        listener.stdout.close()
    finally:
        network.close()
    assert not any(machine.name in namespaces() for machine in network.machines)


def namespaces():
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


@pytest.mark.full
@pytest.mark.slow
def test_a_machine_that_is_lost_costs_streams_a_pause():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machines", "--only", "comes back", "--streams", "8"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
