"""The rules by the names of transformers' processor classes."""

from __future__ import annotations

from typing import Protocol

from quire.errors import UnsupportedConfigValue
from quire.media.prompt_rules.facts import PromptFacts
from quire.media.prompt_rules.grids import (
    AyaVisionRule,
    Cohere2VisionRule,
    Idefics3Rule,
    Lfm2VlRule,
    LightOnOcrRule,
    Llama4Rule,
    PixtralRule,
)
from quire.media.prompt_rules.rule import PromptRule
from quire.media.prompt_rules.runs import (
    Gemma3Rule,
    Gemma4Rule,
    Glm4vRule,
    InternVLChatRule,
    InternVLRule,
    KimiK25Rule,
    KimiVLRule,
    LlavaNextRule,
    LlavaOnevisionRule,
    LlavaRule,
    PaddleOCRVLRule,
    PaliGemmaRule,
    QwenVLRule,
)


class _Readable(Protocol):
    def read(self, facts: PromptFacts) -> PromptRule: ...


RULES: dict[str, _Readable] = {
    "ColIdefics3Processor": Idefics3Rule,
    "ColPaliProcessor": PaliGemmaRule,
    "ColQwen2Processor": QwenVLRule,
    "ColQwen2_5_Processor": QwenVLRule,
    "ColQwen3Processor": QwenVLRule,
    "ColQwen3_5Processor": QwenVLRule,
    "OpsColQwen3Processor": QwenVLRule,
    "LlavaProcessor": LlavaRule,
    "LlavaNextProcessor": LlavaNextRule,
    "LlavaNextVideoProcessor": LlavaNextRule,
    "LlavaOnevisionProcessor": LlavaOnevisionRule,
    "Qwen2VLProcessor": QwenVLRule,
    "Qwen2_5_VLProcessor": QwenVLRule,
    "Qwen3VLProcessor": QwenVLRule,
    "Glm4vProcessor": Glm4vRule,
    "Glm46VProcessor": Glm4vRule,
    "Kimi_K25Processor": KimiK25Rule,
    "KimiVLProcessor": KimiVLRule,
    "PaddleOCRVLProcessor": PaddleOCRVLRule,
    "PixtralProcessor": PixtralRule,
    "LightOnOcrProcessor": LightOnOcrRule,
    "Idefics3Processor": Idefics3Rule,
    "SmolVLMProcessor": Idefics3Rule,
    "Gemma3Processor": Gemma3Rule,
    "Gemma4Processor": Gemma4Rule,
    "PaliGemmaProcessor": PaliGemmaRule,
    "InternVLProcessor": InternVLRule,
    "InternVLChatProcessor": InternVLChatRule,
    "AyaVisionProcessor": AyaVisionRule,
    "Cohere2VisionProcessor": Cohere2VisionRule,
    "Llama4Processor": Llama4Rule,
    "Lfm2VlProcessor": Lfm2VlRule,
}


def read_rule(name: str, facts: PromptFacts) -> PromptRule:
    """The rule of a processor class. Raises UnsupportedConfigValue for one that is not known."""
    if name not in RULES:
        raise UnsupportedConfigValue(
            f"The processor {name} is not implemented, so it is not known how pictures stand in a "
            f"prompt. Those that are: {', '.join(sorted(RULES))}."
        )
    return RULES[name].read(facts)
