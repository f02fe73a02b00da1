"""Imports go downward only; what must be light is light."""

import re
import subprocess
import sys
from itertools import takewhile
from typing import get_args

from quire.step.columns import AnyPart
from tests.house.package import MODULES, NAMES, ROOT

LEVELS = {
    "errors": 0, "release": 0, "params": 0, "prompts": 0, "outputs": 0, "pooling_outputs": 0,
    "request_options": 0,
    "embedded": 0, "encodable": 0, "file_errors": 0, "unbuilt_names": 0, "lora": 0,
    "environment": 0, "hardware": 0, "start_up": 0, "plugins": 0,
    "generated_methods": 0, "late_meta_kernels": 0,
    "io_processor": 1,
    "step": 1, "scheduling": 1, "text": 1, "ops": 1, "observability": 1, "processes": 1,
    "clusters": 1,
    "kernels": 2, "models": 2, "quantization": 2, "distributed": 2, "media": 2,
    "tiers": 2, "trainers": 3,
    "config": 3, "runner": 3, "model_registry": 3,
    "executor": 4, "engine": 4, "grammar": 4, "beam_search": 4,
    "llm": 5, "llm_pooling": 5, "server": 5,
    "__init__": 5,
    "cli": 6, "bench": 6, "testing": 6, "as_vllm": 6, "__main__": 6,
}  # fmt: skip
"""The folders and files of the package. Those of one level may see each other, in no circle."""

ROOMS = {
    "unbuilt": 0, "counterparts": 0, "arguments": 0, "event_loop": 0, "progress": 0, "wire": 0,
    "stats": 1, "control_verbs": 1, "weight_methods": 1,
    "outputs": 2,
    "core": 2,
    "process": 3,
    "data_parallel": 4,
    "client": 5,
    "shared_cores": 6,
    "frontend": 7,
    "launcher": 8, "llm_engine": 8, "async_llm": 8,
    "offline": 9, "beam_runner": 9,
    "__init__": 9,
}  # fmt: skip
"""The same inside engine/."""

LATE = {("quire.ops.select", "kernels")}
"""Imports from above that are found by name at run time, and said so where they are."""


def part(name, depth):
    """Component `depth` of a module's name: `part("quire.ops.kv", 1)` is "ops"."""
    return (*name.split("."), "__init__")[depth]


def edges(prefix, depth):
    """(module, its part, part that it imports) for imports between the parts below `prefix`."""
    for module in MODULES:
        mine = part(module.name, depth) if (module.name + ".").startswith(prefix) else None
        for other in sorted(module.imports) if mine else ():
            theirs = part(other, depth) if (other + ".").startswith(prefix) else mine
            if theirs != mine != "__init__":
                yield module.name, mine, theirs


def test_every_part_has_a_level():
    for levels, prefix, depth in ((LEVELS, "quire.", 1), (ROOMS, "quire.engine.", 2)):
        parts = {part(name, depth) for name in NAMES if (name + ".").startswith(prefix)}
        assert parts == set(levels)


def test_imports_go_down():
    upward = {
        (name, theirs) for name, mine, theirs in edges("quire.", 1) if LEVELS[theirs] > LEVELS[mine]
    }
    assert upward == LATE


def test_imports_inside_the_engine_go_down():
    assert not {
        (name, theirs)
        for name, mine, theirs in edges("quire.engine.", 2)
        if ROOMS[theirs] > ROOMS[mine]
    }


def circle(graph):
    """The nodes of one circle in {node: nodes that it leads to}, or None."""
    done, trail = set(), []

    def visit(node):
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return None
        trail.append(node)
        found = next(filter(None, map(visit, sorted(graph.get(node, ())))), None)
        trail.pop()
        done.add(node)
        return found

    return next(filter(None, map(visit, sorted(graph))), None)


