"""Programs for vLLM run unchanged through quire.as_vllm, each in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire import embedded

PROGRAMS = Path(__file__).parent / "programs"


def run(*words, env=(), code=0, cwd=PROGRAMS):
    """What a program under the runner writes to its standard output and its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "quire.as_vllm", *map(str, words)], cwd=cwd, timeout=100,
        env=os.environ | dict(env), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def run_code(*lines, env=()):
    return run("-c", "\n".join(lines), env=env)


def plain_python(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )


# whole programs


def test_an_offline_program():
    flags = ("--model", embedded.path(), "--max_model_len", "256", "--num-tokens=8")
    out, _ = run("offline.py", *flags, "--seed", "3")
    found = json.loads(out.splitlines()[-1])
    assert found["repeated"] == found["texts"][0] != found["texts"][1]
    assert found["chosen"] in ("yes", "no")
    assert found["answered"] and found["counts"] and found["beams"] == 2
    assert found["max_model_len"] == 256


@pytest.mark.full
def test_rollouts_with_a_logits_processor_in_another_process():
    out, _ = run("rollouts.py", env={"MODEL": str(embedded.path())})
    found = json.loads(out.splitlines()[-1])
    assert found == {
        "was_paused": True, "same": True, "num_tokens": 3 * 2 * 24, "banned": False,
        "logprobs": True, "continued": True,
    }  # fmt: skip


@pytest.mark.full
def test_a_server_inside_of_a_program():
    flags = ("--model", embedded.path(), "--max-model-len", "128", "--reasoning-parser", "qwen3")
    out, _ = run("embedded_server.py", *flags)
    assert json.loads(out.splitlines()[-1]) == {
        "served": [401, 200, 4, 1, 0], "max_model_len": 128, "refused": ["headless", "ssl_keyfile"],
    }  # fmt: skip


def test_an_app_without_an_engine_says_so():
    done = plain_python(
        "import quire.as_vllm, asyncio\n"
        "from quire.as_vllm.server import EmbeddedApp\n"
        "app = EmbeddedApp()\n"
        "try: app.include_router\n"
        "except AttributeError as error: print(error)\n"
        "asyncio.run(app({'type': 'http'}, None, None))"
    )
    assert "no 'include_router': mount it" in done.stdout
    assert "call init_app_state before it is served" in done.stderr.splitlines()[-1]


def test_small_functions_of_vllm_s():
    """Each does what its name says; none of them knows the engine."""
    out, _ = run_code(
        "import asyncio, torch",
        "from vllm.utils.async_utils import *",
        "from vllm.utils.math_utils import cdiv, round_down, round_up",
        "from vllm.utils.collection_utils import as_list, chunk_list, is_list_of",
        "from vllm.utils.mem_constants import GiB_bytes",
        "from vllm.utils.network_utils import get_tcp_uri, join_host_port",
        "from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, set_random_seed",
        "from vllm.utils import resolve_obj_by_qualname",
        "assert (cdiv(7, 2), cdiv(6, 2), round_up(7, 4), round_down(7, 4)) == (4, 3, 8, 4)",
        "assert list(chunk_list([1, 2, 3], 2)) == [[1, 2], [3]] and as_list((1,)) == [1]",
        "assert is_list_of([1, 'a'], int) and not is_list_of([1, 'a'], int, check='all')",
        "assert is_list_of([], int) and not is_list_of((1,), int) and GiB_bytes == 2**30",
        "assert get_tcp_uri('::1', 5) == 'tcp://[::1]:5' and join_host_port('a', 5) == 'a:5'",
        "assert STR_DTYPE_TO_TORCH_DTYPE['half'] is torch.float16",
        "assert resolve_obj_by_qualname('asyncio.Queue') is asyncio.Queue",
        "set_random_seed(3); first = torch.rand(2); set_random_seed(3)",
        "assert torch.equal(first, torch.rand(2))",
        "closed = []",
        "async def count(name, end):",
        "    try:",
        "        for number in range(end):",
        "            await asyncio.sleep(0)",
        "            yield number",
        "    finally:",
        "        closed.append(name)",
        "async def main():",
        "    both = merge_async_iterators(count('a', 3), count('b', 2))",
        "    found = await collect_from_async_generator(both)",
        "    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], found",
        "    assert sorted(closed) == ['a', 'b']",
        "    some = merge_async_iterators(count('c', 3), count('d', 3))",
        "    await anext(some); await some.aclose()",
        "    assert sorted(closed) == ['a', 'b', 'c', 'd'], closed",
        "    assert await make_async(lambda x, y: x + y)(1, y=2) == 3",
        "asyncio.run(main()); print('done')",
    )
    assert out == "done\n"


