"""LFM2-VL."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.llama import ACTIVATIONS
from quire.models.rules import Rule, rule
from quire.models.spec import Norm
from quire.models.vision.families.internvl import AT, NORMED_PROJECTOR
from quire.models.vision.rules import WholeFamily
from quire.models.vision.spec import Merge, NormStep, Project, VisionTower


def _connect_lfm2(c: ConfigReader, tower: VisionTower, width: int) -> VisionTower:
    c.only("vision_feature_layer", -1)
    merge = c.integer("downsample_factor", 2)
    bias = c.flag("projector_bias", True)
    act = c.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    inner = c.integer("projector_hidden_size", 2560)
    norm = (
        (NormStep(Norm("layer", 1e-5, bias=True)),)
        if c.flag("projector_use_layernorm", True)
        else ()
    )
    steps = (Merge(), *norm, Project(inner, bias, act), Project(width, bias))
    return replace(tower, merge=merge, connector=steps)


def _rules_lfm2(tower: VisionTower) -> tuple[Rule, ...]:
    if any(isinstance(step, NormStep) for step in tower.connector):
        return NORMED_PROJECTOR
    return (
        rule(AT + "linear_1.{leaf}", "connector.1.{leaf}"),
        rule(AT + "linear_2.{leaf}", "connector.2.{leaf}"),
    )


LFM2 = WholeFamily(("lfm2_vl",), _connect_lfm2, _rules_lfm2)
