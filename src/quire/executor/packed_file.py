"""The file that has a model's packed weights, and without it the packing that can be done while
torch is imported. Free of torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.config.plan_parts import ModelPlan, ParallelPlan
from quire.environment import read_environment
from quire.hardware.native import find_native
from quire.hardware.packed_ahead import PackingPlan
from quire.hardware.prepared_memory import Preparation
from quire.models import find_family, read_spec
from quire.models.loading.ahead.packing_plan import packing_plan

_CODE = ("models", "ops", "kernels", "quantization")
"""Folders of the package that decide what a packed weight is."""
_LEAST_SHARE = 0.5
"""Share of the weights below which packing them helps less than clearing memory for all."""


def packed_file(model: ModelPlan, parallel: ParallelPlan) -> Path | None:
    """The file of the weights of a model on CPUs as they would be packed now. None where they are
    not kept: those without files, those that are parts of a model, those that are in mapped files
    of their own; or where the model's folder cannot be read.

    Its name is made from everything that the weights are: the model's files by size and time of
    change, its config, the recipe, the layout of the kernels, and Quire's own code.
    """
    if not _is_packed_whole(model, parallel) or not model.packed_weights_bytes:
        return None
    native, _ = find_native()
    if native is None:
        return None
    environment = read_environment()
    try:
        files = _files_key(Path(model.model_folder))
    except OSError:
        return None
    key = {
        "files": files,
        **model.weights_key(),
        "layout": environment.cpu_isa or native.best_level(),
        "code": _code_version(),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return environment.cache_dir / "packed" / f"{name}.packed"


def preparation(model: ModelPlan, parallel: ParallelPlan) -> Preparation:
    """The work for the weights that can be done while torch is imported: none where they are not
    packed.
    """
    if not _is_packed_whole(model, parallel):
        return Preparation()
    path = packed_file(model, parallel)
    if path is not None and path.exists():
        return Preparation(file=str(path))
    packing = _packing(model, parallel)
    if packing is None or packing.num_bytes < _LEAST_SHARE * model.weight_bytes:
        return Preparation(num_bytes=model.weight_bytes)
    return Preparation(packing=packing)


def _packing(model: ModelPlan, parallel: ParallelPlan) -> PackingPlan | None:
    """The weights that are packed as they are stored."""
    native, _ = find_native()
    folder = Path(model.model_folder)
    if native is None or model.is_rounded or not model.is_safetensors:
        return None
    if model.hf_config.get("quantization_config") is not None:
        return None
    return packing_plan(
        folder,
        read_spec(model.hf_config, model.pooler),
        find_family(model.hf_config, model.pooler),
        model.dtype,
        level=read_environment().cpu_isa or native.best_level(),
        num_threads=max(1, parallel.num_threads - 1),  # one imports
    )


def _is_packed_whole(model: ModelPlan, parallel: ParallelPlan) -> bool:
    """Whether one worker packs all weights of checkpoint files into memory, on a CPU."""
    return (
        not parallel.has_gpu
        and not model.is_foreign
        and not model.has_drawn_weights
        and model.weights_folder is None
        and parallel.has_whole_models
    )


def _files_key(folder: Path) -> list[list[Any]]:
    """Identity of a model folder's contents: its files' names, sizes, and times of
    change; that of the inode cannot be set back.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            about = path.stat()
            found.append([path.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns])
    return [[str(folder.resolve())], *found]


@functools.cache
def _code_version() -> str:
    """Changes with the code that packs, so that a weight of other code is never used: with that of
    this process, which does not change.
    """
    digest = hashlib.sha256()
    for path in code_files(Path(__file__).parents[1], _CODE):
        about = path.stat()
        digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def code_files(package: Path, folders: Sequence[str]) -> list[Path]:
    """The native module and the modules in these folders of the package, sorted."""
    files = [path for folder in folders for path in (package / folder).rglob("*.py")]
    return sorted([*files, *package.glob("_native*")])
