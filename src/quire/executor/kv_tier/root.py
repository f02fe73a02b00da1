"""The name of everything that determines K/V apart from the keys of blocks: the root of what leaves
the process.

Two engines share a folder's contents exactly when their roots are equal: the same weights by their
files' contents, the same model, types, memory layout, kernels and code. What is not certain to
leave every bit as it is makes another root, which costs computing once more and nothing else.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform as machine
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from quire.environment import read_environment
from quire.executor.packed_file import code_files
from quire.executor.platform import Platform
from quire.executor.worker_config import WorkerConfig
from quire.hardware.native import find_native
from quire.models.kv_pool import KVPool
from quire.plugins import program_entries, records

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".json")
_CODE = (
    *("models", "ops", "kernels", "quantization", "runner", "step", "scheduling", "distributed"),
    "tiers",
)
"""Folders of the package that decide what is in a block."""
_COMPUTING_GROUPS = ("general_plugins", "platform_plugins")
"""Groups of plugins whose code may be part of a model's."""
_VERSION = 2
_READ_BYTES = 1 << 22

_Identity = tuple[int, int, int, int, int]
ModelFiles = tuple[tuple[Path, _Identity], ...]


@dataclass(frozen=True, slots=True)
class RootParts:
    """The parts of a root: facts about the engine, and its files with what tells them from files
    that were written later.
    """

    facts: dict[str, Any]
    files: ModelFiles

    def is_kept(self, kept: Path) -> bool:
        """Whether no file has to be read for the name."""
        known = _read_kept(kept)
        return all(_is_of(known.get(str(path)), identity) for path, identity in self.files)

    def name(self, kept: Path) -> str | None:
        """The root, in hexadecimal. Reads those files whose digests are not in `kept`, a file.
        None: one has changed since the engine began to load.
        """
        known = _read_kept(kept)
        digests, has_new = [], False
        for path, identity in self.files:
            entry: Any = known.get(str(path))
            if not _is_of(entry, identity):
                entry, has_new = (identity, _digest(path)), True
                known[str(path)] = entry
            # after the file was read: one that was changed meanwhile counts as changed
            if _identity(path) != identity:
                return None
            digests.append((path.name, entry[1]))
        if has_new:
            _keep(kept, known)
        return self._name(digests)

    def origin(self, kept: Path, sampling: str) -> list[str]:
        """The root, and a name of the model and of how its tokens are drawn: two engines with the
        latter can go on with each other's streams. "": a file has changed.
        """
        root = self.name(kept)
        if root is None:
            return ["", ""]
        known = _read_kept(kept)
        about = [sampling, self.facts["model"].get("hf_config"), self.facts["model"].get("seed")]
        about += [[path.name, known[str(path)][1]] for path, _ in self.files]
        return [root, hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()]

    def name_by_identity(self) -> str:
        """A root of what does not outlive this machine's start, in hexadecimal: files count by what
        tells them from those that were written later, so that none has to be read.
        """
        return self._name([(str(path), *identity) for path, identity in self.files])

    def _name(self, files: Sequence[tuple[Any, ...]]) -> str:
        text = json.dumps([self.facts, files], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:40]


def model_files(config: WorkerConfig) -> ModelFiles:
    """The files that weights come from, as they are before they are loaded."""
    folders = [Path(config.model.model_folder)]
    if config.speculation is not None and config.speculation.draft is not None:
        folders.append(Path(config.speculation.draft.folder))
    files = [(path, _identity(path)) for folder in folders for path in _files(folder)]
    return tuple((path, found) for path, found in files if found is not None)


