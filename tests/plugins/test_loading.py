"""Plugins are found, limited, loaded at their own risk, and named where they fail."""

import logging
import subprocess
import sys
import textwrap
import threading
from zipfile import ZipFile

import pytest

import quire
from quire.errors import PluginError
from quire.models.families import ADDED
from quire.plugins import (
    NameTable,
    entry_points,
    installed,
    load_general_plugins,
    loading,
    program_entries,
    records,
    register_all,
)
from quire.plugins.names_of_vllm import missing_names
from quire.plugins.tables import EC_CONNECTORS, LOAD_FORMATS, OP_PROVIDERS

GENERAL = "quire.general_plugins"
LLAMA = "quire.models.families.llama:FAMILY"
ADDS = f"""
    import quire
    def register():
        quire.ModelRegistry.register_model("AcmeForCausalLM", "{LLAMA}")
"""


def failures(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_general_plugin_fills_a_table_once(packages):
    packages.install("acme", ADDS, {GENERAL: {"acme": "register"}})
    load_general_plugins()
    load_general_plugins()
    assert ADDED["AcmeForCausalLM"] == LLAMA
    [record] = records()
    assert record.changes == ["architecture AcmeForCausalLM"] and record.failure is None
    assert record.point.title == "quire.general_plugins 'acme' of acme 1.0 (acme:register)"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("VLLM_PLUGINS", "other, acme", True),
        ("VLLM_PLUGINS", "other", False),
        ("VLLM_PLUGINS", "", False),
        ("QUIRE_PLUGINS", "", False),
    ],
)
def test_the_environment_limits_them(packages, monkeypatch, variable, value, expected):
    packages.install("acme", ADDS, {GENERAL: {"acme": "register"}})
    monkeypatch.setenv(variable, value)
    load_general_plugins()
    assert ("AcmeForCausalLM" in ADDED) is expected


def test_one_that_raises_costs_itself_alone(packages, caplog):
    bad = ADDS.replace("Acme", "Bad") + "        raise OSError('no licence\\nfile')\n"
    packages.install("bad", bad, {GENERAL: {"bad": "register"}})
    packages.install("gone", "import module_that_is_not_there", {GENERAL: {"gone": "register"}})
    packages.install("none", "register = 1", {GENERAL: {"none": "register"}})
    packages.install("ends", "def register(): raise SystemExit(3)", {GENERAL: {"ends": "register"}})
    packages.install("zeta", ADDS, {GENERAL: {"zeta": "register"}})
    load_general_plugins()
    assert list(ADDED) == ["AcmeForCausalLM"], "what the first had registered is taken back"
    title = "Plugin quire.general_plugins {0!r} of {0} 1.0 ({0}:register) is left out: it failed: "
    ends = " The engine goes on without it."
    assert failures(caplog) == [
        title.format("bad") + "OSError: no licence file." + ends,
        title.format("ends") + "SystemExit: 3." + ends,
        title.format("gone")
        + "ModuleNotFoundError: No module named 'module_that_is_not_there'."
        + ends,
        title.format("none") + "It must be a function without arguments, and is 1." + ends,
    ]


def test_one_that_hangs_is_given_up(packages, caplog, monkeypatch):
    """What it does later changes nothing any more."""
    source = """
        import quire, threading
        may_go_on, is_done = threading.Event(), threading.Event()
        errors = []
        def register():
            may_go_on.wait()
            try:
                quire.ModelRegistry.register_model("LateForCausalLM", "acme:FAMILY")
            except Exception as error:
                errors.append(str(error))
            is_done.set()
    """
    packages.install("slow", source, {GENERAL: {"slow": "register"}})
    monkeypatch.setenv("QUIRE_PLUGIN_TIMEOUT", "0.02")
    load_general_plugins()
    assert failures(caplog) == [
        "Plugin quire.general_plugins 'slow' of slow 1.0 (slow:register) is left out: it has not "
        "come to an end in 0.02 s (QUIRE_PLUGIN_TIMEOUT): it hangs, or waits for something. The "
        "engine goes on without it."
    ]
    slow = sys.modules["slow"]
    slow.may_go_on.set()
    assert slow.is_done.wait(10)
    assert slow.errors == [
        "quire.general_plugins 'slow' of slow 1.0 (slow:register) was given up; it came too late."
    ]
    assert "LateForCausalLM" not in ADDED


