"""A worker's own part of the weights in files of its own, under the names of the parameters: the
load format `sharded_state`.

With several workers each reads only what it uses, also where they have stages. The values are those
of the checkpoint, before they are converted, rounded (`quantization`) and packed, so that the files
fit every machine and every version; they fit one number of workers, and the same stages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import InvalidParameter, LoadError, WeightMismatch
from quire.models.loading.read_ahead import Read
from quire.models.loading.readers.checkpoint_files import CheckpointFiles, FileNames
from quire.models.parameters import Parameter
from quire.models.spec import PipelineStage

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
STAGE_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
"""File names of models that are cut into stages."""
_NAMES = re.compile(r"model-(?:pp-(\d+)-tp|rank)-(\d+)-part-\d+\.safetensors")
_SHOWN = 6
"""Number of leaves that do not fit which a message names."""


class ShardedLeaves:
    """Reads the leaves of one worker's model from its files."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        expected: dict[str, Parameter],
        stage: PipelineStage | None = None,
    ) -> None:
        """Raises LoadError or WeightMismatch unless the files have just the `expected` leaves.
        `rank` of the `size` workers that have the stage; None: the whole model.
        """
        saved = _saved_sizes(folder, is_staged=stage is not None)
        _check_sizes(folder, saved, size, stage)
        names = FileNames(None, None, _name(rank, stage, "*"))
        self._files = CheckpointFiles(folder, names)
        found = {name: entry.shape for name, entry in self._files.entries.items()}
        wrong = [n for n, leaf in expected.items() if found.get(n) != leaf.shape]
        wrong += [name for name in found if name not in expected]
        if wrong:
            self.close()
            raise WeightMismatch(
                f"{folder} does not have the parameters of this model for worker {rank} of {size}"
                f"{_words(stage)}: "
                f"{len(wrong)} are missing, unknown or of another shape "
                f"({', '.join(wrong[:_SHOWN])}). {_advice(saved)}"
            )

    def __call__(self, leaf: Parameter) -> Tensor:
        """The leaf as it was saved."""
        return self._files.read(leaf.name)

    def close(self) -> None:
        self._files.close()


def _saved_sizes(folder: Path, *, is_staged: bool) -> tuple[int, int] | None:
    """The stages, and the workers of each, whose files a folder has: of models that are cut into
    stages or, where it has none of these, of the others. None: it has no files.
    """
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for file in folder.glob("model-*.safetensors"):
        if (match := _NAMES.fullmatch(file.name)) is not None:
            stage, rank = match.groups(default="0")
            found[match[1] is not None].append((int(stage), int(rank)))
    places = found[is_staged] or found[not is_staged]
    if not places:
        return None
    # both count from 0
    return 1 + max(stage for stage, _ in places), 1 + max(rank for _, rank in places)


def _check_sizes(
    folder: Path, saved: tuple[int, int] | None, size: int, stage: PipelineStage | None
) -> None:
    """Raise LoadError for files of other workers than there are now, as far as one of them knows;
    without files, reading them says so.
    """
    if saved is None:
        return
    stages, workers = saved
    if stage is None:
        fits = stages == 1
    else:
        fits = stage.number < stages and stage.is_last == (stage.number == stages - 1)
    if not fits or workers != size:
        raise LoadError(f"{folder} has the weights of other workers. {_advice(saved)}")


def _advice(saved: tuple[int, int] | None) -> str:
    given = "Save them again with as many workers"
    if saved is None:
        return f"{given}."
    stages, workers = saved
    sizes = f"tensor_parallel_size={workers} and pipeline_parallel_size={stages}"
    layers = ", with the same layers in each stage" if stages > 1 else ""
    return f"{given} as there are now, or give {sizes}{layers}."


def check_pattern(pattern: str | None, stage: PipelineStage | None = None) -> None:
    """Raise InvalidParameter for names that could not be found again."""
    only = PATTERN if stage is None else STAGE_PATTERN
    if pattern is not None and pattern != only:
        hint = "Leave it out: load_format='sharded_state' looks for these names."
        raise InvalidParameter("pattern", pattern, f"None or {only}", hint)


def _name(rank: int, stage: PipelineStage | None, part: int | str) -> str:
    """The name of a part of what a worker has of a stage; part "*": of any."""
    if stage is None:
        return PATTERN.format(rank=rank, part=part)
    return STAGE_PATTERN.format(pp_rank=stage.number, tp_rank=rank, part=part)


def _words(stage: PipelineStage | None) -> str:
    return "" if stage is None else f" in stage {stage.number}"


def save_leaves(
    folder: Path,
    rank: int,
    leaves: Iterable[Parameter],
    read: Read,
    *,
    stage: PipelineStage | None = None,
    max_size: int | None = None,
) -> list[Path]:
    """Write the leaves, none of them in codes, in their stored dtype into files of at most
    `max_size` bytes each (None: one file; a larger leaf has a file of its own), and return these.
    Files of this rank that are there already are replaced; the folder is made.
    """
    if max_size is not None and max_size < 1:
        raise InvalidParameter("max_size", max_size, "a number of bytes, or None")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # an earlier save may have had more parts
        for old in folder.glob(_name(rank, stage, "*")):
            old.unlink()
        return [
            _write(folder / _name(rank, stage, part), tensors)
            for part, tensors in enumerate(_parts(leaves, read, max_size))
        ]
    except OSError as error:
        raise LoadError(f"The weights cannot be written to {folder}: {error}.") from error


def _parts(
    leaves: Iterable[Parameter], read: Read, max_size: int | None
) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    taken = 0
    for leaf in leaves:
        values = read(leaf)
        assert isinstance(values, Tensor), f"{leaf.name} is in codes"
        # a copy: a leaf is valid until the next one is read
        tensor = values.to("cpu", copy=True).contiguous()
        if part and max_size is not None and taken + tensor.nbytes > max_size:
            yield part
            part, taken = {}, 0
        part[leaf.name] = tensor
        taken += tensor.nbytes
    yield part


def _write(file: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a file under its name only once it is complete."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    write_tensors(tensors, unfinished, {"format": "pt"})
    return unfinished.replace(file)


def write_tensors(
    tensors: dict[str, Tensor], file: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises OSError that names it where that fails (a full disk)."""
    try:
        save_file(tensors, file, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