def test_a_circle_is_found():
    assert circle({"a": {"b", "d"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_no_module_imports_itself_in_a_circle():
    """Type-only imports, those inside of functions and those by string included."""
    found = circle({module.name: module.imports for module in MODULES})
    assert found is None, " -> ".join(found)


def test_folders_have_no_circles():
    graph = {}
    for name, mine, theirs in edges("quire.", 1):
        if (name, theirs) not in LATE:
            graph.setdefault(mine, set()).add(theirs)
    found = circle(graph)
    assert found is None, " -> ".join(found)


def test_no_two_folders_side_by_side_import_each_other():
    folders = {name.rpartition(".")[0] for name in NAMES} - {"", "quire"}
    seen = set()
    for module in MODULES:
        for other in module.imports:
            if (module.name, part(other, 1)) in LATE:
                continue
            pairs = zip(module.name.split("."), other.split("."), strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            mine, theirs = (
                ".".join(name.split(".")[: shared + 1]) for name in (module.name, other)
            )
            if {mine, theirs} <= folders and mine != theirs:
                seen.add((mine, theirs))
    assert len(seen) > 100
    assert not {(mine, theirs) for mine, theirs in seen if (theirs, mine) in seen}


def test_scheduling_and_the_runner_know_each_other_by_the_messages_of_a_step():
    seen = {"runner": set(), "scheduling": set(), "step": set()}
    for module in MODULES:
        seen.setdefault(part(module.name, 1), set()).update(module.imports)
    assert not any(part(name, 1) == "scheduling" for name in seen["runner"])
    assert not any(part(name, 1) == "runner" for name in seen["scheduling"])
    assert "quire.step.columns" not in seen["scheduling"], "the scheduler needs no numpy"
    assert {part(name, 1) for name in seen["step"]} <= {"step", "params", "errors", "encodable"}


def test_the_core_sees_nothing_of_the_runner():
    """What crosses the executor is in step/; the program of workers asks for what options
    name.
    """
    for module in MODULES:
        if module.name.startswith(("quire.engine.core.", "quire.grammar.")):
            seen = {name for name in module.imports if part(name, 1) == "runner"}
            allowed = module.name == "quire.engine.core.worker_program"
            assert not seen or allowed, f"{module.name} imports {seen}"


LIGHT = (
    "quire",
    "quire.errors",
    "quire.params",
    "quire.prompts",
    "quire.outputs",
    "quire.config.args.engine_args",
    "quire.config.resolve.resolve",
    "quire.step.plan",
    "quire.step.result",
    "quire.scheduling.scheduler",
)
WITHOUT_TORCH = (
    "quire.text.tokenizer",
    "quire.text.detokenizer",
    "quire.models",
    "quire.models.families",
    "quire.engine.wire.messages",
    "quire.engine.client.client",
    "quire.engine.control_verbs",
    "quire.engine.frontend.frontend",
    "quire.cli.main",
    "quire.media.loader",
    "quire.media.placed",
    "quire.llm",
)

OF_EVERY_START = (
    "quire.config.planning",
    "quire.engine.core.builder",
    "quire.engine.frontend.frontend",
    "quire.executor.worker_builder",
    "quire.llm",
)

OF_A_SERVER = (
    "quire.config.planning",
    "quire.cli.serve",
    "quire.engine.async_llm",
    "quire.server.serving",
)
MOST_OF_A_SERVER = 425
"""Modules of Quire that a server imports before its first request."""


def run_python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def import_without(missing, modules):
    code = (
        "import importlib, sys; sys.modules.update(dict.fromkeys(sys.argv[1].split()));"
        "[importlib.import_module(name) for name in sys.argv[2:]]"
    )
    done = run_python(code, missing, *modules)
    assert done.returncode == 0, done.stderr


def test_light_modules_need_no_heavy_ones():
    import_without("torch numpy transformers", LIGHT)


def test_modules_without_torch():
    import_without("torch transformers", WITHOUT_TORCH)


def test_text_needs_no_media():
    """Few models take pictures, and their encoders and processors take time to import."""
    import_without("quire.media quire.models.vision", OF_EVERY_START)


def test_a_plain_start_imports_what_it_uses():
    """A model of attention and dense layers, in this process, from safetensors."""
    few = (
        "zmq jinja2 quire.engine.launcher quire.engine.client.core_sockets quire.grammar.guidance "
        "quire.config.args.async_engine_args quire.executor.adapter_support "
        "quire.models.feed_forward.mixture quire.models.foreign.load quire.models.streams "
        "quire.models.loading.readers.pickled_files quire.models.mixers.latent "
        "quire.models.mixers.recurrent.layers quire.models.mixers.compressed.layers "
        "quire.models.pooling.pooler quire.runner.offloaded_weights quire.runner.pooling"
    )
    import_without(few, OF_EVERY_START)


def test_a_server_imports_what_every_server_uses():
    """Routes of other dialects, formats of outputs and of weights come with what needs them."""
    rare = (
        "psutil importlib.metadata quire.clusters.ray_cluster "
        "quire.engine.data_parallel.coordinator quire.engine.data_parallel.handshake "
        "quire.engine.shared_cores.broker "
        "quire.models.drafting.eagle quire.models.formats.awq quire.models.formats.mlx "
        "quire.server.admin quire.server.anthropic.routes quire.server.control.drain "
        "quire.server.http.openapi quire.server.invocations quire.server.page.routes "
        "quire.server.pooling.embeddings quire.server.responses.routes quire.server.tokens "
        "quire.server.output_parsing.formats.harmony quire.text.tokenizer_formats.sentencepiece "
        "quire.server.output_parsing.formats.parameter_formats quire.text.markup"
    )
    import_without(rare, OF_A_SERVER)
    code = (
        "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]];"
        "print(sum(name.startswith('quire') for name in sys.modules))"
    )
    assert int(run_python(code, *OF_A_SERVER).stdout) <= MOST_OF_A_SERVER


def test_import_is_quick():
    """It takes a third of the time of the standard library's asyncio."""
    code = (
        "import time; start = time.process_time(); import quire; middle = time.process_time();"
        "import asyncio; print((middle - start) / (time.process_time() - middle))"
    )
    assert min(float(run_python(code).stdout) for _ in range(3)) < 0.8


def test_the_core_names_no_feature():
    """Adapters and grammars are plugged in (engine/core/features/); so is what comes next."""
    text = (ROOT / "src/quire/engine/core/core.py").read_text(encoding="utf-8")
    assert re.findall(r"(?i)adapter|lora|grammar|structured", text) == []


MOST_FILES_OF_A_PART = 6
"""Files below the faces that may name a kind of output: the kind, the half that makes it, the half
that keeps it, and who builds these two.
"""

FACES_OF_PARTS = ("quire.outputs", "quire.server.", "quire.as_vllm.", "quire.testing.")


def test_a_kind_of_output_is_known_in_few_files():
    """Messages, broker, journal, core and front end treat all alike (step/part.py)."""
    for kind in get_args(AnyPart):
        named = {
            module.name
            for module in MODULES
            if not module.name.startswith(FACES_OF_PARTS)
            and re.search(rf"\b{kind.__name__}\b", module.text)
        }
        assert len(named) <= MOST_FILES_OF_A_PART, sorted(named)
        assert not named & ALIKE, kind


ALIKE = {
    "quire.engine.wire.messages",
    "quire.engine.shared_cores.split_outputs",
    "quire.engine.client.journal",
    "quire.engine.core.core",
    "quire.engine.core.fault_isolation",
    "quire.engine.frontend.output_processor",
    "quire.engine.frontend.request_state",
}
"""Modules that treat all kinds of output alike."""
