"""Readers of vision encoders: towers by their config's type, and models. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.models.config_reader import ConfigReader
from quire.models.rules import Rule
from quire.models.vision.spec import VisionTower


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """A kind of tower.

    `kinds` are the `model_type`s of its config. `describe` reads that into a tower without a
    connector, whose output is what transformers calls the last hidden state. `rules` name its
    tensors; {prefix} is what stands before all of them. `ignored`: patterns of names after that
    which hold nothing that a connector reads.
    """

    kinds: tuple[str, ...]
    describe: Callable[[ConfigReader], VisionTower]
    rules: tuple[Rule, ...] | Callable[[VisionTower], tuple[Rule, ...]]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WholeFamily:
    """A kind of model with a tower, a connector and a decoder.

    `kinds` are the `model_type`s of its config. `connect` adds selection and connector to a tower
    for a decoder of a given width, by the config of the whole. `rules` name the connector's
    tensors. `roots` are the prefixes that the tower's tensors may have, the first is the usual one;
    `own` the modules whose tensors are all the encoder's. `outer`: what may stand before all names.
    attends_both_ways: by the config of the text, whether tokens of a picture see all of it in the
    decoder. towers: by their type, those that its files store otherwise than other models' do.
    """

    kinds: tuple[str, ...]
    connect: Callable[[ConfigReader, VisionTower, int], VisionTower]
    rules: tuple[Rule, ...] | Callable[[VisionTower], tuple[Rule, ...]]
    roots: tuple[str, ...] = ("vision_tower.", "vision_tower.vision_model.")
    own: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    outer: tuple[str, ...] = ("model.", "")
    attends_both_ways: Callable[[Mapping[str, Any]], bool] = lambda text: False
    towers: Mapping[str, TowerFamily] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision encoder as a config describes it: the tower that runs, and the `whole` one that the
    files have, which may have more blocks and norms; the families that name the tensors of both.
    has_spans: tokens of a picture see all of it in the decoder.
    """

    tower: VisionTower
    whole: VisionTower
    tower_family: TowerFamily
    family: WholeFamily
    has_spans: bool = False

    def rules(self) -> tuple[tuple[Rule, ...], tuple[Rule, ...]]:
        """The rules of the tower's tensors, and those of the connector's."""
        of_tower, of_whole = self.tower_family.rules, self.family.rules
        return (
            of_tower(self.whole) if callable(of_tower) else of_tower,
            of_whole(self.tower) if callable(of_whole) else of_whole,
        )
