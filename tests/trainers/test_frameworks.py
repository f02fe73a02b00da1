"""The scripts of this folder, each in a process of its own."""

import subprocess
import sys

import pytest

from tests.trainers.framework_calls import SCENES


@pytest.mark.full
@pytest.mark.parametrize("name", SCENES)
def test_an_engine_does_what_a_framework_asks(name):
    program = [sys.executable, "-m", "tests.trainers.framework_calls", name]
    assert subprocess.run(program, check=False).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_an_engine_has_one_clear_state_after_a_trainer_has_died(backend):
    program = [sys.executable, "-m", "tests.trainers.deaths", backend]
    assert subprocess.run(program, check=False).returncode == 0