def test_a_name_means_one_thing(packages, caplog):
    packages.install("acme", ADDS, {GENERAL: {"acme": "register"}})
    packages.install("own", ADDS.replace("Acme", "Llama"), {GENERAL: {"own": "register"}})
    other = ADDS.replace("llama:FAMILY", "cohere:COHERE")
    packages.install("second", other, {GENERAL: {"second": "register"}})
    twice = ADDS.replace("Acme", "Twice")
    twice += "        quire.ModelRegistry.register_model('TwiceForCausalLM', 'twice:OTHER')\n"
    packages.install("twice", twice, {GENERAL: {"twice": "register"}})
    load_general_plugins()
    assert dict(ADDED) == {"AcmeForCausalLM": LLAMA}
    said = [text.partition("it failed: ")[2] for text in failures(caplog)]
    ends = " The engine goes on without it."
    assert said == [
        "The architecture 'LlamaForCausalLM' is Quire's own and cannot be replaced: register yours "
        "under another name." + ends,
        "The architecture 'AcmeForCausalLM' is registered twice, by quire.general_plugins 'acme' "
        "of acme 1.0 (acme:register) and by quire.general_plugins 'second' of second 1.0 "
        "(second:register): one of them has to use another name." + ends,
        "The architecture 'TwiceForCausalLM' is registered twice, by quire.general_plugins 'twice' "
        "of twice 1.0 (twice:register) and by quire.general_plugins 'twice' of twice 1.0 "
        "(twice:register): one of them has to use another name." + ends,
    ]


def test_a_program_registers_the_same_again(packages):
    for _ in range(2):
        quire.ModelRegistry.register_model("AcmeForCausalLM", LLAMA)
    assert ADDED.holder("AcmeForCausalLM") == "this program"
    with pytest.raises(PluginError, match="registered twice, by this program and by this program"):
        quire.ModelRegistry.register_model("AcmeForCausalLM", "other:FAMILY")


