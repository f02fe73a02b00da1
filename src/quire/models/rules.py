"""Weight rules: how the tensors of a checkpoint correspond to canonical parameters, as data that
can be read both ways.

A rule is a pair of name templates and the steps between them; `{layer}`, `{expert}` and `{leaf}`
(weight or bias) stand for what a name contains. `tensor_map` expands the rules of a family for one
spec into concrete names, which the loader reads forwards and the checkpoint writer backwards. Free
of torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quire.models.config_reader import ConfigReader
from quire.models.formats.storage import FLOATS, WHOLE_NUMBERS, CodeLayout, Storage, StoredPart
from quire.models.parameters import Parameter, parameters
from quire.models.spec import Decoder

Step = Literal[
    "transpose",
    "split",
    "by_head",
    "deal",
    "stacked",
    "joined",
    "row",
    "scalar",
    "boxed",
    "by_quarter",
]
"""The conversion between a stored tensor and its leaves.

stacked: a leading axis over the experts; joined: that axis and the next are one, which holds one
target; row: a leading axis of length one, and another each time; transpose: the last two axes
swapped; split: the targets one after the other along the first axis (that of an expert, if
stacked); by_head: such a split within each of the K key/value heads (the fewest that a target has),
which has its part of every target; by_quarter: the same within each quarter of the axis; deal: the
targets take turns along the axis, as cards are dealt; scalar: one number that is stored without an
axis; boxed: an axis between two leading ones of length one and one after it.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One checkpoint tensor (`source`) and the parameters (`targets`) it holds after `steps`."""

    source: str
    targets: tuple[str, ...]
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that defines a family of checkpoints.

    `describe` reads a config into a spec. `rules` may depend on the spec. `oracle` is what tests
    compare the family's logits with: transformers, or where it does not have the family a reference
    of ours (tests/models/hostile/references.py). `prefix` is what all checkpoint names but the
    head's start with; checkpoints of the bare decoder leave it out. is_part: the model is the text
    part of one that also takes pictures or sound, whose files put more before its names
    (loading/parts.py). `ignored` are patterns of tensors that files carry and that hold nothing of
    the model, unless a rule names them.
    drafts_after_layers: layers beyond those of the config predict further tokens (MTP), and are
    ignored as well. pools: its specs have a pooler. other_ends: how names of tensors may end
    instead in older files. terms: the same with its language-model head, for weights of the
    vocabulary's tokens; None: they are not implemented. turns_by_shape: some files have the
    matrices of all experts without the transposition of the rules, which their shape tells.
    scales_given: the factor of the embeddings of ids is that of given ones as well.
    """

    architectures: tuple[str, ...]
    describe: Callable[[ConfigReader], Decoder]
    rules: tuple[Rule, ...] | Callable[[Decoder], tuple[Rule, ...]]
    prefix: str = "model."
    is_part: bool = False
    oracle: Literal["transformers", "reference"] = "transformers"
    ignored: tuple[str, ...] = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    drafts_after_layers: bool = False
    pools: bool = False
    other_ends: tuple[tuple[str, str], ...] = ()
    terms: Family | None = None
    turns_by_shape: bool = False
    scales_given: bool = False

    def rules_for(self, decoder: Decoder) -> tuple[Rule, ...]:
        return self.rules(decoder) if callable(self.rules) else self.rules

    def ignores(self, name: str, num_layers: int) -> bool:
        """Whether a checkpoint tensor of this name is ignored in a model of `num_layers`."""
        bare = name.removeprefix(self.prefix)
        is_ignored = any(re.fullmatch(pattern, bare) for pattern in self.ignored)
        return is_ignored or self.is_of_drafts(name, num_layers)

    def is_of_drafts(self, name: str, num_layers: int) -> bool:
        """Whether a checkpoint tensor of this name is of a layer that predicts further tokens."""
        layer = re.match(r"layers\.(\d+)\.", name.removeprefix(self.prefix))
        return self.drafts_after_layers and layer is not None and int(layer[1]) >= num_layers


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A rule made concrete: checkpoint name and shape, and the leaves that it holds, in order.

    layout: how it is stored as codes, in tensors of other names; it is [outputs, inputs] then, or
    of all experts [experts, outputs, inputs]. None for a tensor of this name. own_name: the
    family's, where files put another prefix before it.
    """

    name: str
    shape: tuple[int, ...]
    leaves: tuple[Parameter, ...]
    steps: tuple[Step, ...]
    layout: CodeLayout | None = None
    own_name: str = ""

    @property
    def module(self) -> str:
        """The name of the module whose weight it is."""
        return self.name.removesuffix(".weight")

    @property
    def is_router(self) -> bool:
        """Whether it chooses experts, as modules do that are not always linear."""
        return all(leaf.name.endswith("router.weight") for leaf in self.leaves)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of one linear module."""
        is_weight = self.name.endswith(".weight") and not set(self.steps) & _NOT_LINEAR
        return is_weight and all(leaf.is_linear for leaf in self.leaves)

    @property
    def sole_leaf(self) -> Parameter | None:
        """The leaf whose values it holds as they are, with nothing else; None: there is none."""
        if self.layout is not None or self.steps or len(self.leaves) != 1:
            return None
        [leaf] = self.leaves
        return leaf if leaf.scale == 1.0 else None

    def parts(self) -> dict[str, StoredPart]:
        """The tensors of the checkpoint that hold it, by name."""
        if self.layout is None:
            is_whole = all(leaf.kind == "numbers" for leaf in self.leaves)
            return {self.name: StoredPart(self.shape, WHOLE_NUMBERS if is_whole else FLOATS)}
        return {self.at(name): part for name, part in self.layout.parts(*self.shape).items()}

    def at(self, part: str) -> str:
        """The name of one of the tensors that hold its codes."""
        return f"{self.module}{'_' if len(self.shape) > 2 else '.'}{part}"

    def in_codes(self, storage: Storage) -> StoredTensor:
        """The tensor as the storage has it: codes for a linear module that has a layout."""
        is_weight = self.name.endswith(".weight") and not set(self.steps) & _NOT_LINEAR
        layout = self._layout(storage) if is_weight else None
        if "stacked" in self.steps and "joined" not in self.steps:
            layout = storage.experts
        if layout is None or not all(_is_coded(leaf, layout) for leaf in self.leaves):
            return self
        inputs, rows = self.leaves[0].shape[1], sum(leaf.shape[0] for leaf in self.leaves)
        shape: tuple[int, ...] = (rows, inputs)
        if "stacked" in self.steps:
            shape = (self.shape[0], rows // self.shape[0], inputs)
        steps = tuple(step for step in self.steps if step != "transpose")
        return StoredTensor(self.name, shape, self.leaves, steps, layout)

    def turned(self) -> StoredTensor:
        """The tensor without a transposition."""
        steps = tuple(step for step in self.steps if step != "transpose")
        return replace(self, shape=(*self.shape[:-2], *self.shape[:-3:-1]), steps=steps)

    def _layout(self, storage: Storage) -> CodeLayout | None:
        """The layout of its module; tools name by either name what they leave as it is."""
        layout = storage.layout_of(self.module)
        if not self.own_name or (layout is None) != storage.lists_codes:
            return layout
        return storage.layout_of(self.own_name.removesuffix(".weight"))


def _is_coded(leaf: Parameter, layout: CodeLayout) -> bool:
    """Whether a layout's codes may be those of the leaf."""
    return leaf.is_linear or (layout.has_tables and leaf.name == "embed.weight")


_NOT_LINEAR: frozenset[Step] = frozenset({"stacked", "joined", "row", "scalar", "boxed"})
"""Steps of tensors that are not the weight of one linear module."""


class RuleError(Exception):
    """A family's rules do not cover its own parameters: a bug in the family."""


def rule(source: str, *targets: str, steps: tuple[Step, ...] = ()) -> Rule:
    """Short form for the tables of the families."""
    return Rule(source, targets, steps)


def tensor_map(family: Family, decoder: Decoder) -> list[StoredTensor]:
    """The concrete tensors of a checkpoint of `decoder`, in load order of their first leaf.

    Each canonical parameter is in exactly one of them; raises RuleError if the rules do not say so.
    """
    return stored_tensors(family.rules_for(decoder), parameters(decoder), family.prefix)


def stored_tensors(
    rules: Iterable[Rule], leaves: Mapping[str, Parameter], prefix: str
) -> list[StoredTensor]:
    """The concrete tensors that hold these leaves by some rules, in load order of their first
    leaf; `prefix` stands for {prefix}. Raises RuleError unless each leaf is in exactly one.
    """
    covered: set[str] = set()
    out: list[StoredTensor] = []
    templates = [(rule, _pattern(target)) for rule in rules for target in rule.targets]
    for name in leaves:
        if name in covered:
            continue
        stored = _covering(name, templates, leaves, prefix)
        names = {leaf.name for leaf in stored.leaves}
        if covered & names:
            raise RuleError(f"{stored.name} covers again {sorted(covered & names)}")
        covered |= names
        out.append(stored)
    return out


def _covering(
    name: str,
    templates: list[tuple[Rule, re.Pattern[str]]],
    leaves: Mapping[str, Parameter],
    prefix: str,
) -> StoredTensor:
    for rule, pattern in templates:
        if found := pattern.fullmatch(name):
            return _expand(rule, found.groupdict(), leaves, prefix)
    raise RuleError(f"no weight rule covers {name}")


def _expand(
    rule: Rule, values: dict[str, str], leaves: Mapping[str, Parameter], prefix: str
) -> StoredTensor:
    experts = _count_experts(rule, values, leaves) if "stacked" in rule.steps else None
    names = [
        target.format(**{**values, "expert": expert})
        for target in rule.targets
        for expert in (range(experts) if experts is not None else [values.get("expert")])
    ]
    if experts == 0:
        raise RuleError(f"{rule.source} holds experts, which the spec does not have")
    if absent := [n for n in names if n not in leaves]:
        raise RuleError(f"{rule.source} holds {absent[0]}, which the spec does not have")
    held = tuple(leaves[n] for n in names)
    source = rule.source.format(prefix=prefix, **values)
    return StoredTensor(
        source, _shape(held, len(rule.targets), rule.steps, experts), held, rule.steps
    )


def _count_experts(rule: Rule, values: dict[str, str], leaves: Mapping[str, Parameter]) -> int:
    count = 0
    while rule.targets[0].format(**{**values, "expert": count}) in leaves:
        count += 1
    return count


def _shape(
    held: tuple[Parameter, ...], parts: int, steps: tuple[Step, ...], experts: int | None
) -> tuple[int, ...]:
    if "scalar" in steps:
        return ()
    first = held[:: len(held) // parts]
    shape = (sum(p.shape[0] for p in first), *held[0].shape[1:])
    if "transpose" in steps:
        shape = (*shape[:-2], shape[-1], shape[-2])
    shape = (*(1 for step in steps if step == "row"), *shape)
    if "boxed" in steps:
        shape = (1, 1, *shape, 1)
    if experts is None:
        return shape
    return (experts * shape[0], *shape[1:]) if "joined" in steps else (experts, *shape)


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    escaped = escaped.replace("{layer}", r"(?P<layer>\d+)").replace("{expert}", r"(?P<expert>\d+)")
    return re.compile(escaped.replace("{leaf}", r"(?P<leaf>weight|bias)"))
