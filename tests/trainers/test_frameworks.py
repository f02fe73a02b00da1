"""The scripts of this folder: one scene here, all of them with --full in processes of their own."""

import asyncio
import subprocess
import sys

import pytest

import quire.as_vllm  # noqa: F401  the scene that is played here imports vllm
from tests.trainers.framework_calls import SCENES


def test_a_scene_plays_in_this_process(tmp_path):
    assert asyncio.run(SCENES["nemo-rl"](tmp_path)) < 3e-4


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
