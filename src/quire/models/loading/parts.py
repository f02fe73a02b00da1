"""Place of the text part in the files of a model that also takes pictures or sound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from quire.errors import WeightMismatch
from quire.models.rules import Family, StoredTensor

_MODULE_LEVELS = 2
"""Names in other parts' modules have dots; tensors of the text's own are not passed over."""
_ALONE = frozenset({"image_newline"})
"""Tensors of other parts that are in no module."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The tensors of the text part, as the files name them, and what these have besides: modules of
    other parts, with the number of their tensors.
    """

    prefix: str
    stored: list[StoredTensor]
    others: Counter[str]
    other_names: frozenset[str]

    def described(self) -> str:
        """The other parts, for a message."""
        return ", ".join(f"{name} ({count} tensors)" for name, count in sorted(self.others.items()))


def find_part(family: Family, stored: Sequence[StoredTensor], names: Collection[str]) -> TextPart:
    """Find the tensors that a family calls `stored` among the `names` of files, where all of them
    but the head's stand behind one prefix. Raises WeightMismatch where there are several such.
    """
    own = [s.name.removeprefix(family.prefix) for s in stored if s.name.startswith(family.prefix)]
    prefix = _prefix_of(own, names, family.prefix)
    renamed = [
        replace(s, name=_named(s.name, family, prefix, names), own_name=s.name) for s in stored
    ]
    wanted = {name for s in renamed for name in s.parts()} | {s.name for s in renamed}
    roots = {prefix + name.partition(".")[0] + "." for name in own}
    others = frozenset(n for n in names if n not in wanted and _is_other(n, prefix, roots, family))
    return TextPart(prefix, renamed, Counter(_module(n, prefix) for n in others), others)


def _prefix_of(own: Sequence[str], names: Collection[str], usual: str) -> str:
    """Prefix of the names of the text's tensors: that of most of them."""
    first = own[0]
    found = [n.removesuffix(first) for n in names if n == first or n.endswith("." + first)]
    counts = Counter({prefix: sum(prefix + name in names for name in own) for prefix in found})
    if not counts:
        return usual
    (prefix, most), *rest = counts.most_common()
    if rest and rest[0][1] == most:
        listed = " and ".join(sorted(repr(p) for p, count in counts.items() if count == most))
        raise WeightMismatch(
            f"The checkpoint has several text models: before {first} stand {listed}."
        )
    return prefix


def _named(name: str, family: Family, prefix: str, names: Collection[str]) -> str:
    """The file's name of a tensor of the text part."""
    if family.prefix and name.startswith(family.prefix):
        return prefix + name.removeprefix(family.prefix)
    found = [n for n in names if n == name or n.endswith("." + name)]
    return max(found, key=lambda n: (_levels_shared(n, prefix), -len(n)), default=name)


def _levels_shared(one: str, other: str) -> int:
    """Number of modules that two names have in common."""
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def _is_other(name: str, prefix: str, roots: Iterable[str], family: Family) -> bool:
    """Whether a tensor belongs to another part than text."""
    if name.startswith(tuple(roots)):
        return False
    if not name.startswith(prefix):
        return "." in name or name in _ALONE
    is_shared = len(prefix) <= len(family.prefix)
    return is_shared and name.removeprefix(prefix).count(".") >= _MODULE_LEVELS


def _module(name: str, prefix: str) -> str:
    """The module of another part that a tensor is in."""
    level = _levels_shared(name, prefix)
    return ".".join(name.split(".")[: level + 1])
