"""A pytest plugin for vLLM's tests over Quire: `pytest -p phantoms`.

Names of vLLM that Quire does not have become phantoms. Importing one is fine, so that a file can be
collected; using one skips the test with the phantom's name, for which left_out.txt has the reason.
Every outcome is written to the file REFERENCE_OUTCOMES as it comes.
"""

import builtins
import importlib
import importlib.machinery
import os
import re
import sys
import types
from pathlib import Path

import pytest

import quire.as_vllm  # noqa: F401

MARK = "PHANTOM "
_import = builtins.__import__
_import_module = importlib.import_module
ADAPTED = {}
"""Module of vLLM -> a function that makes it (parser_classes.py)."""


class PhantomUsed(pytest.skip.Exception):
    """A test needed something that only vLLM has."""


def use(name):
    raise PhantomUsed(MARK + name, allow_module_level=True)


class PhantomType(type):
    """The type of phantoms: classes, so that they can be base classes and stand in annotations."""

    def __call__(cls, *args, **kwargs):
        use(cls.phantom)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return phantom(f"{cls.phantom}.{name}")

    def __iter__(cls):
        return iter([phantom(f"{cls.phantom}[0]")])

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __bool__(cls):
        return False

    def __getitem__(cls, key):
        return cls

    def __instancecheck__(cls, instance):
        return False

    def __len__(cls):
        return 0

    def __contains__(cls, item):
        return False

    def __enter__(cls):
        use(cls.phantom)

    def __exit__(cls, *exception):
        return None

    def __lt__(cls, other):
        return False

    __gt__ = __le__ = __ge__ = __lt__

    def __int__(cls):
        return 0

    __index__ = __int__

    def __add__(cls, other):
        return other

    __radd__ = __add__

    def __mul__(cls, other):
        return other

    __rmul__ = __mul__

    def __truediv__(cls, other):
        return 0

    __sub__ = __truediv__

    def __fspath__(cls):
        return os.devnull


def phantom(name):
    members = {
        "phantom": name, "__module__": "phantom",
        "__init_subclass__": classmethod(lambda cls, **options: None),
    }  # fmt: skip
    return PhantomType(name.rpartition(".")[2] or "x", (), members)


class PhantomModule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = phantom(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def ensure(name):
    """The module of that name: Quire's, an adapted one, or a phantom."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, leaf = name.rpartition(".")
    owner = ensure(parent) if parent else None
    if name in ADAPTED:
        module = ADAPTED[name]()
    else:
        try:
            return _import_module(name)
        except ImportError:
            module = PhantomModule(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    if owner is not None:
        setattr(owner, leaf, module)
    return module


def is_theirs(name):
    return name == "vllm" or name.startswith("vllm.")


def import_or_make(name, globals=None, locals=None, fromlist=(), level=0):
    if level or not is_theirs(name):
        return _import(name, globals, locals, fromlist, level)
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        ensure(".".join(parts[:count]))
    if not fromlist:
        return sys.modules["vllm"]
    module = sys.modules[name]
    for wanted in fromlist:
        full = f"{name}.{wanted}"
        if full in ADAPTED:
            ensure(full)
        elif wanted != "*" and not _has(module, wanted):
            try:
                _import_module(full)
            except Exception:
                setattr(module, wanted, phantom(full))
    return module


def _has(module, name):
    try:
        return hasattr(module, name)
    except ImportError:
        return False


def import_module(name, package=None):
    return ensure(name) if is_theirs(name) else _import_module(name, package)


builtins.__import__ = import_or_make
importlib.import_module = import_module
_import_module("parser_classes").register(ADAPTED, sys.modules[__name__])


def dtype_of(model_id, config, dtype, **_):
    """What vLLM's tests ask for the dtype in which they run transformers beside an engine."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    own = getattr(config, "dtype", None) or torch.float32
    return own if dtype == "auto" else getattr(torch, dtype)


ensure("vllm.config.model")._get_and_verify_dtype = dtype_of
ensure("vllm.envs").VLLM_USE_RUST_FRONTEND = False  # by which marks skip tests of the other one


# outcomes


OUTCOMES = Path(os.environ["REFERENCE_OUTCOMES"])
_known = OUTCOMES.read_text(encoding="utf-8") if OUTCOMES.exists() else ""
KNOWN = {line.split("\t")[1] for line in _known.splitlines() if "\t" in line}
"""The tests that this run has an outcome of, from before it was interrupted."""
REFUSED = re.compile(r"Quire has no (vllm(?:\.\w+)+)")


def note(outcome, test, why=""):
    refused = REFUSED.search(why)
    if outcome == "failed" and refused is not None:
        outcome, why = "skipped", f"{MARK}{refused[1]}"  # a name that is refused is not there
    with OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(f"{outcome}\t{test}\t{' | '.join(why.splitlines())[:1500]}\n")


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.nodeid not in KNOWN]


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    why = ""
    if report.outcome != "passed" or hasattr(report, "wasxfail"):
        crash = getattr(report.longrepr, "reprcrash", None)
        if isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])
        elif crash is not None:
            why = f"{crash.message}  @{os.path.basename(crash.path)}:{crash.lineno}"
        else:
            why = str(report.longrepr)
    outcome = "failed" if report.outcome == "failed" else report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "skipped" if outcome == "skipped" else "passed"
    note(outcome, report.nodeid, why)


def pytest_collectreport(report):
    if report.outcome != "passed" and report.longrepr:
        why = "\n".join(str(report.longrepr).splitlines()[-6:])
        note("failed" if report.failed else "skipped", report.nodeid, why)