def test_names_that_are_refused_when_they_are_used():
    out, _ = run_code(
        "from vllm.inputs import DataPrompt, EmbedsPrompt, TextPrompt",
        "assert EmbedsPrompt(prompt_embeds=1) == {'prompt_embeds': 1}",
        "either = DataPrompt | dict",
        "print(isinstance({}, DataPrompt))",
        "try: DataPrompt(data=None)",
        "except NotImplementedError as error: print(error)",
    )
    assert out.startswith("False\nQuire has no vllm.inputs.DataPrompt. Give {'data': ...}")


def test_processes_that_a_program_starts():
    out, _ = run("children.py", "--a", "b", code=7)
    assert out.splitlines() == [
        "quire.params.sampling 0.32.0",
        "quire.params.sampling 0.32.0",
        "['--a', 'b'] __main__",
    ]


# the runner


def test_a_module_and_a_command_are_programs_too(tmp_path):
    assert run("-m", "children", "x", code=7)[0].endswith("['x'] __main__\n")
    command = tmp_path / "ask-vllm"
    command.write_text(f"#!{sys.executable}\nimport sys, vllm\nprint(vllm.__version__, sys.argv)\n")
    command.chmod(0o755)
    out, _ = run("ask-vllm", "y", env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert out == f"0.32.0 ['{command}', 'y']\n"


def test_a_program_that_cannot_be_run_is_named():
    assert "usage: python -m quire.as_vllm" in run(code=1)[1]
    assert "there is no program 'nowhere.py'" in run("nowhere.py", code=1)[1]
    assert "is not a Python program" in run("sh", code=1)[1]


def test_the_server_s_names_are_ours():
    out, _ = run("-m", "vllm.entrypoints.cli.main", "--version")
    assert out == plain_python("import quire; print(quire.__version__)").stdout
    out, _ = run("-m", "vllm.entrypoints.openai.api_server", "--help")
    assert out.startswith("usage: quire serve")


def test_the_command_vllm_is_there_for_children(tmp_path):
    code = (
        "import shutil, subprocess, sys",
        "assert shutil.which('vllm')",
        "subprocess.run(['vllm', 'serve', '--help=dtype'], check=True)",
        "subprocess.run('cd / && exec vllm --version', shell=True, check=True)",
        "sys.exit(subprocess.run(['vllm', 'serve', 'no such model, \"$HOME\"']).returncode)",
    )
    hidden = tmp_path / "vllm"
    hidden.write_text("#!/bin/sh\nexit 9\n")
    hidden.chmod(0o755)
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = run("-c", "\n".join(code), env=paths, code=1)
    assert "usage: quire serve" in done[0] or "--dtype" in done[0]
    version = plain_python("import quire; print(quire.__version__)").stdout
    assert done[0].endswith(version)
    assert 'no such model, "$HOME"' in done[1]
    assert run("vllm", "--version", env=paths)[0] == version
    assert plain_python("import quire.as_vllm, shutil; print(shutil.which('vllm'))").stdout == (
        f"{shutil.which('vllm')}\n"
    ), "only the runner's children have it"


def test_a_sitecustomize_behind_ours_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.customized = True")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    child = "import vllm; print(customized, vllm.__version__)"
    assert run("-c", code, child, env={"PYTHONPATH": path})[0] == "True 0.32.0\n"


def test_one_line_is_enough_in_one_process():
    assert plain_python("import quire.as_vllm, vllm; print(vllm.LLM)").returncode == 0
    assert plain_python("import quire, vllm").returncode == 1, "nothing answers unless asked"
    done = plain_python("import sys; sys.modules['vllm'] = sys; import quire.as_vllm")
    assert "another vllm is loaded already" in done.stderr


# names


def test_an_engine_of_weights_may_name_its_information_behind_its_base():
    from quire.executor.weight_transfer.engines import WeightTransferEngine

    class Mine(WeightTransferEngine[dict, list]):
        init_info_cls = dict

    assert Mine.__mro__[1] is WeightTransferEngine


def test_every_name_of_the_table_is_there():
    """Except those whose module of ours is not built yet, which say so."""
    out, _ = run_code(
        "import importlib, importlib.util",
        "from quire.as_vllm.table import MODULES, SERVED, names_of",
        "for module in sorted(MODULES):",
        "    made = importlib.import_module(module)",
        "    for theirs, (home, ours) in names_of(module).items():",
        "        try:",
        "            value = getattr(made, theirs)",
        "        except ImportError as error:",
        "            assert importlib.util.find_spec(home.rpartition('.')[0]) is None, error",
        "            continue",
        "        assert not home or value is getattr(importlib.import_module(home), ours)",
        "        exec(f'from {module} import {theirs}')",
        "print(len(SERVED))",
    )
    assert int(out) > 40


def test_configs_that_are_options_of_an_engine():
    """They are made in a program and checked as the option that they are given to."""
    out, _ = run_code(
        "from vllm import EngineArgs",
        "from typing import get_args",
        "from vllm.config import CompilationConfig, CompilationMode, KVTransferConfig",
        "from vllm.config.model import LogprobsMode",
        "for mode in get_args(LogprobsMode):",
        "    EngineArgs(logprobs_mode=mode).create_engine_config()",
        "config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)",
        "EngineArgs(compilation_config=config).create_engine_config()",
        "from vllm.config import PoolerConfig, ProfilerConfig, StructuredOutputsConfig",
        "plan = EngineArgs(runner='pooling', pooler_config=PoolerConfig(pooling_type='MEAN'),",
        "    profiler_config=ProfilerConfig(profiler='torch', torch_profiler_dir='/nowhere'),",
        "    structured_outputs_config=StructuredOutputsConfig(disable_any_whitespace=True),",
        ").create_engine_config()",
        "forms, profiler = plan.sampling.structured_outputs, plan.parallel.profiler.profiler",
        "print(plan.model.pooler.pooling, profiler, forms)",
        "for more in (",
        "    {'kv_transfer_config': KVTransferConfig(kv_connector='MooncakeConnector',",
        "        kv_role='kv_both')},",
        "):",
        "    try:",
        "        EngineArgs(**more).create_engine_config()",
        "    except NotImplementedError as error:",
        "        print(error)",
    )
    made, refused = out.splitlines()
    assert made.startswith("mean torch ") and "disable_any_whitespace=True" in made
    assert refused.startswith("kv_transfer_config['kv_connector']=")


def test_the_package_can_be_asked_about():
    out, _ = run_code(
        "import importlib.metadata as metadata, importlib.util, sys",
        "print(importlib.util.find_spec('vllm').name, 'vllm' in sys.modules)",
        "print(metadata.version('vllm'), metadata.distribution('vllm').metadata['Name'])",
        "print(metadata.packages_distributions()['vllm'])",
        "print(len([d for d in metadata.distributions() if d.metadata['Name'] == 'vllm']))",
        "import vllm",
        "from vllm import *",
        "print(LLM is vllm.LLM is vllm.entrypoints.llm.LLM, hasattr(vllm, 'nothing'))",
        "print(vllm.version.__version_tuple__, 'torch' in sys.modules)",
        "own = sys.modules['quire.as_vllm.finder'].__file__",
        "print(vllm.__file__ == vllm.inputs.__file__ == own)",
        "print(__import__('vllm.inputs', fromlist=['']).__name__)",
    )
    assert out.splitlines() == [
        "vllm False", "0.32.0 vllm", "['vllm']", "1", "True False", "(0, 32, 0) False",
        "True", "vllm.inputs",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "error", "sentence"),
    [
        ("import vllm.nothing", "ModuleNotFoundError", "Quire has no vllm.nothing."),
        ("from vllm import nothing", "ModuleNotFoundError", "Quire has no vllm.nothing."),
        (
            "import vllm.model_executor.layers.linear",
            "ModuleNotFoundError",
            "described, not programmed",
        ),
        (
            "from vllm.v1.engine.utils import launch_core_engines; launch_core_engines()",
            "NotImplementedError",
            "launch_core_engines",
        ),
        ("from vllm.multimodal.audio import split_audio", "ModuleNotFoundError", "not served"),
        ("import vllm; vllm.nothing", "AttributeError", "Quire has no vllm.nothing."),
        (
            "from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo",
            "ModuleNotFoundError",
            "docs/weight_updates.md",
        ),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(statement, error, sentence):
    done = plain_python(f"import quire.as_vllm\n{statement}")
    assert done.stderr.splitlines()[-1].startswith(f"{error}: ")
    assert sentence in done.stderr.splitlines()[-1]


# environment variables


def test_variables_are_translated_or_reported():
    given = {
        "VLLM_API_KEY": "true",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_LOGGING_LEVEL": "debug",
        "VLLM_USE_V1": "1",
        "VLLM_HOST_IP": "192.0.2.7",
        "VLLM_MAX_N_SEQUENCES": "64",
        "VLLM_NO_SUCH_THING": "x",
    }
    out, err = run_code(
        "import logging, os",
        "assert 'QUIRE_API_KEY' not in os.environ",
        "os.environ['VLLM_WORKER_MULTIPROC_METHOD'] = 'fork'",
        "import vllm, vllm.utils",
        "vllm.SamplingParams(n=64)",
        "try: vllm.SamplingParams(n=65)",
        "except ValueError: print('65 are too many')",
        "print(os.environ['QUIRE_API_KEY'], logging.getLogger('quire').level)",
        "print(vllm.utils.get_ip())",
        "from quire.environment import read_environment; found = read_environment()",
        "print(found.may_load_adapters, found.may_send_functions)",
        env=given,
    )
    assert out == "65 are too many\ntrue 10\n192.0.2.7\nTrue False\n"
    assert err.splitlines() == [
        "VLLM_NO_SUCH_THING=x has no effect: it means nothing here.",
        "VLLM_WORKER_MULTIPROC_METHOD=fork has no effect: processes are always fresh interpreters.",
    ]


def test_a_key_that_would_become_two_is_refused():
    done = plain_python("import quire.as_vllm, vllm", env=os.environ | {"VLLM_API_KEY": "a,b"})
    assert "VLLM_API_KEY has a comma" in done.stderr.splitlines()[-1]


def test_the_page_has_every_module_and_every_variable():
    out, _ = run_code(
        "from quire.as_vllm import table, variables",
        "print(*(name.removeprefix('vllm') or 'vllm' for name in table.SERVED))",
        "print(*variables.TRANSLATED, *variables.TRANSLATED.values(), variables.LOGGING_LEVEL)",
        "print(*variables.TRUE_ANYWAY, *variables.INSTEAD, variables.HOST)",
    )
    page = (PROGRAMS.parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert not [name for name in out.split() if f"`{name}`" not in page]


def test_names_of_the_engine_of_variables_and_of_formats():
    out, _ = run_code(
        "import os, vllm.envs as envs",
        "from vllm.inputs import token_inputs",
        "from vllm.entrypoints.chat_utils import load_chat_template",
        "from vllm.plugins import load_general_plugins; load_general_plugins()",
        "from vllm.tool_parsers import ToolParserManager",
        "from vllm.reasoning import ReasoningParserManager",
        "from vllm.v1.engine import FINISH_REASON_STRINGS, ReconfigureRankType",
        "from vllm.v1.engine.detokenizer import IncrementalDetokenizer",
        "print(envs.VLLM_MAX_N_SEQUENCES, envs.VLLM_CONFIGURE_LOGGING)",
        "os.environ['VLLM_MAX_N_SEQUENCES'] = '7'; print(envs.VLLM_MAX_N_SEQUENCES)",
        "try: envs.VLLM_NO_SUCH_THING",
        "except AttributeError as error: print(error)",
        "print(token_inputs([3], cache_salt='s'))",
        "print(load_chat_template('{{ messages }}'), load_chat_template(None))",
        "parser = ToolParserManager.get_tool_parser('hermes')",
        "print(parser.read('plain').content, 'qwen3' in ReasoningParserManager.list_registered())",
    )
    assert out.splitlines() == [
        "16384 True", "7",
        "Quire has no vllm.envs.VLLM_NO_SUCH_THING. Its variables are those of "
        "docs/compatibility.md; others mean nothing here. docs/compatibility.md has the list.",
        "{'prompt_token_ids': [3], 'cache_salt': 's'}", "{{ messages }} None", "plain True",
    ]  # fmt: skip
