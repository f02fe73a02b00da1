"""No test talks to a model hub: the libraries are told so before they are imported."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave others their core

# What tests start imports `tests.support` as they do (pythonpath in pyproject.toml).
ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# A busy machine is not a failure: examples may take as long as they take.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("patient")

HERE = Path(__file__).parent
LONG = [HERE / name for name in ("kernels/triton", "engine", "server", "runner", "gpu", "house")]
"""Folders with files that take a minute each."""
WATCH = HERE / "kernels" / "triton" / "triton_memory.py"


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="what is marked `full`, too")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`pytest -n 3`: each file runs in one process, since tests share its servers and engines."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by pytest_collection_modifyitems
    return LoadFileScheduling(config, log)


def pytest_itemcollected(item):
    """Mark `full` what is not sharp of a product of parameters."""
    if (sharp := item.get_closest_marker("sharp")) is None:
        return
    is_sharp = sharp.kwargs["when"]
    values = {name: item.callspec.params[name] for name in signature(is_sharp).parameters}
    if not is_sharp(**values):
        item.add_marker(pytest.mark.full)


def pytest_collection_modifyitems(config, items):
    """Leave out what is marked `full`, unless it is asked for. Processes that share the files begin
    with the folders whose files take long.
    """
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out and not config.getoption("full"):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if IS_WORKER:
        items.sort(key=lambda item: not any(folder in item.path.parents for folder in LONG))


def pytest_collection_finish():
    """Each worker computes on a core of its own."""
    if IS_WORKER and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter):
    """Say at which levels of instructions native kernels were tested, and why not at the others."""
    passed = terminalreporter.stats.get("passed", [])
    names = Counter(part for report in passed for part in set(re.split(r"[][-]", report.nodeid)))
    if not names["portable"]:
        return
    from quire.hardware.native import find_native

    native, _ = find_native()
    parts = [f"{name} {why or f'in {names[name]} tests'}" for name, why in native.levels()]
    terminalreporter.write_line(f"instruction sets: {'; '.join(parts)}")


def pytest_generate_tests(metafunc):
    """A test that takes `isa` runs at every level of instructions that the native module has code
    for, where its module has `KERNELS` at those that have code of their own for these files of
    csrc/kernels. Levels that this machine lacks are skipped with the reason.
    """
    if "isa" in metafunc.fixturenames:
        from quire.hardware.native import find_native
        from tests.support.native_levels import levels_with

        native, _ = find_native()
        levels = dict(native.levels() if native else [])
        kernels = getattr(metafunc.module, "KERNELS", None)
        chosen = levels if kernels is None else levels_with(*kernels) & levels.keys()
        skips = {
            name: [pytest.mark.skip(reason=why)] if why else [] for name, why in levels.items()
        }
        params = [pytest.param(name, marks=m) for name, m in skips.items() if name in chosen]
        metafunc.parametrize("isa", params)


@pytest.fixture(scope="module")
def one_torch_thread():
    """Torch computes in one thread: the threads of small calls mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run_triton_script():
    """Runs a script in a process of its own, since Triton is told at its first import whether it
    interprets kernels, and returns what its last line says, which is JSON. What is interpreted is
    watched (tests/kernels/triton/triton_memory.py), unless the script does that itself.
    """

    def run(script, *args, interpret, timeout_s=120, is_watched=True, **environment):
        watch = [WATCH] if interpret and is_watched else []
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, *watch, script, *args],
            env=inherited | ({"TRITON_INTERPRET": "1"} if interpret else {}) | environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installs packages with plugins for a test (tests/support/fake_packages.py)."""
    from tests.support.fake_packages import FakePackages

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for name in ("QUIRE_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    made = FakePackages(folder)
    made.forget()
    yield made
    made.forget()
