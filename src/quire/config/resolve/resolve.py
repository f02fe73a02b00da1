"""Makes a plan from arguments and facts: a pure function, so that a changed default is a changed
line in a golden file.

Rules 12.2 to 12.7 and 12.13 of the reference, as far as this release implements them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.clusters.ray_place import RayPlace
from quire.config.args.engine_options import EngineOptions
from quire.config.args.option import check, options_of, tuning_of
from quire.config.facts import ModelFacts
from quire.config.generation_defaults import eos_token_ids, sampling_defaults
from quire.config.histogram_buckets import histogram_buckets, sizes_up_to
from quire.config.plan import EnginePlan
from quire.config.profiler_config import profiler_config
from quire.config.resolve.adapters import decide_adapters
from quire.config.resolve.classes import importable_name
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.device import choose_device
from quire.config.resolve.dtype import decide_dtype, decide_quantization
from quire.config.resolve.hidden_states import decide_hidden_states
from quire.config.resolve.implementation import decide_implementation
from quire.config.resolve.kv_connector import decide_kv_connector
from quire.config.resolve.kv_tier import decide_kv_events, decide_kv_tier
from quire.config.resolve.mapping import decide_load_format
from quire.config.resolve.media import decide_media
from quire.config.resolve.memory import decide_memory
from quire.config.resolve.offload import decide_offload
from quire.config.resolve.parallel import (
    decide_data_parallel,
    decide_expert_parallel,
    num_cores_here,
)
from quire.config.resolve.pooling import decide_pooling, note_pooled_length
from quire.config.resolve.prompt_embeds import decide_prompt_embeds
from quire.config.resolve.ranks import decide_ranks, num_workers_here
from quire.config.resolve.schedule import decide_schedule
from quire.config.resolve.speculation import decide_speculation
from quire.config.structured_outputs_config import structured_outputs_config
from quire.errors import InvalidParameter, NotBuiltYet
from quire.hardware.binding import (
    AUTOMATIC,
    NO_BINDING,
    VARIABLE,
    bind_by_lists,
    bind_by_nodes,
)
from quire.hardware.cpu_list import format_cpus
from quire.hardware.facts import MachineFacts
from quire.hardware.launched import LaunchedProcess
from quire.hardware.placement import Placement, place
from quire.models.layer_memory import KeyValues, Latents, LayerMemory, RecurrentState
from quire.params.weight_transfer import weight_transfer_plan

_LARGE_VOCABULARY = 32_768
"""Tokens from which on reading the vocabulary for grammars takes a noticeable time."""


def resolve(
    args: EngineOptions,
    model: ModelFacts,
    machine: MachineFacts,
    *,
    is_headless: bool = False,
    installed_processors: Sequence[str] = (),
    launched: LaunchedProcess | None = None,
    ray: RayPlace | None = None,
) -> EnginePlan:
    """Decide everything about an engine. Pure; `args` is not changed. `is_headless`: its cores
    serve a front end elsewhere. `installed_processors`: the logits processors that packages bring,
    as "module:Class". `launched`: this process, where an external launcher has started it; `ray`:
    its place in the cluster that is to have the workers.

    Raises InvalidParameter, InvalidType or NotBuiltYet for an invalid argument, LoadError if the
    model does not fit the machine.
    """
    check_args(args)
    machine, reason = choose_device(args, machine)
    decisions = Decisions(args, model, machine)
    decisions.decide("device", machine.device, reason)
    why = "not an external launcher" if launched is None else "as the launcher's environment says"
    decisions.decide("ray", ray, "distributed_executor_backend")
    decisions.decide("launched", launched, f"who starts processes: {why}")
    _decide_model(decisions)
    decide_dtype(decisions)
    decide_quantization(decisions)
    # the order is that of need: each decision reads earlier ones, and `Decisions.value` fails
    # otherwise
    decide_adapters(decisions)
    decide_media(decisions)
    _decide_machine(decisions, is_headless)
    decide_offload(decisions)
    decide_hidden_states(decisions)
    decide_kv_connector(decisions)
    length = decide_schedule(decisions)
    decide_speculation(decisions, length)
    decide_kv_tier(decisions)
    decide_kv_events(decisions)
    decide_memory(decisions, length)
    note_pooled_length(decisions)
    _decide_output(decisions, installed_processors)
    return decisions.plan()


def check_args(args: EngineOptions) -> None:
    """Raise for the first argument with a value that it may not have, by type, range and choice."""
    values = vars(args)
    for name, option in options_of(args).items():
        check(name, values[name], option)


def _decide_model(d: Decisions) -> None:
    args, model = d.args, d.model
    d.decide("model", model.name, "no model was given" if model.is_embedded else "model was given")
    d.decide("model_folder", model.folder, "where its files are")
    _decide_names(d)
    d.decide("architecture", model.architecture, "architectures of config.json")
    decide_load_format(d)
    decide_implementation(d)
    decide_pooling(d)
    decide_prompt_embeds(d)
    d.decide("vocab_size", model.vocab_size, "rows of the model's embedding")
    d.decide("hf_config", model.hf_config, "config.json with hf_overrides")
    if model.foreign_keys:
        d.note(f"Nothing reads these keys of config.json: {model.foreign_keys}.")
    if model.part_of is not None:
        d.note(f"Only text is served: the model is the text part of {model.part_of}.")
    d.requested("seed")
    if args.skip_tokenizer_init:
        d.decide("tokenizer_folder", None, "skip_tokenizer_init was given")
    else:
        own = "the model's own" if args.tokenizer is None else "tokenizer was given"
        d.decide("tokenizer_folder", model.tokenizer_folder, own)
    if args.tokenizer_mode == "auto":
        d.decide("tokenizer_mode", model.tokenizer_mode, "the tokenizer files in the folder")
    else:
        d.requested("tokenizer_mode")
    source = model.template_source or "left to the tokenizer"
    d.decide("chat_template", model.template, source)
    d.requested("enable_return_routed_experts")


def _decide_names(d: Decisions) -> None:
    given = d.args.served_model_name
    if given is None:
        d.decide("served_model_names", (d.model.name,), "the model's name")
        return
    names = (given,) if isinstance(given, str) else tuple(given)
    if not all(name.strip() for name in names):
        hint = "Leave it out: the name is then that of `model`."
        raise InvalidParameter("served_model_name", given, "a name has a character", hint)
    d.decide("served_model_names", names, "served_model_name was given")


def _decide_machine(d: Decisions, is_headless: bool) -> None:
    decide_data_parallel(d, is_headless)
    decide_expert_parallel(d)
    decide_ranks(d, is_headless)
    d.requested("max_core_restarts")
    d.requested("spare_core")
    _decide_threads(d)
    _decide_graphs(d)
    d.requested("deterministic", "is_deterministic")


def _decide_graphs(d: Decisions) -> None:
    if d.value("enable_expert_parallel"):
        d.decide("use_graphs", False, "tokens leave the core in the middle of a step")
    elif d.value("model_impl") == "transformers":
        d.decide(
            "use_graphs", False, "the model's code is that of transformers, called in each step"
        )
    elif not d.value("generates") and d.machine.device == "cuda":
        d.decide("use_graphs", False, "pooling alone has no steps of decodes that graphs are for")
    elif d.args.enforce_eager:
        d.decide("use_graphs", False, "enforce_eager")
    elif d.args.optimization_level == 0:
        d.decide("use_graphs", False, "optimization_level is 0")
    elif d.machine.device == "cuda" and any(map(_is_chunked, d.model.memories)):
        d.decide("use_graphs", False, "attention in chunks has another number of rows each step")
    elif d.machine.device == "cuda" and any(map(_is_walked, d.model.memories)):
        d.decide("use_graphs", False, "the host walks over tokens, for which there is no kernel")
    elif d.machine.device == "cuda":
        d.decide("use_graphs", True, "steps of decodes replay CUDA graphs captured at start")
    else:
        d.decide("use_graphs", True, "steps replay a program recorded at start")


def _is_chunked(memory: LayerMemory | None) -> bool:
    return isinstance(memory, KeyValues) and memory.is_chunked


def _is_walked(memory: LayerMemory | None) -> bool:
    if isinstance(memory, RecurrentState):
        return not memory.has_kernels
    return isinstance(memory, Latents) and memory.is_indexed


def _decide_threads(d: Decisions) -> None:
    if d.value("launched") is not None:
        _decide_own_threads(d, d.value("launched"))
        return
    workers, given = num_workers_here(d), d.args.cpu_threads
    size = num_cores_here(d) * workers
    # cpu_threads is given for a core, whose workers share them
    each = None if given is None else max(1, given // workers)
    placement = _bound(d, size, each) or place(d.machine, num_engines=size, num_threads=each)
    why = placement.reason if given is None or workers == 1 else f"{given} shared by {workers}"
    d.decide("num_threads", placement.num_threads, why)
    if d.machine.device != "cpu":
        d.decide("thread_cpus", ("",) * size, "any: the device computes")
    elif _ray_places(d):
        d.decide("thread_cpus", ("",) * size, "any: the machine is Ray's choice")
    elif not any(placement.rooms):
        d.decide("thread_cpus", ("",) * size, "any: no CPU is better than another")
    else:
        rooms = tuple(format_cpus(room) for room in placement.rooms)
        d.decide("thread_cpus", rooms, "one of each core that should compute")


def _ray_places(d: Decisions) -> bool:
    return "ray" in (d.value("data_parallel_backend"), d.value("distributed_executor_backend"))


def _bound(d: Decisions, size: int, num_threads: int | None) -> Placement | None:
    """The placement that the user asks for; None: none in particular."""
    args, machine = d.args, d.machine
    for name in ("numa_bind_nodes", "numa_bind_cpus"):
        if vars(args)[name] is not None and not args.numa_bind:
            raise InvalidParameter(name, vars(args)[name], "it goes with numa_bind", "Give both.")
    text = machine.threads_bind
    if _ray_places(d) and (args.numa_bind or text not in (NO_BINDING, AUTOMATIC)):
        name, given = ("numa_bind", True) if args.numa_bind else (VARIABLE, text)
        raise InvalidParameter(name, given, "the machines are Ray's choice", "Leave it out.")
    if machine.device != "cpu":
        if args.numa_bind:
            raise NotBuiltYet("numa_bind", True, "Use numactl for engines on GPUs.")
        return None
    if args.numa_bind_cpus is not None:
        lists = args.numa_bind_cpus
        lists = [lists] if isinstance(lists, str) else list(lists)
        return bind_by_lists(machine, "numa_bind_cpus", lists, size, num_threads)
    if args.numa_bind:
        nodes = args.numa_bind_nodes
        nodes = [nodes] if isinstance(nodes, str) else nodes
        return bind_by_nodes(machine, nodes, size, num_threads)
    if text == NO_BINDING:
        # the number of threads is still that of a placement, and only the CPUs are open
        free = place(machine, num_engines=size, num_threads=num_threads)
        return msgspec.structs.replace(free, rooms=((),) * size)
    if text != AUTOMATIC:
        return bind_by_lists(machine, VARIABLE, text.split("|"), size, num_threads)
    return None


def _decide_own_threads(d: Decisions, launched: LaunchedProcess) -> None:
    """Fix the threads of one of several processes that share the machine."""
    size = launched.local_world_size
    given = d.args.cpu_threads
    placement = _bound(d, size, given) or place(d.machine, num_engines=size, num_threads=given)
    d.decide("num_threads", placement.num_threads, placement.reason)
    room = placement.rooms[launched.local_rank] if d.machine.device == "cpu" else ()
    why = f"process {launched.local_rank} of {size} on this host"
    d.decide("thread_cpus", (format_cpus(room) if room else "",), why)


def _decide_output(d: Decisions, installed_processors: Sequence[str]) -> None:
    args, model = d.args, d.model
    if d.value("enable_return_routed_experts") and not model.num_experts:
        why = "the model has no experts"
        raise InvalidParameter("enable_return_routed_experts", True, why, "Leave it out.")
    if args.max_logprobs == -1:
        d.decide("max_logprobs", model.vocab_size, "max_logprobs=-1: the whole vocabulary")
    else:
        d.requested("max_logprobs")
    d.requested("logprobs_mode")
    _decide_processors(d, installed_processors)
    override = args.override_generation_config or {}
    source = model.generation_config_source or "no generation config"
    if override:
        source += " and override_generation_config"
    defaults = sampling_defaults(model.generation_config, override)
    d.decide("sampling_defaults", defaults, source)
    ids = eos_token_ids(model.generation_config, override, model.vocab_size)
    d.decide("generation_eos_token_ids", ids, source)
    d.decide("log_stats", not args.disable_log_stats, f"disable_log_stats={args.disable_log_stats}")
    d.requested("stream_interval")
    _decide_io_processor(d)
    why = "reasoning_config" + (" was given" if args.reasoning_config else ": none")
    d.decide("reasoning_marks", _reasoning_marks(args.reasoning_config), why)
    d.requested("otlp_traces_endpoint")
    buckets = histogram_buckets(args.custom_histogram_buckets)
    why = "custom_histogram_buckets" + (" were given" if buckets else ": none")
    d.decide("histogram_buckets", buckets, why)
    lengths = sizes_up_to(d.value("max_model_len"))
    d.decide("length_buckets", lengths, "1, 2, 5, 10, ... up to max_model_len")
    d.decide("foreign_tuning", tuning_of(args), "options that change nothing here, as given")
    profiler = profiler_config(args.profiler_config)
    why = "profiler_config" + (" was given" if profiler else ": none")
    d.decide("profiler", profiler, why)
    own = None if args.worker_cls == "auto" else importable_name("worker_cls", args.worker_cls)
    d.decide("worker_cls", own, "worker_cls was given" if own else "Quire's own")
    extension = args.worker_extension_cls or None
    why = "worker_extension_cls" + (" was given" if extension else ": none")
    d.decide("worker_extension_cls", extension, why)
    transfer = weight_transfer_plan(args.weight_transfer_config)
    why = "weight_transfer_config" + (" was given" if transfer else ": none")
    d.decide("weight_transfer", transfer, why)
    scheduler = importable_name("scheduler_cls", args.scheduler_cls)
    why = "scheduler_cls was given" if scheduler else "Quire's own"
    d.decide("scheduler_cls", scheduler, why)
    forms = structured_outputs_config(args.structured_outputs_config)
    if forms.prepare is None:
        is_large = d.model.vocab_size >= _LARGE_VOCABULARY and d.value("generates")
        # a program may never ask for a form, a server's first caller would wait for the reading
        prepare = args.serves_several_callers and is_large
        forms = msgspec.structs.replace(forms, prepare=prepare)
    given_forms = args.structured_outputs_config
    d.decide(
        "structured_outputs",
        forms,
        "structured_outputs_config was given" if given_forms else "the defaults",
    )


def _decide_processors(d: Decisions, installed: Sequence[str]) -> None:
    """Decide the logits processors where tokens are drawn; installed packages' come first."""
    given = tuple(d.args.logits_processors or ())
    why = "logits_processors" + (" were given" if given else ": none")
    if installed and d.value("generates"):
        given, why = (*installed, *given), f"{why}; packages bring {', '.join(installed)}"
    d.decide("logits_processors", given, why)


def _decide_io_processor(d: Decisions) -> None:
    """Decide the plugin: the option's, else the one that the model's config.json names."""
    named = d.model.hf_config.get("io_processor_plugin")
    if d.args.io_processor_plugin is not None or named is None:
        d.requested("io_processor_plugin")
        return
    if not isinstance(named, str) or not named:
        allowed = "config.json names a plugin by a text"
        raise InvalidParameter("io_processor_plugin", named, allowed)
    d.decide("io_processor_plugin", named, "config.json names it")


def _reasoning_marks(given: dict[str, Any] | None) -> tuple[str, ...]:
    """The marks of a reasoning's start and end; none if they are not known."""
    if not given:
        return ()
    names = ("reasoning_start_str", "reasoning_end_str")
    marks = tuple(given.get(name) for name in names)
    if set(given) != set(names) or not all(isinstance(mark, str) and mark for mark in marks):
        allowed = f"it has {names[0]} and {names[1]}, both texts that are not empty"
        raise InvalidParameter("reasoning_config", given, allowed)
    return tuple(str(mark) for mark in marks)
