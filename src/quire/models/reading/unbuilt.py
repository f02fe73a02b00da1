"""Architectures that people ask for and that no family describes, and why. Free of torch."""

from __future__ import annotations

from types import MappingProxyType

_OWN_CODE = "its definition is in code of its own alone, which Quire never executes"

WHY_NOT = MappingProxyType(
    {
        "BailingMoeV2_5ForCausalLM": _OWN_CODE,
        "KimiK3ForCausalLM": _OWN_CODE,
        "KimiK3ForConditionalGeneration": _OWN_CODE,
        "LongcatFlashForCausalLM": "its layers have two attentions whose experts overlap, some of "
        "them without weights",
        "MiMoV2ForCausalLM": _OWN_CODE,
        "MiMoV2OmniForCausalLM": _OWN_CODE,
        "MiniMaxM1ForCausalLM": "its files are read in the form of MiniMax-M1-hf, whose "
        "architecture is MiniMaxForCausalLM",
        "MiniMaxText01ForCausalLM": "its files are read in the form of MiniMax-Text-01-hf, whose "
        "architecture is MiniMaxForCausalLM",
        "RWKV7ForCausalLM": _OWN_CODE,
        "Rwkv7ForCausalLM": _OWN_CODE,
        "RwkvForCausalLM": "its recurrence (RWKV-4) is not implemented",
        "ZayaForCausalLM": "its queries and keys go through convolutions before they attend",
    }
)
"""Architecture -> the end of "is not supported: ..."."""
