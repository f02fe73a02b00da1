"""The build of a wheel, with a double in place of scikit-build-core."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
HOOKS = {
    f"{name}_{kind}"
    for name in ("build", "get_requires_for_build", "prepare_metadata_for_build")
    for kind in ("wheel", "editable")
} | {"build_sdist", "get_requires_for_build_sdist"}


class Builder:
    """Records settings and prepared metadata of each build; one that compiles raises `failure`."""

    def __init__(self):
        self.builds = []
        self.failure = None

    def build(self, wheel_directory, config_settings=None, metadata_directory=None):
        self.builds.append((config_settings, metadata_directory))
        compiles = (config_settings or {}).get("wheel.cmake") != "false"
        if self.failure and compiles:
            raise self.failure
        return "native.whl" if compiles else "plain.whl"


@pytest.fixture
def builder():
    return Builder()


@pytest.fixture
def backend(monkeypatch, builder):
    package, scikit = ModuleType("scikit_build_core"), ModuleType("scikit_build_core.build")
    package.build = scikit
    for hook in HOOKS:
        setattr(scikit, hook, builder.build)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, scikit.__name__, scikit)
    monkeypatch.delitem(sys.modules, "build_backend", raising=False)
    yield importlib.import_module("build_backend")
    sys.modules.pop("build_backend")


def test_pyproject_names_the_backend(backend):
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    (folder,) = system["backend-path"]
    assert Path(backend.__file__) == ROOT / folder / f"{system['build-backend']}.py"


def test_every_hook_of_the_protocol_is_there(backend):
    assert set(backend.__all__) == HOOKS
    assert all(callable(getattr(backend, hook)) for hook in HOOKS)


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_the_module_is_compiled_once(backend, builder, hook):
    assert getattr(backend, hook)("dist", None, "prepared") == "native.whl"
    assert builder.builds == [(None, "prepared")]


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
@pytest.mark.parametrize("failure", [SystemExit(1), RuntimeError("no compiler")])
def test_a_failed_build_leaves_the_module_out(backend, builder, hook, failure, capsys):
    builder.failure = failure
    assert getattr(backend, hook)("dist", {"cmake.verbose": "true"}, "prepared") == "plain.whl"
    assert builder.builds[1:] == [({"cmake.verbose": "true", "wheel.cmake": "false"}, None)]
    message = capsys.readouterr().err
    assert repr(failure) in message and "WARNING" in message
