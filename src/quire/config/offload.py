"""Layers whose weights stay in host memory while a GPU runs the model, by the options that say so.

Pure arithmetic over the sizes of layers; `config/resolve/offload.py` and `quire show` use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from quire.config.args.engine_options import EngineOptions
from quire.config.kv_pool_size import gib
from quire.errors import InvalidParameter
from quire.models.loading.products import is_chosen, names_product

_GIB = 1 << 30


class Offload(msgspec.Struct, frozen=True):
    """layers: whose weights are on the host. weights: names of their products; none: all. The
    device has `num_buffers` buffers of `device_bytes` together for what has `host_bytes`.
    """

    layers: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    num_buffers: int = 0
    host_bytes: int = 0
    device_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes that the device no longer holds."""
        return self.host_bytes - self.device_bytes

    def describe(self) -> str:
        count = "one buffer" if self.num_buffers == 1 else f"{self.num_buffers} buffers"
        return (
            f"{gib(self.host_bytes)} of weights stay in host memory, and each step copies them "
            f"through {count} of {gib(self.device_bytes)} on the GPU"
        )


def is_wanted(args: EngineOptions) -> bool:
    """Whether to offload. Raises InvalidParameter for options that contradict or do nothing."""
    if args.cpu_offload_gb and args.offload_group_size:
        allowed = "it chooses layers by their size, and offload_group_size by their number"
        hint = "Give one of them."
        raise InvalidParameter("cpu_offload_gb", args.cpu_offload_gb, allowed, hint)
    if args.offload_num_in_group > max(1, args.offload_group_size):
        allowed = f"a group has offload_group_size={args.offload_group_size} layers"
        hint = "Give a group of more layers."
        raise InvalidParameter("offload_num_in_group", args.offload_num_in_group, allowed, hint)
    has_layers = bool(args.cpu_offload_gb or args.offload_group_size)
    for name, neutral in (("offload_prefetch_step", 1), ("offload_params", None)):
        value = getattr(args, name)
        if not has_layers and value != neutral and value not in ([], (), set()):
            allowed = "it goes with offload_group_size or cpu_offload_gb, which choose layers"
            hint = "Give one of these, too."
            raise InvalidParameter(name, value, allowed, hint)
    return has_layers


def choose_offload(args: EngineOptions, layers: Sequence[Mapping[str, float]]) -> Offload:
    """Choose the layers that the options offload; `layers` has the bytes of each one's products.

    Raises InvalidParameter for names that no layer has, for more than can be offloaded, and for
    options that would save nothing.
    """
    names = _names(args, layers)
    sizes = [
        int(sum(size for product, size in layer.items() if is_chosen(product, names)))
        for layer in layers
    ]
    movable = [i for i, size in enumerate(sizes) if size]
    if args.cpu_offload_gb:
        return _by_size(args, names, sizes, movable)
    group, count = args.offload_group_size, args.offload_num_in_group
    chosen = _made([i for i in movable if i % group >= group - count], names, sizes, args)
    if chosen.saved_bytes <= 0:
        raise InvalidParameter(
            "offload_group_size",
            group,
            f"it offloads {len(chosen.layers)} of {len(sizes)} layers, and "
            f"offload_prefetch_step={args.offload_prefetch_step} keeps as many on the GPU",
            "Take smaller groups, or more layers of each by offload_num_in_group.",
        )
    return chosen


def _by_size(
    args: EngineOptions, names: tuple[str, ...], sizes: Sequence[int], movable: Sequence[int]
) -> Offload:
    """The fewest layers that free cpu_offload_gb, far apart, so that copies have most time."""
    best = Offload()
    # not by division: layers differ in size, and buffers take some of what is freed
    for count in range(1, len(movable) + 1):
        places = [(k + 1) * len(movable) // count - 1 for k in range(count)]
        found = _made([movable[place] for place in places], names, sizes, args)
        if found.saved_bytes >= args.cpu_offload_gb * _GIB:
            return found
        best = max(best, found, key=lambda offload: offload.saved_bytes)
    raise InvalidParameter(
        "cpu_offload_gb",
        args.cpu_offload_gb,
        f"layers have {gib(sum(sizes))} that can be offloaded, of which buffers on the GPU leave "
        f"{gib(best.saved_bytes)}",
        "Give less, or a smaller offload_prefetch_step.",
    )


def _made(
    layers: Sequence[int], names: tuple[str, ...], sizes: Sequence[int], args: EngineOptions
) -> Offload:
    num_buffers = min(args.offload_prefetch_step, len(layers))
    own = [sizes[layer] for layer in layers]
    # layer k goes through buffer k modulo their number
    buffers = [max(own[i::num_buffers]) for i in range(num_buffers)]
    return Offload(tuple(layers), names, num_buffers, sum(own), sum(buffers))


def _names(args: EngineOptions, layers: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    given = args.offload_params or ()
    names = (given,) if isinstance(given, str) else tuple(sorted(given))
    products = sorted({product for layer in layers for product in layer})
    for name in names:
        if not any(names_product(name, product) for product in products):
            allowed = f"weights of layers are {', '.join(products)}"
            raise InvalidParameter("offload_params", name, allowed)
    return names
