"""A model of transformers that the runner can run: the same calls as of a `DecoderModel`.

Its modules are transformers' own, but for what `packing.py` replaces; attention goes to the paged
KV cache by `attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from quire.models.decoder import HiddenStates
from quire.models.foreign.attention import STEP, PagedStep
from quire.models.foreign.own_caches import OwnCaches
from quire.models.foreign.packing import PackedEmbedding, PackedExperts, PackedLinear
from quire.models.foreign.parts import GivenPositions, split
from quire.models.foreign.spec import ForeignDecoder
from quire.models.loading.model_parts import tensors_within
from quire.models.loading.weight_placement import GivenWeights
from quire.ops import Batch, Ops


class ForeignModel(GivenWeights):
    """A causal language model of transformers with its weights, in one piece."""

    def __init__(
        self, spec: ForeignDecoder, model: Any, ops: Ops, *, in_one_thread: bool = False
    ) -> None:
        """`model` is transformers' object, whose attention is ours. in_one_thread: what torch
        computes is not divided between threads, which would compute the last values of each part
        by another routine; products and attention have threads of their own.
        """
        self.spec = spec
        self._threads = _one_thread if in_one_thread else nullcontext
        self._model = model
        self._ops = ops
        self._body, self._head = split(spec.architecture, model)
        self._own = None
        if not spec.calls:
            self._own = OwnCaches(self._body, spec.caches, spec.states)
        self._given = None
        if spec.position_table is not None:
            self._given = GivenPositions(self._body.get_submodule(spec.position_table))

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    def release_weights(self) -> None:
        del self._model, self._body, self._head, self._given, self._own

    def take_weights(self, other: Any) -> None:
        assert self.spec == other.spec, "weights of another model"
        self._model, self._body, self._head = other._model, other._body, other._head
        self._given, self._own = other._given, other._own

    def forward(self, batch: Batch) -> HiddenStates:
        """Run all layers and write their K/V into the batch's slots; the result is for `logits`."""
        if batch.embeds is not None:
            inputs = {"inputs_embeds": batch.embeds[None]}
        else:
            assert batch.ids is not None, "a batch has ids or embeddings"
            inputs = {"input_ids": batch.ids[None]}
        if self._own is not None:
            with self._threads():
                return HiddenStates(self._own.forward(batch, inputs))
        step = PagedStep(self._ops, batch, self.spec.calls)
        positions = batch.positions[:1]
        if self.spec.first_position:
            positions = positions + self.spec.first_position
        if self._given is None:
            inputs["position_ids"] = positions
        else:
            self._given.positions = positions
        with self._threads():
            outputs = self._body(**inputs, use_cache=False, **{STEP: step})
        return HiddenStates(outputs.last_hidden_state[0])

    __call__ = forward

    def logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Scores over the vocabulary for hidden [R, C] -> fp32 [R, V]."""
        assert adapter_slots is None, "there are no adapters of such models"
        with self._threads():
            scores: Tensor = self._head(inputs_embeds=hidden[None]).logits[0]
            return scores.float()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The weight tensors by name, without those that a provider has packed; one that several
        modules share has all of its names without `remove_duplicate`.
        """
        yield from self._model.named_parameters(remove_duplicate=remove_duplicate)

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The buffers by name, which the model reads in each step."""
        yield from self._model.named_buffers(remove_duplicate=remove_duplicate)

    def weight_tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        seen = set()
        for module in self._model.modules():
            for packed in _packed(module):
                if id(packed) not in seen:
                    seen.add(id(packed))
                    yield from tensors_within(packed)

    def parameters(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weight_tensors())


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _packed(module: nn.Module) -> list[Any]:
    if isinstance(module, PackedLinear | PackedEmbedding):
        return [module.packed]
    return [*module.up, *module.down] if isinstance(module, PackedExperts) else []
