"""Methods of dataclasses that were compiled before are those that `dataclasses` compiles."""

import dataclasses
import importlib.util
import sys
from dataclasses import dataclass, field
from types import CodeType, FunctionType

import pytest

from quire import generated_methods
from quire.generated_methods import compiled_methods

KINDS = (
    {}, {"frozen": True}, {"frozen": True, "slots": True}, {"order": True}, {"kw_only": True},
    {"unsafe_hash": True}, {"eq": False}, {"repr": False, "slots": True},
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Python's bytecode in a folder of its own, and nothing known in the process."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(generated_methods, "_methods", generated_methods._Methods())


def make(**kind):
    class Thing:
        """A class with fields of all kinds."""

        first: int
        second: "str | None" = None
        third: list = field(default_factory=list, compare=False)
        fourth: float = field(default=1.5, repr=False, hash=False)

    return dataclass(**kind)(Thing)


PLACES = ("co_filename", "co_name", "co_qualname", "co_firstlineno", "co_linetable")
CODE = ("co_code", "co_names", "co_varnames", "co_freevars", "co_flags")


def parts(code):
    """All that a code object is, places included: equality leaves some out."""
    constants = [parts(item) if isinstance(item, CodeType) else item for item in code.co_consts]
    return [getattr(code, name) for name in (*PLACES, *CODE)] + constants


def codes(cls):
    made = {n: value.__code__ for n, value in vars(cls).items() if isinstance(value, FunctionType)}
    return {name: (code, parts(code)) for name, code in made.items()}


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_class_is_the_same_compiled_now_before_and_by_another_process(kind, monkeypatch):
    plain = make(**kind)
    made = []
    for _ in range(2):
        with compiled_methods():
            made += [make(**kind), make(**kind)]
        forget(monkeypatch)
    for cls in made:
        assert codes(cls) == codes(plain)
        assert cls.__init__.__annotations__ == plain.__init__.__annotations__


def test_the_next_process_compiles_nothing(folder, monkeypatch):
    with compiled_methods():
        make(frozen=True, slots=True)
    [file] = files(folder)
    forget(monkeypatch)
    before = file.stat().st_mtime_ns, file.stat().st_ino
    monkeypatch.setattr(generated_methods, "compile", None, raising=False)
    with compiled_methods():
        make(frozen=True, slots=True)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before, "nothing new is not written"


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: bytes(len(data)),
        lambda data: b"0000" + data[4:],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    ],
    ids=["empty", "cut", "zeros", "another version of Python", "a bit"],
)
def test_a_file_that_was_harmed_is_made_anew(harm, folder, monkeypatch):
    with compiled_methods():
        make()
    [file] = files(folder)
    whole = file.read_bytes()
    assert whole.startswith(importlib.util.MAGIC_NUMBER)
    file.write_bytes(harm(whole))
    forget(monkeypatch)
    with compiled_methods():
        assert make()(1).first == 1
    assert file.read_bytes() == whole


def test_nothing_is_written_where_python_writes_no_bytecode(folder, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with compiled_methods():
        make()
    assert not files(folder)


def test_an_installation_that_cannot_be_written_to_is_left_alone(folder, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", "/proc/nowhere")
    with compiled_methods():
        assert make(frozen=True)(1).first == 1
    assert not files(folder)


def test_a_python_that_keeps_no_bytecode_compiles_as_ever(folder, monkeypatch):
    monkeypatch.setattr(sys.implementation, "cache_tag", None)
    with compiled_methods():
        assert make(frozen=True)(1).first == 1
    assert not files(folder)


def test_sources_of_other_releases_do_not_pile_up(folder, monkeypatch):
    monkeypatch.setattr(generated_methods, "_MOST", 12)
    for kind in KINDS:
        forget(monkeypatch)
        with compiled_methods():
            make(**kind)
    forget(monkeypatch)
    with compiled_methods():
        make()
    assert len(generated_methods._methods._known) <= 12 + 6


def test_dataclasses_are_left_as_they_were():
    with compiled_methods(), compiled_methods():
        assert "exec" in vars(dataclasses)
    assert "exec" not in vars(dataclasses)
    with pytest.raises(ValueError, match="no"), compiled_methods():
        raise ValueError("no")
    assert "exec" not in vars(dataclasses)
