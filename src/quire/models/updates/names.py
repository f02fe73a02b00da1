"""Names of an update's tensors, and the leaves of each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.errors import WeightMismatch
from quire.models.loading.matching import listed
from quire.models.rules import Family, StoredTensor
from quire.models.spec import Decoder

_HEAD = "lm_head.weight"
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
"""Prefixes of trainers for the names of a decoder's tensors, whatever its family's files do."""


@dataclass(frozen=True, slots=True)
class Found:
    """The tensor of a checkpoint that a name is a part of; `part` is the part's name there."""

    stored: StoredTensor
    part: str


class CheckpointNames:
    """The names of a model's tensors in its checkpoint. Invariant: each belongs to one tensor."""

    def __init__(
        self,
        family: Family,
        decoder: Decoder,
        stored: Sequence[StoredTensor],
        entries: Iterable[str] | None,
        *,
        has_encoders: bool,
    ) -> None:
        """`stored`: as the model's files have them. `entries`: the names in these files; None: the
        weights of the start are in none. has_encoders: other parts of the model run, too.
        """
        self._family = family
        self._depth = len(decoder.blocks)
        self._prefix = family.prefix
        in_files = None if entries is None else frozenset(entries)
        self.required: dict[str, list[str]] = {}
        """Parts that an update must bring to change a stored tensor, by its name."""
        self._found: dict[str, Found] = {}
        for each in stored:
            names = each.parts()
            self.required[each.name] = [
                name
                for name, part in names.items()
                if (not part.is_optional if in_files is None else name in in_files)
            ]
            self._found.update((name, Found(each, name)) for name in names)
        self._bare = self._bare_names()
        self._others = (in_files or frozenset()) - self._found.keys()
        self._has_encoders = has_encoders
        self._tied = next((s.name for s in stored if _is_embedding(s)), None)
        self.has_tied_head = decoder.tie and decoder.generates
        """Whether the head is the embedding."""

    def find(self, name: str) -> Found | None:
        """The tensor that this name is of; None for one that holds nothing of the model, as those
        that checkpoints of the family may have besides. Raises WeightMismatch for any other name.
        """
        found = self._found.get(name) or self._bare.get(self._without_prefix(name))
        if found is not None:
            return found
        if self._family.ignores(name, self._depth):
            return None
        if name in self._others and self._has_encoders:
            raise WeightMismatch(
                f"{name} is of an encoder, and those have the weights of the start: send the "
                "language model's alone."
            )
        if name in self._others:
            return None  # of a part that is not loaded
        raise WeightMismatch(
            f"{name} is not a weight of this model, whose checkpoint has {listed([*self._found])}."
        )

    def is_tied_head(self, name: str) -> bool:
        """Whether a name is that of a head that is the embedding in this model."""
        return self.has_tied_head and (name == _HEAD or name.endswith("." + _HEAD))

    def is_embedding(self, stored: StoredTensor) -> bool:
        """Whether a tensor is the embedding."""
        return stored.name == self._tied

    def _bare_names(self) -> Mapping[str, Found]:
        """The names without what stands before all of them, and older ends."""
        bare = {self._without_prefix(name): found for name, found in self._found.items()}
        for end, older in self._family.other_ends:
            for name in [n for n in bare if n.endswith(end)]:
                bare.setdefault(name.removesuffix(end) + older, bare[name])
        return bare

    def _without_prefix(self, name: str) -> str:
        # the longest first, since some begin with others
        for prefix in sorted({self._prefix, *_PREFIXES}, key=len, reverse=True):
            if prefix and name.startswith(prefix):
                return name.removeprefix(prefix)
        return name


def _is_embedding(stored: StoredTensor) -> bool:
    return any(leaf.name == "embed.weight" for leaf in stored.leaves)
