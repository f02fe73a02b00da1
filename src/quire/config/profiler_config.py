"""Settings for profiling an engine: the fields of `profiler_config`, checked."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.environment import expanded
from quire.errors import InvalidParameter, NotBuiltYet

_UNBUILT = {
    "torch_profiler_dump_cuda_time_total": "There is no GPU in this release; leave it out.",
    "ignore_frontend": "The front end is never part of a trace; leave it out.",
    "warmup_iterations": "Use delay_iterations.",
    "active_iterations": "Use max_iterations.",
    "wait_iterations": "Use delay_iterations.",
}
"""Documented keys that are refused unless they change nothing (False, 0 or None)."""


class ProfilerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace of the core's steps, made by torch.profiler and written into `torch_profiler_dir`.

    The trace begins `delay_iterations` steps after `start_profile` and ends after `max_iterations`
    steps (0: at `stop_profile`).
    """

    profiler: str
    torch_profiler_dir: str
    torch_profiler_with_stack: bool = True
    torch_profiler_use_gzip: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    delay_iterations: int = 0
    max_iterations: int = 0


def profiler_config(given: dict[str, Any] | None) -> ProfilerConfig | None:
    """Check `profiler_config`; None: no profiling. Raises InvalidParameter or NotBuiltYet."""
    options = dict(given or {})
    for name, hint in _UNBUILT.items():
        # programs made from the reference give such keys at 0 or False
        if value := options.pop(name, None):
            raise NotBuiltYet(f"profiler_config[{name!r}]", value, hint)
    if options.get("profiler") is None:
        if options:
            raise InvalidParameter("profiler_config", given, 'its "profiler" must be "torch"')
        return None
    if options["profiler"] != "torch":
        hint = 'Use "torch", or run the program under a profiler such as py-spy.'
        raise NotBuiltYet("profiler_config['profiler']", options["profiler"], hint)
    try:
        config = msgspec.convert(options, ProfilerConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(ProfilerConfig.__struct_fields__)
        raise InvalidParameter(
            "profiler_config", given, f"{error}; its fields are {fields}"
        ) from None
    if min(config.delay_iterations, config.max_iterations) < 0:
        raise InvalidParameter("profiler_config", given, "steps are counted from 0")
    folder = str(expanded(config.torch_profiler_dir).absolute())
    return msgspec.structs.replace(config, torch_profiler_dir=folder)