def test_entry_points_are_read_as_packaging_tools_write_them(packages):
    packages.install("acme", ADDS, {})
    info = packages.folder / "acme-1.0.dist-info" / "entry_points.txt"
    info.write_text(
        "[console_scripts]\nacme = acme:main\n\n[vllm.general_plugins]\n# a comment\n"
        "both = acme:for_vllm\nonly=acme:only [extra]\n[ quire.general_plugins ]\n"
        "both = acme:register\n[quire.unknown]\nx = acme:x\n"
    )
    other = packages.folder / "Acme_Tools-2.1b1.dist-info"
    other.mkdir()
    (other / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\nlog = tools:Log\n")
    real = packages.folder / "vllm-0.32.0.dist-info"
    real.mkdir()
    (real / "entry_points.txt").write_text("[vllm.general_plugins]\nresolver = vllm.x:register\n")
    entry_points._all_points.cache_clear()
    found = [(p.prefix, p.name, p.value) for p in installed("general_plugins")]
    assert found == [("quire", "both", "acme:register"), ("vllm", "only", "acme:only")]
    [point] = installed("stat_logger_plugins")
    assert (point.package, point.version) == ("Acme_Tools", "2.1b1")


def zipped(file, *, points="[quire.general_plugins]\nacme = acme_zipped:register\n"):
    """A zip file with a package, as a wheel has it."""
    with ZipFile(file, "w") as opened:
        opened.writestr("acme_zipped.py", textwrap.dedent(ADDS))
        opened.writestr("acme_for_vllm.py", "from vllm.attention import Attention\n")
        opened.writestr("acme_zipped-1.2.dist-info/METADATA", "Name: acme-zipped\n")
        opened.writestr("acme_zipped-1.2.dist-info/entry_points.txt", points)
        opened.writestr("plain-1.0.dist-info/METADATA", "")
        opened.writestr("nested/other-1.0.dist-info/entry_points.txt", points)
    return str(file)


def test_packages_in_zip_files_are_found(packages, monkeypatch, tmp_path):
    wheel = zipped(tmp_path / "acme_zipped-1.2-py3-none-any.whl")
    monkeypatch.syspath_prepend(wheel)
    [point] = installed("general_plugins")
    assert (point.package, point.version, point.folder) == ("acme_zipped", "1.2", wheel)
    load_general_plugins()
    assert ADDED["AcmeForCausalLM"] == LLAMA and "acme_zipped" in sys.modules
    monkeypatch.delitem(sys.modules, "acme_zipped")
    assert missing_names("acme_for_vllm") == ["vllm.attention.Attention"]


@pytest.mark.parametrize("points", [b"PK no zip file", None, b"\xff\xfe"])
def test_zip_files_that_cannot_be_read_have_none(packages, monkeypatch, tmp_path, points):
    file = tmp_path / "acme.zip"
    if points is not None and points.startswith(b"PK"):
        file.write_bytes(points)
    else:
        zipped(file, points=points or "#" * (1 << 20) + "\n[quire.general_plugins]\na = b:c\n")
    monkeypatch.syspath_prepend(str(file))
    assert installed("general_plugins") == []


def test_a_plugin_for_vllm_finds_its_names(packages, monkeypatch):
    source = f"""
        from vllm import ModelRegistry
        from vllm.plugins import load_general_plugins
        def register():
            load_general_plugins()  # as vLLM's own plugins may, and nothing waits for itself
            ModelRegistry.register_model("AcmeForCausalLM", "{LLAMA}")
    """
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    packages.install("acme", source, {"vllm.general_plugins": {"acme": "register"}})
    load_general_plugins()
    assert ADDED["AcmeForCausalLM"] == LLAMA


def test_importing_quire_reads_no_entry_points():
    code = (
        "import sys, quire; from quire.config.resolve import resolve; from quire import EngineArgs;"
        "import quire.plugins.entry_points as e; assert not e._all_points.cache_info().misses;"
        "assert 'importlib.metadata' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reserved_names_are_those_of_the_entries_elsewhere():
    from quire.config.args.engine_args import EngineArgs
    from quire.config.args.option import options_of
    from quire.config.ec_transfer_config import EXAMPLE
    from quire.ops.select import PROVIDERS

    assert set(LOAD_FORMATS._reserved) == set(options_of(EngineArgs)["load_format"].choices)
    assert set(OP_PROVIDERS._reserved) == {name for names in PROVIDERS.values() for name in names}
    assert EC_CONNECTORS._reserved == (EXAMPLE,)


def test_a_table_says_what_its_entries_are():
    table = NameTable("colour", {"red": 1}, reserved=["blue"])
    table.register("green", 2)
    assert dict(table) == {"red": 1, "green": 2} and len(table) == 2 and table.added == {"green": 2}
    for name, why in (("red", "own"), ("blue", "own"), ("", "string"), (3, "string")):
        with pytest.raises(PluginError, match=why):
            table.register(name, 3)


def test_plugins_run_in_threads_of_their_own(packages):
    source = """
        import threading
        names = []
        def register():
            names.append(threading.current_thread().name)
    """
    packages.install("acme", source, {GENERAL: {"acme": "register"}})
    load_general_plugins()
    assert sys.modules["acme"].names == ["plugin acme"]
    assert not [t for t in threading.enumerate() if t.name == "plugin acme"]
    assert loading.records()[0].changes == []


def test_what_a_program_registers_reaches_its_processes(packages):
    class Local:
        """Nobody else can import it."""

    quire.ModelRegistry.register_model("AcmeForCausalLM", LLAMA)
    LOAD_FORMATS.register("acme", subprocess.run)
    LOAD_FORMATS.register("local", Local)
    packages.install("acme", ADDS.replace("Acme", "Other"), {GENERAL: {"acme": "register"}})
    load_general_plugins()  # which the process calls itself
    entries = program_entries()
    assert entries == [
        ("quire.models.families:ADDED", "AcmeForCausalLM", LLAMA),
        ("quire.plugins.tables:LOAD_FORMATS", "acme", "subprocess:run"),
    ]
    packages.forget()
    register_all(entries)
    assert ADDED["AcmeForCausalLM"] == LLAMA and LOAD_FORMATS["acme"] == "subprocess:run"


@pytest.mark.full
def test_a_registered_model_runs_in_a_core_of_its_own(packages):
    quire.ModelRegistry.register_model("AcmeForCausalLM", LLAMA)
    llm = quire.LLM(
        hf_overrides={"architectures": ["AcmeForCausalLM"]}, enable_multiprocessing=True
    )
    [output] = llm.generate("The sun", quire.SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2
    llm.close()
