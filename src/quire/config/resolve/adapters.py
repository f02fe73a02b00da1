"""Decides how many LoRA adapters an engine serves, and refuses where there can be none."""

from __future__ import annotations

from quire.config.adapter_plan import AdapterPlan
from quire.config.args.engine_options import LORA_RANKS, EngineOptions
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.dtype import ITEMSIZE
from quire.errors import InvalidParameter, NotBuiltYet

_ITS_OPTIONS = ("max_loras", "max_cpu_loras", "lora_dtype", "lora_target_modules")


def decide_adapters(d: Decisions) -> None:
    """Fix `adapters`, which needs `dtype` and `model_impl`.

    Raises InvalidParameter for options that contradict each other, NotBuiltYet for engines that
    cannot have adapters.
    """
    args = d.args
    if not args.enable_lora:
        _check_unused(args)
        d.decide("adapters", None, "enable_lora: no")
        return
    _check_engine(d)
    if args.max_lora_rank not in LORA_RANKS:
        allowed = f"it is one of {', '.join(map(str, LORA_RANKS))}"
        raise InvalidParameter("max_lora_rank", args.max_lora_rank, allowed)
    plan = AdapterPlan(
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=_num_kept(args),
        lora_dtype=d.value("dtype") if args.lora_dtype == "auto" else args.lora_dtype,
        target_modules=_targets(args),
    )
    kept = f"{plan.max_cpu_loras} in host memory"
    d.decide("adapters", plan, f"max_loras={plan.max_loras} in the model's memory, {kept}")


def adapter_bytes(d: Decisions) -> int:
    """The memory of the largest adapters that may be in the model's slots and, where that is the
    same memory, kept by the host; all matrices count, whatever the targets are.
    """
    plan: AdapterPlan | None = d.value("adapters")
    if plan is None:
        return 0
    each = d.model.adapter_size * plan.max_lora_rank * ITEMSIZE[plan.lora_dtype]
    # of a GPU's memory only the slots take some
    on_host = plan.max_cpu_loras if d.machine.device == "cpu" else 0
    return each * (plan.max_loras + on_host)


def _num_kept(args: EngineOptions) -> int:
    given = args.max_cpu_loras
    if given is None or given <= 0:
        return args.max_loras
    if given < args.max_loras:
        allowed = f"it must be >= max_loras ({args.max_loras})"
        raise InvalidParameter("max_cpu_loras", given, allowed)
    return given


def _targets(args: EngineOptions) -> tuple[str, ...] | None:
    given = args.lora_target_modules
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)


def _check_engine(d: Decisions) -> None:
    """Raise NotBuiltYet where adapters cannot be added to the model's products."""
    if d.value("model_impl") == "transformers":
        hint = "Use a model that Quire describes itself, or merge the adapter into its weights."
        raise NotBuiltYet("enable_lora", "True with model_impl=transformers", hint)
    if d.args.enable_expert_parallel:
        hint = "Leave enable_expert_parallel out: each copy has all experts."
        raise NotBuiltYet("enable_lora", "True with enable_expert_parallel", hint)


def _check_unused(args: EngineOptions) -> None:
    """Raise InvalidParameter for an option of adapters in an engine without them. `max_lora_rank`
    says nothing about such an engine: programs give it in any case.
    """
    fields = EngineOptions.__dataclass_fields__
    for name in _ITS_OPTIONS:
        value = vars(args)[name]
        if value != fields[name].default:
            raise InvalidParameter(
                name, value, "it is about adapters, which enable_lora allows", "Give that, too."
            )
