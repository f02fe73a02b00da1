"""The platform of a model: a device, the ops chosen for it, and how steps are run there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.distributed.worker_group import WorkerGroup
from quire.environment import read_environment
from quire.errors import EngineError, InvalidParameter, PluginError
from quire.executor.worker_config import WorkerConfig
from quire.kernels.cpu.plain_ops import recordable
from quire.kernels.cpu.recorded_group import RecordedGroup
from quire.kernels.cpu.runtime import open_runtime
from quire.kernels.cpu.weight_codec import CpuWeightCodec
from quire.kernels.cpu.weight_writer import CpuWeightWriter
from quire.models.loading.packed_weights import WeightCodec
from quire.models.updates.old_memory import WeightWriter
from quire.ops import Ops, select
from quire.plugins import load_group, resolve_reference
from quire.runner.batch import BatchBuilder
from quire.runner.devices.arena import Driver
from quire.runner.devices.cuda import CudaDriver, CudaGraphs
from quire.runner.devices.device import CpuDevice, Device
from quire.runner.devices.stream_device import StreamDevice
from quire.runner.forward.decode_graphs import GraphForward, decode_sizes
from quire.runner.forward.forward import EagerForward, Forward, RecordedForward
from quire.runner.model import StepModel

logger = logging.getLogger(__name__)

_ARENA_BYTES = 1 << 20
"""Independent of a step's tokens: sampling settings, tables and new prompts of some KiB."""
_TOKEN_BYTES = 128
"""Positions, rows, and slots of a dozen KV groups."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A device and its ops; `make_forward` returns the object that runs a model's steps there, of
    which a given number of rows may sample (0: the model's logits are not asked for).

    `sizes`: numbers of rows that steps of decodes are padded to. `free_bytes` returns the device's
    free memory; None if it has no memory of its own. `is_host`: weights are in host memory.
    `driver` of a device with a queue of its own; None: there is none. `codec`: of packed weights,
    where these can be kept in files; None: they cannot. `writer` of new values into packed weights;
    None: they are packed anew, and copied. `connect` returns a worker's group whose
    exchanges `make_forward` can record.
    """

    device: Device
    ops: Ops
    make_forward: Callable[[StepModel, BatchBuilder, int], Forward]
    sizes: Sequence[int] = ()
    free_bytes: Callable[[], int] | None = None
    is_host: bool = True
    driver: Driver | None = None
    codec: WeightCodec | None = None
    writer: WeightWriter | None = None
    connect: Callable[[WorkerGroup], WorkerGroup] = lambda group: group


def open_platform(config: WorkerConfig) -> Platform:
    """Open the device of a plugin, else the named one. Raises InvalidParameter if it must be
    deterministic but cannot be, PluginError for a plugin that does not open one.
    """
    opener = active_platform_plugin()
    platform = open_own_platform(config) if opener is None else _open_plugin(config, *opener)
    if config.parallel.is_deterministic and not platform.ops.batch_invariant:
        reason = platform.ops.invariance_reason
        raise InvalidParameter("deterministic", True, reason, "Leave it out.")
    return platform


def open_own_platform(config: WorkerConfig) -> Platform:
    """Open the named device as Quire does without plugins; a plugin may change what it returns."""
    return _open_cuda(config) if config.parallel.has_gpu else _open_cpu(config)


def active_platform_plugin() -> tuple[str, str] | None:
    """The name of the plugin whose platform this machine has, and of what opens it; None: none.
    Raises PluginError for several.
    """
    found: dict[str, str] = {}
    for name, probe in load_group("platform_plugins").items():
        try:
            opener = probe()
        except Exception as error:
            logger.error(
                "Platform plugin %s is left out: %s: %s", name, type(error).__name__, error
            )
            continue
        if opener is not None:
            found[name] = opener
    if len(found) > 1:
        names = ", ".join(found)
        raise PluginError(
            f"The platform plugins {names} are all active: name one of them in VLLM_PLUGINS."
        )
    return next(iter(found.items()), None)


def _open_plugin(config: WorkerConfig, name: str, opener: str) -> Platform:
    try:
        platform = resolve_reference(opener)(config)
    except EngineError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise PluginError(f"Platform plugin {name}: {opener} failed: {what}") from error
    if not isinstance(platform, Platform):
        raise PluginError(
            f"Platform plugin {name}: {opener} must return a quire.executor.platform.Platform, and "
            f"returned {platform!r}. Platforms that were written for vLLM have no counterpart."
        )
    logger.info("The platform is that of the plugin %s (%s).", name, opener)
    return platform


def _open_cpu(config: WorkerConfig) -> Platform:
    runtime = open_runtime(
        num_threads=config.parallel.num_threads,
        isa=read_environment().cpu_isa,
        weights_folder=config.weights_folder,
    )
    ops = _select(config, runtime)
    if runtime is None:
        return Platform(CpuDevice(), ops, lambda model, *_: EagerForward(model))
    codec, writer = CpuWeightCodec(runtime, config.torch_dtype), CpuWeightWriter(runtime)
    if not config.parallel.use_graphs:
        return Platform(
            CpuDevice(), ops, lambda model, *_: EagerForward(model), codec=codec, writer=writer
        )
    return Platform(
        CpuDevice(),
        recordable(ops, runtime),
        lambda model, batches, num_rows: RecordedForward(
            model, runtime, batches.capacity_batch, num_rows=num_rows
        ),
        codec=codec,
        writer=writer,
        connect=partial(RecordedGroup, runtime),
    )


def _open_cuda(config: WorkerConfig) -> Platform:
    driver = CudaDriver()
    arena_bytes = _ARENA_BYTES + _TOKEN_BYTES * config.step_size
    device = StreamDevice(driver, arena_bytes=arena_bytes)
    ops = _select(config, device)
    sizes = decode_sizes(config.num_rows) if config.parallel.use_graphs else []

    def make_forward(model: StepModel, batches: BatchBuilder, num_rows: int) -> Forward:
        if not sizes:
            return EagerForward(model)
        return GraphForward(model, CudaGraphs, batches.padding, sizes)

    return Platform(device, ops, make_forward, sizes, driver.free_bytes, False, driver)


def _select(config: WorkerConfig, runtime: object | None) -> Ops:
    ops = select(
        device=config.device_type,
        dtype=config.torch_dtype,
        runtime=runtime,
        deterministic=config.parallel.is_deterministic,
    )
    attend = next(choice for choice in ops.report() if choice.op == "attend")
    why = f" ({attend.why})" if attend.why else ""
    logger.info("Attention provider: %s%s.", attend.provider, why)
    return ops
