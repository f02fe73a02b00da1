"""FalconMamba: Mamba with a norm without weights over the step's numbers, b and c."""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.families.mamba import MAMBA_RULES, mamba, mamba_decoder
from quire.models.rules import Family
from quire.models.spec import Decoder


def _describe(c: ConfigReader) -> Decoder:
    mixer = replace(mamba(c), norm_eps=c.number("mixer_rms_eps", 1e-6))
    return mamba_decoder(c, mixer, tie=True)


FAMILY = Family(("FalconMambaForCausalLM",), _describe, MAMBA_RULES, prefix="backbone.")
