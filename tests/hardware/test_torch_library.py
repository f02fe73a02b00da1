"""Torch's libraries, which a thread loads before torch is imported."""

import subprocess
import sys

import pytest

from quire.hardware.native import find_native

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None or sys.platform != "linux", reason=REASON)

START = """
import sys
from pathlib import Path
from quire._native import wait_for_libraries
from quire.hardware.torch_library import load_torch_ahead, wait_for_torch
def is_loaded():
    return "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
def native_modules():
    files = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
    return sorted(file for file in files if file.endswith(".so"))
"""


def printed(code, ahead="load_torch_ahead()\n"):
    words = [sys.executable, "-c", START + ahead + code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_torch_finds_its_libraries_loaded():
    code = """
print("torch" in sys.modules)
before = native_modules()
wait_for_torch()
print(is_loaded(), native_modules() == before, "unittest.mock" in sys.modules)
import torch
print(torch.ones(3).sum().item(), torch.linalg.inv(torch.eye(2)).trace().item())
load_torch_ahead()
"""
    assert printed(code) == ["False", "True", "True", "True", "3.0", "2.0"]


def test_a_process_may_end_or_import_torch_meanwhile():
    assert printed("") == []
    assert printed("import torch; print(torch.zeros(1).item())") == ["0.0"]


def test_a_fork_finds_whole_libraries():
    code = """
import os, signal, time
time.sleep(0.05)  # while they are loaded
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(60)  # a lock that nobody has any more
print(is_loaded())
import torch
print(torch.zeros(1).item())
"""
    assert printed(code) == ["True", "0.0"]


def test_libraries_and_modules_that_do_not_load_are_left_to_who_asks():
    code = """
sys.modules["_lzma"] = None
import quire.hardware.torch_library as ahead
ahead._LIBRARIES = ("libtorch_nowhere.so", "libtorch_python.so")
ahead.load_torch_ahead()
wait_for_libraries()
print(is_loaded())
import torch
print(is_loaded(), [name for name in ahead._MEANWHILE if name not in sys.modules])
"""
    assert printed(code, ahead="") == ["False", "True", "[]"]
