"""Print what this machine offers: cores, CPU features, memory, torch, the embedded model; and for
each op the provider that serves it, with the reason why the others do not.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING

from quire.config.kv_pool_size import gib
from quire.environment import VARIABLES, read_environment, read_plugin_environment
from quire.hardware.cpu_list import format_cpus
from quire.hardware.facts import MachineFacts
from quire.hardware.placement import place

if TYPE_CHECKING:
    from quire.ops.catalog import Choice

_PACKAGES = ("torch", "numpy", "msgspec", "tokenizers", "safetensors", "huggingface_hub", "jinja2")
_EXTRAS = ("transformers",)
_DEVICES = {"cpu": "CPUs", "cuda": "NVIDIA GPUs"}

Lines = list[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if something that is needed does not work."""
    report: Lines = []
    is_well = True
    for section in (
        _software,
        _machine,
        _plugins,
        _torch,
        _gpu,
        _native,
        _providers,
        _embedded,
        _environment,
    ):
        is_well &= _try(section, report)
    if args.json:
        print(json.dumps(dict(report), indent=1))
    else:
        width = max(len(name) for name, _ in report)
        print("\n".join(f"{name:{width}}  {value}" for name, value in report))
    return 0 if is_well else 1


def _try(section: Callable[[], Lines], report: Lines) -> bool:
    """Add a section; what fails in it is a line of the report."""
    try:
        report += section()
    # a report of what does not work is what the command is for
    except Exception as error:
        name = section.__name__.strip("_")
        report.append((name, f"FAILED: {type(error).__name__}: {error}"))
        return False
    return True


def _software() -> Lines:
    versions = [("python", f"{platform.python_version()} on {platform.platform()}")]
    versions += [(name, metadata.version(name)) for name in _PACKAGES]
    return versions + [(f"{name} (optional)", _optional_version(name)) for name in _EXTRAS]


def _optional_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _plugins() -> Lines:
    from quire.plugins import GROUPS, all_installed, allowed, load_general_plugins, records

    load_general_plugins()
    found = {record.point: record for record in records()}
    lines: Lines = []
    for point in all_installed():
        record = found.get(point)
        if not allowed(point):
            state = "left out: VLLM_PLUGINS does not name it"
        elif record is None:
            state = GROUPS[point.group]
        else:
            state = record.failure or f"added {', '.join(record.changes) or 'nothing to tables'}"
        package = f"{point.package} {point.version}".strip()
        where = f"{point.value} of {package} in {point.folder}"
        lines.append((f"plugin {point.name} ({point.prefix}.{point.group})", f"{where}: {state}"))
    wanted = read_plugin_environment().names or ()
    absent = sorted(set(wanted) - {point.name for point in all_installed()})
    lines += [(f"plugin {name}", "is named by VLLM_PLUGINS, and not installed") for name in absent]
    return lines or [("plugins", "none installed")]


def _machine() -> Lines:
    from quire.hardware.host import gather_machine_facts

    facts = gather_machine_facts()
    return [
        ("cpu", f"{facts.cpu_name} ({platform.machine()})"),
        ("cores", describe_cores(facts)),
        ("threads", describe_threads(facts)),
        ("cpu features", " ".join(facts.features) or "none that matter"),
        (
            "16-bit arithmetic",
            f"bfloat16 {_in(facts.has_fast_bfloat16)}, float16 {_in(facts.has_fast_float16)}",
        ),
        (
            "memory",
            f"{gib(facts.free_memory_bytes)} free of {gib(facts.total_memory_bytes)}, "
            f"limited by {facts.memory_limit_source}",
        ),
    ]


def describe_cores(facts: MachineFacts) -> str:
    """The cores that this process may use, and how they are built together."""
    cpus = facts.cpus
    slow = len({cpu.core for cpu in cpus if cpu.is_efficient})
    cores = len({cpu.core for cpu in cpus}) or facts.num_cores
    kinds = f" ({cores - slow} performance, {slow} efficiency)" if slow else ""
    plural = "" if cores == 1 else "s"
    parts = [f"{cores} core{plural}{kinds}"]
    if facts.num_cpus > cores:
        parts.append(f"{facts.num_cpus} logical CPUs")
    caches, nodes = len({cpu.cache for cpu in cpus}), len({cpu.node for cpu in cpus})
    if 1 < caches < cores:
        parts.append(f"{caches} last-level caches")
    if nodes > 1:
        parts.append(f"{nodes} NUMA nodes")
    if facts.cpu_quota < math.inf:
        parts.append(f"a quota of {facts.cpu_quota:.3g} CPUs")
    return ", ".join(parts)


