"""Every documented name of the reference is here, or refused with a sentence: reference_api.txt has
them, with the parameters of methods in their places.
"""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import msgspec
import pytest

import quire
from quire.config.args.engine_args import EngineArgs
from quire.config.args.option import options_of
from quire.engine.arguments import refuse_keywords
from quire.engine.unbuilt import Refused
from quire.errors import EngineError, NotBuiltYet, RequestError

SHEET = Path(__file__).with_name("reference_api.txt").read_text(encoding="utf-8")
EMPTY = inspect.Parameter.empty


def sections():
    for block in re.split(r"\n\n+", SHEET.strip()):
        head, *lines = block.splitlines()
        if not head.startswith("#"):
            kind, owner = head.rstrip(":").split()
            yield kind, owner, [line.strip() for line in lines]


def names_of(wanted):
    return [
        (owner, name)
        for kind, owner, lines in sections() if kind == wanted
        for line in lines if not line.startswith(("def ", "async def "))
        for name in line.split()
    ]  # fmt: skip


METHODS = [
    (owner, line)
    for kind, owner, lines in sections() if kind == "class"
    for line in lines if line.startswith(("def ", "async def "))
]  # fmt: skip


def found(owner):
    module, _, name = owner.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_sentence(text):
    return len(text.split()) >= 6 and text.rstrip().endswith((".", ">"))


@pytest.mark.parametrize(("module", "name"), names_of("module"), ids=lambda each: str(each))
def test_a_name_of_a_module(module, name):
    try:
        assert getattr(importlib.import_module(module), name) is not None
    except AttributeError as error:
        assert is_sentence(str(error)), f"{module}.{name} is neither built nor refused"
        assert "does not implement" in str(error)


def members(kind):
    fields = []
    if issubclass(kind, msgspec.Struct):
        fields = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
    annotated = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())]
    return {*fields, *annotated, *dir(kind), *assigned_in(kind)}


def assigned_in(kind):
    """Attributes that methods of a class assign to `self`."""
    names = set()
    for base in kind.__mro__:
        if base.__module__.startswith("quire"):
            names |= set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(base)))
    return names


@pytest.mark.parametrize(("owner", "name"), names_of("class"), ids=lambda each: str(each))
def test_a_name_of_a_class(owner, name):
    kind = found(owner)
    assert name in members(kind), f"{owner}.{name} is neither built nor refused"
    refused = inspect.getattr_static(kind, name, None)
    if isinstance(refused, Refused):
        assert_refuses(kind, name)


def assert_refuses(kind, name):
    with pytest.raises(NotBuiltYet, match=name) as caught:
        getattr(kind, name)(1, two=2)
    assert is_sentence(str(caught.value))


@pytest.mark.parametrize(("owner", "line"), METHODS, ids=lambda each: str(each).split("(")[0])
def test_a_method_takes_what_the_reference_takes(owner, line):
    [function] = ast.parse(line).body
    kind = found(owner)
    assert hasattr(kind, function.name), f"{owner}.{function.name} is neither built nor refused"
    if isinstance(inspect.getattr_static(kind, function.name), Refused):
        assert_refuses(kind, function.name)
        return
    method = getattr(kind, function.name)
    is_awaited = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    assert is_awaited == isinstance(function, ast.AsyncFunctionDef)
    compare(wanted_of(function), inspect.signature(method), kind)


def wanted_of(function):
    """(name, kind, default) of the parameters in the sheet."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    each = [(arg.arg, True, value) for arg, value in zip(positional, defaults, strict=True)]
    each += [(arg.arg, False, v) for arg, v in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [one for one in each if one[0] != "self"]


def compare(wanted, signature, kind):
    ours = {name: p for name, p in signature.parameters.items() if name != "self"}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    places = [n for n, p in ours.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    for place, (name, is_positional, default) in enumerate(wanted):
        if name not in ours:
            assert takes_any, f"the parameter {name} is neither taken nor refused"
            check_keyword(kind, name, default)
            continue
        if is_positional:
            assert places[place : place + 1] == [name], f"{name} is at another place: {places}"
        if default is None:
            assert ours[name].default is EMPTY or place, f"{name} must be given"
        elif isinstance(default, ast.Name):
            continue  # REQUIRED there, or a default of ours
        else:
            assert ours[name].default == ast.literal_eval(default), name


def check_keyword(kind, name, default):
    """Other keywords of a constructor are options of an engine; those of a request are refused."""
    if kind is not quire.LLM:
        refuse_keywords({name: None})
        with pytest.raises(NotBuiltYet, match=name) as caught:
            refuse_keywords({name: "something"})
        assert is_sentence(str(caught.value))
        return
    ours = EngineArgs()
    assert name in options_of(ours)
    if not isinstance(default, ast.Name):
        assert getattr(ours, name) == ast.literal_eval(default), name


@pytest.mark.parametrize("name", [name for _, name in names_of("options")])
def test_an_option(name):
    if name in options_of(EngineArgs):
        return
    with pytest.raises(RequestError) as caught:
        EngineArgs(**{name: "something"})
    assert isinstance(caught.value, NotBuiltYet), f"{name} is neither built nor refused"
    assert is_sentence(str(caught.value))


def test_the_walk_finds_what_is_missing():
    with pytest.raises(AssertionError, match="neither built nor refused"):
        test_a_name_of_a_module("quire", "NoSuchName")
    with pytest.raises(AssertionError, match="neither built nor refused"):
        test_a_name_of_a_class("quire.LLM", "no_such_name")
    with pytest.raises(AssertionError, match="neither built nor refused"):
        test_an_option("no_such_option")
    with pytest.raises(AssertionError, match="another place"):
        method = "def enqueue(self, sampling_params=None, prompts=None): ..."
        test_a_method_takes_what_the_reference_takes("quire.LLM", method)
    assert issubclass(NotBuiltYet, EngineError)
