"""Decides which weights stay in host memory while a GPU runs the model."""

from __future__ import annotations

from itertools import pairwise

from quire.config.kv_pool_size import gib
from quire.config.offload import Offload, choose_offload, is_wanted
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.dtype import layer_value_bytes
from quire.errors import InvalidParameter, LoadError, NotBuiltYet


def decide_offload(d: Decisions) -> None:
    """Fix `offload`.

    Raises InvalidParameter on a CPU and for options that make no sense, NotBuiltYet for models of
    transformers, LoadError where the host has no room.
    """
    if not is_wanted(d.args):
        where = "the GPU's memory" if d.machine.device == "cuda" else "memory of the host"
        d.decide("offload", None, f"all weights are in {where}")
        return
    offload = _chosen(d)
    by = "cpu_offload_gb" if d.args.cpu_offload_gb else "offload_group_size"
    numbers = " ".join(map(str, offload.layers))
    d.decide("offload", offload, f"{by}={vars(d.args)[by]:g}: layers {numbers}")
    d.note(f"Weights of {len(offload.layers)} layers are offloaded: {offload.describe()}.")
    are_neighbours = any(b - a == 1 for a, b in pairwise(offload.layers))
    if are_neighbours and offload.num_buffers == 1:
        d.note(
            "Neighbouring layers are offloaded through one buffer, so that nothing runs while the "
            "second one's weights are copied; offload_prefetch_step=2 would give them another."
        )


def _chosen(d: Decisions) -> Offload:
    by = "cpu_offload_gb" if d.args.cpu_offload_gb else "offload_group_size"
    given = vars(d.args)[by]
    if d.machine.device == "cpu":
        allowed = "weights are offloaded from a GPU, and this engine runs on the CPU"
        hint = "Use load_format='mmap' (--load-format mmap): weights are then in mapped files."
        raise InvalidParameter(by, given, allowed, hint)
    if d.value("model_impl") == "transformers":
        hint = "Use a model that Quire describes itself, or a smaller one."
        raise NotBuiltYet(by, f"{given} with model_impl=transformers", hint)
    size = layer_value_bytes(d)
    layers = [{name: n * size for name, n in layer.items()} for layer in d.model.layer_products]
    offload = choose_offload(d.args, layers)
    if offload.host_bytes > d.machine.host_free_bytes:
        raise LoadError(
            f"{by}={given:g} keeps {gib(offload.host_bytes)} of weights in host memory, of which "
            f"{gib(d.machine.host_free_bytes)} are free. Offload fewer layers."
        )
    return offload