def root_parts(
    config: WorkerConfig, platform: Platform, pool: KVPool, files: ModelFiles, place: object
) -> RootParts:
    """The parts of a worker's root. `files` is what `model_files` gave before the weights were
    loaded; `place`, the part of the model that the worker has.
    """
    native, _ = find_native()
    isa = "none" if native is None else read_environment().cpu_isa or native.best_level()
    model = config.model
    # the seed decides nothing in a block unless weights are drawn from it
    no_seed = () if model.has_drawn_weights else ("seed",)
    facts: dict[str, Any] = {
        "version": _VERSION,
        "code": _code_digest(),
        "torch": torch.__version__,
        "libraries": _libraries(platform, is_foreign=model.is_foreign),
        "plugins": _plugins(),
        "model": _plain(model, leave_out=("model", "model_folder", "served_model_names",
            "tokenizer_folder", "chat_template", "weights_folder", "packed_weights_bytes",
            "encoder_transfer", "prompts", "pooler_config", *no_seed)),
        "parallel": _plain(config.parallel, leave_out=("thread_cpus", "data_parallel_ranks",
            "data_parallel_address", "data_parallel_rpc_port", "max_core_restarts", "spare_core",
            "profiler", "data_parallel_mode", "data_parallel_size")),
        "kv_dtype": config.memory.kv_dtype,
        "pool": [pool.block_size, repr(pool.groups), repr(pool.memories)],
        "speculation": repr(config.speculation),
        "adapters": config.adapters is not None,
        "ops": [f"{choice.op}={choice.provider}" for choice in platform.ops.report()],
        "invariant": platform.ops.batch_invariant,
        # sums may depend on the sizes of steps, unless kernels are batch-invariant
        "steps": None if platform.ops.batch_invariant else repr(config.steps),
        "isa": isa,
        "machine": machine.machine(),
        "device": _device(platform),
        "place": repr(place),
    }  # fmt: skip
    return RootParts(facts, files)


def kept_digests() -> Path:
    """The file that keeps digests of weights between starts."""
    return read_environment().cache_dir / "file_digests.json"


def _is_of(entry: Any, identity: _Identity) -> bool:
    return entry is not None and tuple(entry[0]) == identity


def _plain(part: msgspec.Struct, leave_out: Sequence[str]) -> dict[str, Any]:
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    return {name: repr(value) for name, value in fields.items() if name not in leave_out}


def _device(platform: Platform) -> str:
    device = platform.device.torch
    if device.type != "cuda":
        return device.type
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} {about.major}.{about.minor} {torch.version.cuda}"


def _libraries(platform: Platform, *, is_foreign: bool) -> dict[str, str]:
    """The versions of what computes besides torch."""
    names = ["transformers"] if is_foreign else []
    if any(choice.provider == "triton" for choice in platform.ops.report()):
        names.append("triton")
    found = {name: str(importlib.import_module(name).__version__) for name in names}
    return {**found, "torch on CPUs": torch.backends.cpu.get_cpu_capability()}


def _plugins() -> list[tuple[str, ...]]:
    """The entries of plugins and of the program, and the digests of their packages: any of their
    code may compute.
    """
    loaded = [
        (record.point.title, *sorted(record.changes), _package_digest(record.point.value))
        for record in records()
        if record.failure is None and record.point.group in _COMPUTING_GROUPS
    ]
    own = [(*entry, _package_digest(entry[2])) for entry in program_entries()]
    return [*sorted(loaded), *own]


def _package_digest(reference: str) -> str:
    """Changes with any Python file of the package that "module:attribute" is in."""
    name = reference.partition(":")[0].partition(".")[0]
    module = sys.modules.get(name)
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    if (file := getattr(module, "__file__", None)) is not None:
        files.append(Path(file))
    content = hashlib.sha256()
    for path in sorted(set(files)):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return [folder] if folder.is_file() else []
    return sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())


def _identity(path: Path) -> _Identity | None:
    """Tells a file from another one of its name; the time of its inode cannot be set back."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _digest(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            content.update(part)
    return content.hexdigest()


def _code_digest() -> str:
    """Changes with any change of Quire's own code or kernels that K/V may depend on."""
    content = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in code_files(package, _CODE):
        data = path.read_bytes()
        content.update(f"{path.relative_to(package)} {len(data)}\n".encode() + data)
    return content.hexdigest()


def _read_kept(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: entry
        for name, entry in found.items()
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)
    }


def _keep(path: Path, known: dict[str, Any]) -> None:
    """Replace the file as a whole; without it files are read again."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(known, file)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
