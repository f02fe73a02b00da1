"""The transformer, built from a spec. It runs eagerly, or once while a step is recorded
(runner/forward/), and then the recorded program is replayed.

In: a `Batch` (ids or embeddings, positions, slots and attention plans per KV group, the layers' KV
memory) from runner/runner.py. Out: hidden states [T, C], of which the runner picks rows for
`logits`, and those that enter chosen layers. Next: the sampler, then
engine/frontend/output_processor.py.

Branches on the spec are taken while the parts are built (`assembly.py`); the forward pass calls ops
and nothing else on activations, so that a step can be recorded and replayed. The model holds no
state besides its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.models.adapters.banks import AdapterBanks
from quire.models.assembly import Assembly
from quire.models.drafting.inputs import DraftStage
from quire.models.layers import Embedding, StageInput
from quire.models.loading.model_parts import Part, tensors_of, tensors_within
from quire.models.loading.options import ModelOptions
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.loading.weight_placement import GivenWeights, RunnableLayer
from quire.models.spec import Decoder
from quire.ops import Batch, Ops


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The result of a pass over layers for T tokens: `last` [T, C]; `aux`, the auxiliary hidden
    states [T, C] that draft heads read; `experts`, the chosen experts [T, k] int32 of each layer
    that has some, where the model keeps them.
    """

    last: Tensor
    aux: tuple[Tensor, ...] = ()
    experts: tuple[Tensor, ...] = ()

    def after(self, earlier: HiddenStates) -> HiddenStates:
        """The result of both passes, where this one went on with the states of an `earlier` one."""
        return HiddenStates(self.last, earlier.aux + self.aux, earlier.experts + self.experts)


