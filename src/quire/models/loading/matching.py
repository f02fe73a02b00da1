"""Compares what a checkpoint's files have with what a spec needs, before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch

from quire.errors import LoadError, WeightMismatch
from quire.models.formats.fp8 import INVERSE_SCALE, SHORT_SCALE
from quire.models.formats.storage import Storage
from quire.models.loading.cache_scales import is_cache_scale
from quire.models.loading.load_formats import WeightFiles
from quire.models.loading.parts import find_part
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.spec import Decoder

logger = logging.getLogger(__name__)
_HEAD = "lm_head.weight"
_SHOWN = 6
"""Names that a message lists."""


def match(
    family: Family, decoder: Decoder, files: WeightFiles, storage: Storage | None = None
) -> list[StoredTensor]:
    """The tensors to read, named as in the files. Raises WeightMismatch unless names and shapes fit
    exactly, LoadError for a type that is not the format's.
    """
    stored, others = tensor_map(family, decoder), frozenset[str]()
    # decided by the files alone: checkpoints of the inner model are published under the same
    # architecture
    bare = not any(name.startswith(family.prefix) for name in files.entries)
    if family.is_part:
        part = find_part(family, stored, files.entries)
        family, stored, others = replace(family, prefix=part.prefix), part.stored, part.other_names
        if others:
            logger.info("Not loaded, because they are not about text: %s.", part.described())
    elif family.prefix and bare:  # a checkpoint of the decoder without its head's wrapper
        stored = [_without_prefix(s, family.prefix) for s in stored]
    stored = [_under_its_name(s, family, files) for s in stored]
    if family.turns_by_shape:
        stored = [_turned(s, files) for s in stored]
    depth = len(decoder.blocks)
    rest = {n: e for n, e in files.entries.items() if not (n in others or family.ignores(n, depth))}
    if drafts := sorted(n for n in files.entries if family.is_of_drafts(n, depth)):
        logger.info(
            "Not loaded: layers that predict further tokens, which are not run (%s).",
            listed(drafts),
        )
    # after what is ignored was taken out, since wrappers have heads of other parts too
    head = next((n for n in rest if n == _HEAD or n.endswith("." + _HEAD)), _HEAD)
    # a copy is redundant, anything else would silently be another model
    if decoder.tie and head in rest:
        _check_tied_head(files, head, stored[0].name)
        rest.pop(head)
    return fitted(stored, rest, files, storage)


def fitted(
    stored: Sequence[StoredTensor],
    own: Collection[str],
    files: WeightFiles,
    storage: Storage | None = None,
) -> list[StoredTensor]:
    """The tensors to read, in codes where the storage has them so. `own`: names in the files that
    must be theirs. Raises as `match` does.
    """
    if storage is not None:
        stored = [_in_codes(s, storage, files) for s in stored]
    owners = {name: s for s in stored for name in s.parts()}
    parts = {name: part for s in stored for name, part in s.parts().items()}
    expected = {n: p.shape for n, p in parts.items() if n in files.entries or not p.is_optional}
    found = {
        n: expected[n] if n in expected and parts[n].has_shape(e.shape) else e.shape
        for n, e in files.entries.items()
        if n in expected or (n in own and not (storage and is_cache_scale(n)))
    }
    if problems := list(_differences(expected, found)):
        raise WeightMismatch("The checkpoint does not fit the model: " + "; ".join(problems) + ".")
    for name in expected:
        entry, allowed = files.entries[name], parts[name].dtypes
        if entry.dtype not in allowed:
            why = _why_not(owners[name], storage)
            raise LoadError(
                f"{entry.file}: {name} is stored as {entry.dtype}, and {why}; supported are "
                f"{', '.join(allowed)}."
            )
    return list(stored)


def _why_not(stored: StoredTensor, storage: Storage | None) -> str:
    """The reason why one of its tensors cannot have any type."""
    if stored.layout is not None:
        return "config.json says that it is a part of a quantised weight"
    left_plain = None if storage is None else stored.in_codes(storage)
    if left_plain is not None and left_plain.layout is not None:
        missing = left_plain.at(left_plain.layout.marker)
        return f"there is no {missing}, which would say that it is quantised"
    return "config.json describes no quantised weight there"


def _under_its_name(stored: StoredTensor, family: Family, files: WeightFiles) -> StoredTensor:
    """The tensor under its older name, where the files have that one alone."""
    for end, older in family.other_ends:
        name = stored.name.removesuffix(end) + older
        if stored.name.endswith(end) and stored.name not in files.entries and name in files.entries:
            return replace(stored, name=name)
    return stored


def _turned(stored: StoredTensor, files: WeightFiles) -> StoredTensor:
    entry = files.entries.get(stored.name)
    # a square weight shows nothing by its shape: then the family's own form holds
    if entry is None or "transpose" not in stored.steps or entry.shape == stored.shape:
        return stored
    turned = stored.turned()
    return turned if entry.shape == turned.shape else stored


def _in_codes(stored: StoredTensor, storage: Storage, files: WeightFiles) -> StoredTensor:
    coded = _with_own_scales(stored.in_codes(storage), files)
    # config.json decides where it can; what it leaves open shows in the names of the tensors
    if coded.layout is None or not (storage.is_decided_by_files or coded.is_router):
        return coded
    has_codes = coded.at(coded.layout.marker) in files.entries
    return stored if stored.name in files.entries and not has_codes else coded


def _with_own_scales(coded: StoredTensor, files: WeightFiles) -> StoredTensor:
    """The tensor with the name that its scales have in the files of DeepSeek-V4, if they do."""
    layout = coded.layout
    if layout is None or layout.scale_name != INVERSE_SCALE:
        return coded
    named = replace(coded, layout=replace(layout, scale_name=SHORT_SCALE))
    is_short = named.at(SHORT_SCALE) in files.entries
    return named if is_short and coded.at(INVERSE_SCALE) not in files.entries else coded


def _without_prefix(stored: StoredTensor, prefix: str) -> StoredTensor:
    name = stored.name.removeprefix(prefix)
    return replace(stored, name=name)


def _check_tied_head(files: WeightFiles, head: str, embedding: str) -> None:
    """A tied checkpoint may carry the head as well, but only as a copy."""
    if embedding not in files.entries:
        return
    if not torch.equal(files.read(embedding), files.read(head)):
        raise WeightMismatch(
            "config.json says that the head is the embedding (tie_word_embeddings), but "
            f"{head} differs from {embedding}. One of the two is wrong; "
            'hf_overrides={"tie_word_embeddings": false} takes the head as it is stored.'
        )


def _differences(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> Iterable[str]:
    missing = [name for name in expected if name not in found]
    extra = sorted(name for name in found if name not in expected)
    if missing:
        yield f"missing {listed(missing)}"
    if extra:
        yield f"unknown {listed(extra)}"
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    if wrong:
        shapes = [f"{n} {list(found[n])} instead of {list(expected[n])}" for n in wrong]
        yield f"wrong shape {listed(shapes)}"


def listed(names: Sequence[str]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