def describe_threads(facts: MachineFacts) -> str:
    """The number of threads of an engine, their CPUs, and the reason."""
    placement = place(facts)
    room = placement.rooms[0]
    where = f"on CPUs {format_cpus(room)}" if room else "on any CPU"
    return f"{placement.num_threads} {where} ({placement.reason})"


def _in(fast: bool) -> str:
    return "in hardware" if fast else "emulated"


def _torch() -> Lines:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return [("torch cpu", f"{capability}, {torch.get_num_threads()} threads")]


def _gpu() -> Lines:
    from quire.hardware.nvidia import find_gpu, torch_cuda_version, torch_for_other_gpus

    gpu, missing = find_gpu()
    built_for, other = torch_cuda_version(), torch_for_other_gpus()
    torch_cuda = "built without CUDA" if built_for is None else f"built for CUDA {built_for}"
    torch_cuda = f"built for {other}, which is not supported" if other else torch_cuda
    if gpu is None:
        return [("gpu", missing), ("torch cuda", torch_cuda)]
    memory = f"{gib(gpu.free_memory_bytes)} free of {gib(gpu.total_memory_bytes)}"
    capability = ".".join(map(str, gpu.capability))
    fp8 = "in hardware" if gpu.has_fp8 else "none: quantization and kv_cache_dtype can be int8"
    return [
        ("gpu", f"{gpu.name}, compute capability {capability}, {gpu.num_multiprocessors} SMs"),
        ("gpu 8-bit floats", fp8),
        ("gpu memory", memory),
        ("torch cuda", torch_cuda),
        *_gpu_providers(),
    ]


def _gpu_providers() -> Lines:
    import torch

    from quire.ops import select

    if not torch.cuda.is_available():
        return [("gpu ops", "torch finds no GPU that it can use")]
    lines: Lines = []
    for deterministic in (False, True):
        ops = select(device="cuda", dtype=torch.bfloat16, deterministic=deterministic)
        served = [choice for choice in ops.report() if not deterministic]
        lines += [(f"gpu op {choice.op}", describe(choice, "cuda")) for choice in served]
        name = "gpu batch invariant" + (", deterministic" if deterministic else "")
        lines.append((name, "yes" if ops.batch_invariant else f"no: {ops.invariance_reason}"))
    return lines


def _native() -> Lines:
    from quire.kernels.cpu.runtime import describe_native

    return describe_native(read_environment().cpu_isa)


def _providers() -> Lines:
    import torch

    from quire.ops import select

    ops = select(device="cpu", dtype=torch.bfloat16)
    lines = [(f"op {choice.op}", describe(choice, "cpu")) for choice in ops.report()]
    invariant = "yes" if ops.batch_invariant else f"no: {ops.invariance_reason}"
    return [*lines, ("batch invariant", invariant)]


def describe(choice: Choice, device: str) -> str:
    """The provider that serves an op on a device, and the reasons why the others do not."""
    from quire.ops.select import PLAIN, PROVIDERS
    from quire.plugins.tables import OP_PROVIDERS

    # providers of plugins are asked first
    order = (*OP_PROVIDERS, *PROVIDERS[device])
    rank = order.index(choice.provider)
    reasons = [choice.why] if choice.why else []
    unnamed = [name for name in order[:rank] if f"{name}: " not in choice.why]
    reasons += [f"{name}: has no {choice.op}" for name in unnamed]
    for name in order[rank + 1 :]:
        fallback = "the fallback" if name == PLAIN else "the next choice"
        reasons.append(f"{name}: {fallback} after {choice.provider}")
    for other, names in PROVIDERS.items():
        foreign = [name for name in names if name not in order]
        if foreign:
            reasons.append(f"{', '.join(foreign)}: for {_DEVICES[other]}")
    return f"{choice.provider} ({'; '.join(reasons)})"


def _embedded() -> Lines:
    from quire.config.args.engine_args import EngineArgs

    plan = EngineArgs(skip_tokenizer_init=True).create_engine_config()
    return [("embedded model", f"{plan.model.architecture}, in {plan.model.model_folder}")]


def _environment() -> Lines:
    environment = read_environment()
    known = ", ".join(variable.name for variable in VARIABLES)
    lines = [("cache folder", str(environment.cache_dir)), ("environment", f"reads {known}")]
    unknown = [(name, "is set, but is not a variable of Quire's") for name in environment.unknown]
    return lines + unknown
