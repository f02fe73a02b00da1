"""Targets of LoRA adapters in a model: its leaves, by the names that modules have in
checkpoints of its family and in transformers. Free of torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from quire.errors import InvalidParameter
from quire.models.loading.products import names_product, product_of
from quire.models.parameters import Parameter
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.spec import Decoder

Found = TypeVar("Found")

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Beginnings of names besides the family's own prefix, by the class that was trained."""
_IN_TRANSFORMERS = (
    (".block_sparse_moe.gate.", ".mlp.router."),
    (".block_sparse_moe.", ".mlp."),
    (".router.layer.", ".router."),
    (".router.gate.", ".gate."),
    (".shared_mlp.", ".shared_experts."),
    ("embed_out.", "lm_head."),
    *(
        (f".self_attn.{part}.", f".self_attn.forget_gate.{part}.")
        for part in ("f_a_proj", "f_b_proj")
    ),
    (".attention.f_proj.", ".self_attn.forget_gate.f_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    ("word_embeddings.", "embed_tokens."),
)
"""Names of parts of a model in checkpoints, and those that transformers may have for them."""
_EXPERT = re.compile(r"(?P<at>(?:\w+\.)*experts)\.(?P<expert>\d+)\.(?P<part>\w+)")
_LAYER = re.compile(r"layers\.\d+\.")
_PARTS_OF_EXPERTS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_FUSED = ("qkv_proj", "gate_up_proj")
"""Names that stand for all parts, also where a family has them one by one."""
_TABLES = ("embed.weight", "head.weight")


def leaf_of(parameter: Parameter) -> str:
    """The canonical name of a leaf as adapters have it."""
    return parameter.name.removesuffix(".weight")


class AdapterTargets:
    """The modules and parameters of a model that an adapter may change, found by the names that
    they have in transformers or in checkpoints; what comes before the layers may be left out.
    """

    def __init__(
        self, family: Family, decoder: Decoder, allowed: Sequence[str] | None = None
    ) -> None:
        """`allowed` are the only modules that adapters may change, as `lora_target_modules` has
        them: names, ends of names, or products that have the module as a part (`qkv_proj`); None:
        all. Raises InvalidParameter for one that names nothing.
        """
        self.is_tied = decoder.tie
        self._prefixes = (family.prefix, *_PREFIXES)
        self._modules: dict[str, StoredTensor] = {}
        self._stacks: dict[str, list[StoredTensor]] = {}
        self._heads: dict[str, StoredTensor] = {}
        for stored in tensor_map(family, decoder):
            self._list(stored)
        if decoder.tie and decoder.generates:
            self._list(_tied_head(family, decoder))
        self._list_experts_as_one()
        self._leaves = self._every_leaf() if allowed is None else self._leaves_named(allowed)

    @property
    def leaves(self) -> frozenset[str]:
        """The leaves that adapters may change: canonical names without `.weight`."""
        return self._leaves

    @property
    def head_names(self) -> frozenset[str]:
        """The tensors of the pooling head, as checkpoints have them."""
        return frozenset(stored.name for stored in self._heads.values())

    def module(self, name: str) -> StoredTensor | None:
        """The weight [out, in] of a linear module, the table [V, C] of the embedding."""
        return self._find(name, self._modules.get) or self._find(name, self._expert)

    def stack(self, name: str) -> Sequence[StoredTensor]:
        """The parameters of a module that have all experts of a layer, in order; else ()."""
        return self._find(name, self._stacks.get) or ()

    def head(self, name: str) -> StoredTensor | None:
        """A tensor of the pooling head."""
        return self._find(name, self._heads.get)

    def _find(self, name: str, look_up: Callable[[str], Found | None]) -> Found | None:
        for prefix in ("", *self._prefixes):
            if name.startswith(prefix):
                found = look_up(name.removeprefix(prefix))
                if found is not None:
                    return found
        return None

    def _list(self, stored: StoredTensor) -> None:
        for name in self._bare_names(stored.name):
            if stored.leaves[0].name.startswith("pooler."):
                self._heads[name] = stored
            elif _is_stack(stored):
                self._list_stack(name, stored)
            elif _is_matrix(stored):
                self._modules[name.removesuffix(".weight")] = stored

    def _list_stack(self, name: str, stored: StoredTensor) -> None:
        self._stacks.setdefault(_parent(name), []).append(stored)
        if name.endswith(".weight"):  # a module of its own, which transformers has together
            parts = [leaf_of(leaf).rpartition(".")[2] for leaf in stored.leaves[:: stored.shape[0]]]
            module = _parent(_parent(name)).removesuffix(".experts") + ".experts"
            parameter = replace(stored, name=f"{module}.{'_'.join(parts)}_proj")
            self._stacks.setdefault(module, []).append(parameter)

    def _bare_names(self, name: str) -> Iterator[str]:
        """The names of a tensor without what comes before the layers."""
        prefix = next((p for p in self._prefixes if p and name.startswith(p)), "")
        bare = name.removeprefix(prefix)
        yield bare
        yield from {bare.replace(*pair) for pair in _IN_TRANSFORMERS} - {bare}

    def _list_experts_as_one(self) -> None:
        """List experts with a tensor each as transformers has them: stacked, the gates above."""
        found: dict[str, dict[str, dict[int, Parameter]]] = {}
        for name, stored in self._modules.items():
            if expert := _EXPERT.fullmatch(name):
                part = leaf_of(stored.leaves[0]).rpartition(".")[2]
                of_part = found.setdefault(expert["at"], {}).setdefault(part, {})
                of_part[int(expert["expert"])] = stored.leaves[0]
        for module, parts in found.items():
            up = "gate_up_proj" if "gate" in parts else "up_proj"
            for name, inside in ((up, ("gate", "up")), ("down_proj", ("down",))):
                leaves = [parts[p][e] for p in inside if p in parts for e in sorted(parts[p])]
                stacked = _stacked(f"{module}.{name}", leaves, len(parts["down"]))
                self._stacks.setdefault(module, []).append(stacked)

    def _expert(self, name: str) -> StoredTensor | None:
        """The weight of one expert, of a family that stores all of them in one tensor."""
        expert = _EXPERT.fullmatch(name)
        part = None if expert is None else _PARTS_OF_EXPERTS.get(expert["part"])
        if expert is None or part is None:
            return None
        end = f".experts.{int(expert['expert'])}.{part}.weight"
        for stored in self._stacks.get(expert["at"], ()):
            for leaf in stored.leaves:
                if leaf.name.endswith(end):
                    return StoredTensor(name + ".weight", leaf.shape, (leaf,), ())
        return None

    def _every_leaf(self) -> frozenset[str]:
        tensors = (*self._modules.values(), *(s for stack in self._stacks.values() for s in stack))
        return frozenset(leaf_of(leaf) for stored in tensors for leaf in stored.leaves)

    def _leaves_named(self, allowed: Sequence[str]) -> frozenset[str]:
        found: set[str] = set()
        for wanted in allowed:
            tensors = list(self._tensors_named(wanted))
            if not tensors:
                hint = "Names are those of modules, or their ends: q_proj, mlp.down_proj, lm_head."
                raise InvalidParameter(
                    "lora_target_modules", wanted, "the model has no such module", hint
                )
            found.update(leaf_of(leaf) for stored in tensors for leaf in stored.leaves)
        return frozenset(found)

    def _tensors_named(self, wanted: str) -> Iterator[StoredTensor]:
        bare = {wanted, *(wanted.removeprefix(p) for p in self._prefixes if wanted.startswith(p))}
        named: list[tuple[str, Iterable[StoredTensor]]] = [
            *((name, (stored,)) for name, stored in self._modules.items()),
            *self._stacks.items(),
        ]
        for name, tensors in named:
            for stored in tensors:
                own = leaf_of(stored.leaves[0])
                is_named = name in bare or name.endswith("." + wanted)
                is_part = wanted.endswith(_FUSED) and _LAYER.match(own)
                if is_named or (is_part and names_product(wanted, product_of(own))):
                    yield stored


def _is_matrix(stored: StoredTensor) -> bool:
    """Whether it is the weight of one linear module, or the table of one embedding."""
    if {"row", "scalar", "joined"} & set(stored.steps) or not stored.name.endswith(".weight"):
        return False
    return stored.leaves[0].name in _TABLES or all(
        leaf.kind == "matrix" and len(leaf.shape) == 2 and not leaf.name.startswith("shared.")
        for leaf in stored.leaves
    )  # a transformer that several layers share is one module in each of them for transformers


def _is_stack(stored: StoredTensor) -> bool:
    """Whether it has the weights of all experts of a layer as PEFT can adapt them."""
    is_weight = all(leaf.kind == "matrix" for leaf in stored.leaves)
    return is_weight and "stacked" in stored.steps and "joined" not in stored.steps


def _stacked(name: str, leaves: Sequence[Parameter], experts: int) -> StoredTensor:
    rows = sum(leaf.shape[0] for leaf in leaves) // experts
    return StoredTensor(
        name, (experts, rows, leaves[0].shape[1]), tuple(leaves), ("stacked", "split")
    )


def _tied_head(family: Family, decoder: Decoder) -> StoredTensor:
    """The head that a tied model has besides its embedding, for an adapter of its own."""
    shape = (decoder.vocab, decoder.dim)
    head = Parameter("head.weight", shape, "vocab", "embedding")
    return StoredTensor("lm_head.weight", shape, (head,), ())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