class DecoderModel(GivenWeights):
    """A decoder with its weights. Layers run in pieces (`layers[a:b]`), apart from both ends."""

    def __init__(
        self,
        spec: Decoder,
        weights: WeightBuilder,
        ops: Ops,
        *,
        max_model_len: int,
        options: ModelOptions,
        target: DecoderModel | None = None,
    ) -> None:
        """Take every leaf of `spec` from `weights`; positions are below `max_model_len`. `target`
        lends a draft network its embedding and its head.

        Raises ValueError for `aux_layers` that are not ascending numbers from 0 to L, or of a model
        with several residual streams.
        """
        aux_layers = options.aux_layers
        if list(aux_layers) != sorted(set(aux_layers) & set(range(len(spec.blocks) + 1))):
            raise ValueError(
                f"aux_layers={list(aux_layers)} are not ascending numbers of the layers 0 to "
                f"{len(spec.blocks)} of this model"
            )
        if aux_layers and spec.streams is not None:
            raise ValueError(f"aux_layers: layers of this model have {spec.streams.count} inputs")
        self.spec = spec
        self.max_model_len = max_model_len
        self.first_layer = options.first_layer
        self.aux_layers = aux_layers
        self._choices: list[Tensor] = []
        choices = self._choices if options.keeps_experts else None
        self.adapters: AdapterBanks | None = None
        if options.adapter_room is not None:
            self.adapters = AdapterBanks(ops, options.adapter_room, weights.device)
        assembly = Assembly(
            spec, weights, ops, max_model_len, options, choices=choices, adapters=self.adapters
        )
        self._target = target
        self._embedding: Embedding | DraftStage | StageInput
        self._embedding = assembly.embedding(None if target is None else target.look_up)
        self._layers: Sequence[RunnableLayer] = assembly.layers()
        self._axes, self._ops = assembly.axes(), ops
        self.head = assembly.head()
        self.pooler = assembly.pooler()
        self._parts = assembly.parts
        self.leaves_of = assembly.leaves_of
        """Leaves by the part that is their rows, one above the other, as they are."""

    def release_weights(self) -> None:
        """Release every weight; until `take_weights` the model cannot run."""
        self._parts = []
        self._layers = []
        self.adapters = None
        del self._embedding, self.head, self.pooler

    def take_weights(self, other: DecoderModel) -> None:
        assert self.spec == other.spec, "weights of another model"
        self._embedding, self._layers = other._embedding, other._layers
        self.head, self.pooler, self._parts = other.head, other.pooler, other._parts
        self._choices, self.adapters = other._choices, other.adapters

    def look_up(self, ids: Tensor) -> Tensor:
        """The embeddings [T, C] of ids [T], scaled; no adapter changes them."""
        self._use_slots(None)
        return self._embedding.look_up(ids)

    @property
    def stage(self) -> Embedding | DraftStage | StageInput:
        """The part before the layers."""
        return self._embedding

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def embed(self, batch: Batch) -> Tensor:
        """First hidden states [T, C]: of `batch.ids`, or `batch.embeds` plus learned positions."""
        self._use_slots(batch.adapter_slots)
        return self._embedding(batch)

    def forward(
        self, batch: Batch, layers: slice | None = None, hidden: Tensor | None = None
    ) -> HiddenStates:
        """Run layers[a:b] (default all) and write their K/V into the slots of the batch.

        `hidden` is the output of the layer before a; None embeds the batch. After the last layer
        the result includes the final norm and is ready for `logits`; before it, it is the residual
        stream. The auxiliary states are those of the layers that are run.
        """
        self._use_slots(batch.adapter_slots)
        start, stop, _ = (layers or slice(None)).indices(len(self._layers))
        x = self.embed(batch) if hidden is None else hidden
        # one table per step in place of a look-up in every layer
        if self._axes is not None:
            batch = self._axes(batch)
        if start >= stop:
            return HiddenStates(x)
        aux = []
        self._choices.clear()  # a pass that failed may have left some
        h = self._layers[start].enter(x)
        for i in range(start, stop):
            if i in self.aux_layers:
                aux.append(x)
            x, h = self._layers[i](x, h, batch)
            if i < len(batch.deep):
                # added after the layer's own sum, as the tower's outputs belong to the stream and
                # not to a part
                x = self._ops.add(x, batch.deep[i])
                has_next = i + 1 < len(self._layers)
                assert has_next or not self.spec.is_last, "the last end has the final norm"
                # a later stage enters its own layers
                h = self._layers[i + 1].enter(x) if has_next else x
        experts = tuple(self._choices)
        self._choices.clear()
        if stop < len(self._layers):
            return HiddenStates(x, tuple(aux), experts)
        if stop in self.aux_layers:
            aux.append(x)
        return HiddenStates(h, tuple(aux), experts)

    __call__ = forward

    def _use_slots(self, slots: Tensor | None) -> None:
        if self.adapters is not None:
            self.adapters.slots = slots

    def logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Scores for hidden [R, C] of a `forward` -> fp32 [R, V]; `adapter_slots`: see `Batch`."""
        if self.head is None:
            assert self._target is not None, "a model that only pools has no such head"
            return self._target.logits(hidden)
        self._use_slots(adapter_slots)
        return self.head.logits(hidden)

    @property
    def shares_head(self) -> bool:
        """Whether the workers of a group compute a part of a step's scores each."""
        return self.head is not None and self.head.part is not None

    def shared_logits(self, hidden: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """`logits` of the rows that a step samples, where workers share the head."""
        assert self.head is not None, "a head that is shared"
        self._use_slots(adapter_slots)
        return self.head.shared_logits(hidden)

    def named_parts(self) -> Iterator[tuple[str, Part]]:
        yield from self._parts

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """All weight tensors by name, fused; a head that is tied to the embedding has a name only
        without `remove_duplicate`. What a provider has packed is a copy, made when it is asked for,
        in which only the packing is undone: writing into it changes nothing, and `load_weights`
        does.
        """
        for name, part in self._parts:
            yield from tensors_of(name, part)
            # a head that is rounded, unlike its embedding, is a part by itself
            if not remove_duplicate and self.spec.tie and name == "embed":
                yield from tensors_of("head", part)

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Nothing: trainers write into the buffers of a model and give `load_weights` the rest of a
        checkpoint, and here it takes all of it.
        """
        yield from ()

    def weight_tensors(self) -> Iterator[Tensor]:
        """All tensors that the weights are kept in, in whatever form; some may share memory. Not
        those that a provider keeps outside of tensors.
        """
        return (tensor for _, part in self._parts for tensor in tensors_within(part))

    def parameters(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_parameters())

    @property
    def weight_bytes(self) -> int:
        """The memory of the weights in bytes, counting tied ones once."""
        return sum(tensor.nbytes for tensor in self.weight_tensors())
