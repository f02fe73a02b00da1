"""Weights that a trainer sends, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor, nn

from quire.distributed.named_tensors import TensorMeta as ParamMeta
from quire.distributed.named_tensors import layer_of
from quire.distributed.shared_buffer import SharedBuffer, aligned

__all__ = ["ModuleSource", "ParamMeta", "WeightSource", "layerwise_groups", "share_parameters"]


class WeightSource(Protocol):
    """Gives tensors in one order, the same for its descriptions and its values."""

    def metadata(self) -> list[ParamMeta]:
        """The description of each tensor."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Each name with the whole tensor."""
        ...


class ModuleSource:
    """The parameters of a module, dense or distributed: those of a `DTensor` are gathered as they
    are sent, in which all ranks take part. A parameter with several names is sent once.
    """

    def __init__(self, module: nn.Module, prefix: str = "") -> None:
        """`prefix` is put before each name."""
        self._module = module
        self._prefix = prefix

    def metadata(self) -> list[ParamMeta]:
        """The descriptions, of whole tensors."""
        return [
            ParamMeta(name, parameter.dtype, tuple(parameter.shape))
            for name, parameter in self._parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters():
            yield name, _whole(parameter)

    def held_names(self) -> list[str]:
        """The names of what this rank has."""
        return [name for name, _ in self._parameters()]

    def groups(self) -> list[list[str]]:
        """The names, as `layerwise_groups` has them."""
        return layerwise_groups(self.held_names())

    def iter_groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors of each group."""
        found = dict(self._parameters())
        for names in self.groups():
            yield [(name, _whole(found[name])) for name in names]

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield self._prefix + _plain(name), parameter.data


def share_parameters(module: nn.Module) -> SharedBuffer:
    """Move a dense module's parameters into memory that engines of this host read where they are,
    so that an update copies nothing. Optimizers go on with the same parameters, in place. The
    buffer has to be kept as long as the module, and closed after it. Raises OSError where there is
    no room.
    """
    parameters = [parameter.data.contiguous() for parameter in module.parameters()]
    buffer = SharedBuffer(sum(aligned(each.nbytes) for each in parameters), lasts=True)
    at = 0
    for parameter, values in zip(module.parameters(), parameters, strict=True):
        parameter.data = buffer.view(at, values).copy_(values)
        at += aligned(values.nbytes)
    return buffer


def layerwise_groups(names: Iterable[str]) -> list[list[str]]:
    """The names in groups: those before the layers, each layer, those after them. An engine needs
    memory for one group at a time.
    """
    groups: dict[object, list[str]] = {}
    seen_layer = False
    for name in names:
        layer = layer_of(name)
        seen_layer = seen_layer or layer is not None
        key: object = layer if layer is not None else ("after" if seen_layer else "before")
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor if gather is None else gather()
    return found.detach()


def _plain(name: str) -> str:
    """The name without what wrappers of modules put into it."""
    for part in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name


def described(metas: Iterable[ParamMeta]) -> dict[str, list[object]]:
    """The part of an update's information that every backend has."""
    metas = list(metas)
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [meta.dtype_name for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }
