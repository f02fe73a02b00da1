"""Rules with one run for a picture, perhaps between a beginning and an end: LLaVA, Qwen-VL, GLM-4V,
PaddleOCR-VL, Kimi, InternVL, Gemma 3 and 4, PaliGemma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from quire.errors import UnsupportedConfigValue
from quire.media.image_processors.processor import PictureLayout
from quire.media.prompt_rules.facts import PromptFacts
from quire.media.prompt_rules.rule import ExpandedPicture, PromptRule


@dataclass(frozen=True, slots=True)
class LlavaRule(PromptRule):
    """LlavaProcessor: a token for each patch. `extra` are the encoder's other rows that stay."""

    patch_size: int
    extra: int

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        """Make the rule from processor_config.json, or config.json in early releases."""
        token = facts.token("image_token", "<image>")
        patch = facts.whole("patch_size", facts.vision("patch_size"))
        return cls(token, token, patch, _extra_rows(facts))

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        rows, cols = (side // self.patch_size for side in layout.tile)
        return ExpandedPicture(self.soft_token, (rows * cols + self.extra,))


def _extra_rows(facts: PromptFacts) -> int:
    """Rows of a picture besides those of patches: the class token, unless it is dropped."""
    strategy = facts.processor.get("vision_feature_select_strategy")
    strategy = strategy or facts.config.get("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full"):
        text = f"vision_feature_select_strategy={strategy!r} is not implemented."
        raise UnsupportedConfigValue(text)
    # Early releases do not count the class token that the strategy drops.
    given = facts.processor.get("num_additional_image_tokens")
    num = (1 if strategy == "default" else 0) if given is None else int(given)
    return num - 1 if strategy == "default" else num


@dataclass(frozen=True, slots=True)
class LlavaNextRule(LlavaRule):
    """LlavaNextProcessor: the overview, the tiles without the borders, a token for each line."""

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        rows, cols = (side // self.patch_size for side in layout.tile)
        tall, wide = unpadded(layout, rows, cols)
        return ExpandedPicture(self.soft_token, (rows * cols + self.extra + tall * wide + tall,))


def unpadded(layout: PictureLayout, rows: int, cols: int) -> tuple[int, int]:
    """The patches of the canvas without those of its borders; a tile has `rows` x `cols`."""
    tall, wide = rows * layout.rows, cols * layout.cols
    if layout.width / layout.height > wide / tall:
        # rounded to 7 digits as in the reference: a row more or less changes the number of tokens
        inner = int(round(layout.height * (wide / layout.width), 7))
        return tall - (tall - inner) // 2 * 2, wide
    inner = int(round(layout.width * (tall / layout.height), 7))
    return tall, wide - (wide - inner) // 2 * 2


@dataclass(frozen=True, slots=True)
class LlavaOnevisionRule(PromptRule):
    """LlavaOnevisionProcessor: as LLaVA-NeXT, shrunk where there are more than `most` tiles."""

    per_tile: int
    most: int
    dropped: int

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("image_token", "<image>")
        ratio = facts.processor.get("vision_aspect_ratio") or "anyres_max_9"
        number = str(ratio).removeprefix("anyres_max_")
        if number == ratio or not number.isdecimal():
            text = f"processor_config.json has vision_aspect_ratio={ratio!r}, which is not known."
            raise UnsupportedConfigValue(text)
        strategy = facts.processor.get("vision_feature_select_strategy")
        per_tile = facts.whole("num_image_tokens")
        return cls(token, token, per_tile, int(number), int(strategy == "default"))

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        side = math.isqrt(self.per_tile)
        tall, wide = unpadded(layout, side, side)
        lines, inside = tall, tall * wide
        ratio = math.sqrt(tall * wide / (self.most * side**2))
        if ratio > 1.1:
            lines = int(tall // ratio)
            inside = lines * int(wide // ratio)
        num = self.per_tile + inside + lines - self.dropped
        return ExpandedPicture(self.soft_token, (num,))


@dataclass(frozen=True, slots=True)
class QwenVLRule(PromptRule):
    """Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor, Glm4vProcessor: a token for each
    square of merged patches. `before` and `after` are what templates have around the placeholder.
    """

    TOKENS: ClassVar = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")

    cell: int
    before: str
    after: str

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token, before, after = cls.TOKENS
        token = facts.token("image_token", token)
        patch = facts.whole("patch_size", 14, source="image")
        merge = facts.whole("merge_size", 2, source="image")
        return cls(token, token, patch * merge, before, after)

    @property
    def chat_text(self) -> str:
        return f"{self.before}{self.placeholder}{self.after}"

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        rows, cols = (side // self.cell for side in layout.resized)
        return ExpandedPicture(self.soft_token, (rows * cols,))


@dataclass(frozen=True, slots=True)
class Glm4vRule(QwenVLRule):
    """Glm4vProcessor and Glm46VProcessor."""

    TOKENS = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>")


@dataclass(frozen=True, slots=True)
class PaddleOCRVLRule(QwenVLRule):
    """PaddleOCRVLProcessor."""

    TOKENS = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>")


@dataclass(frozen=True, slots=True)
class KimiK25Rule(QwenVLRule):
    """Kimi_K25Processor."""

    TOKENS = ("<|media_pad|>", "<|media_begin|>image<|media_content|>", "<|media_end|>")


@dataclass(frozen=True, slots=True)
class KimiVLRule(QwenVLRule):
    """The published code of Kimi-VL."""

    TOKENS = ("<|media_pad|>", "<|media_start|>image<|media_content|>", "<|media_end|>")


@dataclass(frozen=True, slots=True)
class FramedRule(PromptRule):
    """A run of `per_tile` tokens for each tile, or of `per_tile` in all, between two tokens."""

    before: str
    after: str
    per_tile: int

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        return self._framed(self.per_tile * layout.num_tiles)

    def _framed(self, num: int) -> ExpandedPicture:
        return ExpandedPicture(f"{self.before}{self.soft_token}{self.after}", (num,))


@dataclass(frozen=True, slots=True)
class InternVLRule(FramedRule):
    """InternVLProcessor, which splits pictures whatever the image processor's JSON says."""

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("context_image_token", "<IMG_CONTEXT>")
        start = facts.token("start_image_token", "<img>")
        end = facts.token("end_image_token", "</img>")
        return cls(token, token, start, end, facts.whole("image_seq_length", 256))

    def processor_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Splits into tiles."""
        return {**values, "crop_to_patches": True}


@dataclass(frozen=True, slots=True)
class InternVLChatRule(InternVLRule):
    """InternVL's published code: <image> in a text, which is not a token of the vocabulary."""

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        length = facts.whole("image_seq_length")
        return cls("<image>", "<IMG_CONTEXT>", "<img>", "</img>", length)


@dataclass(frozen=True, slots=True)
class Gemma3Rule(FramedRule):
    """Gemma3Processor: empty lines around a picture, which join those of the prompt; crops follow
    their picture with a sentence.
    """

    has_edges = True

    @property
    def is_bidirectional(self) -> bool:
        return True

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        begin, end = facts.token("boi_token"), facts.token("eoi_token")
        length = facts.whole("image_seq_length", 256)
        return cls(begin, facts.token("image_token"), f"\n\n{begin}", f"{end}\n\n", length)

    def processor_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Crops are off, and have other bounds, whatever the image processor's JSON says."""
        return {
            **values,
            "do_pan_and_scan": False,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        """One run for the picture, and one for each crop."""
        one = self._framed(self.per_tile)
        num_crops = layout.num_tiles - 1
        if not num_crops:
            return one
        text = (
            f"Here is the original image {one.text} and here are some crops to help you see better "
            + " ".join([one.text] * num_crops)
        )
        return ExpandedPicture(text, one.runs * layout.num_tiles)


@dataclass(frozen=True, slots=True)
class Gemma4Rule(PromptRule):
    """Gemma4Processor: a token for each square of pooled patches."""

    before: str
    after: str
    cell: int
    has_spans: bool = False

    @property
    def is_bidirectional(self) -> bool:
        """Whether a picture's tokens attend to each other: in the larger models."""
        return self.has_spans

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        """Make the rule from the tokenizer's names, the processor's sizes and the text's config."""
        token = facts.token("image_token")
        patch = facts.whole("patch_size", 16, source="image")
        pooling = facts.whole("pooling_kernel_size", 3, source="image")
        begin, end = facts.token("boi_token"), facts.token("eoi_token")
        has_spans = facts.text("use_bidirectional_attention") == "vision"
        return cls(token, token, begin, end, patch * pooling, has_spans)

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        rows, cols = (side // self.cell for side in layout.resized)
        text = f"{self.before}{self.soft_token}{self.after}"
        return ExpandedPicture(text, (rows * cols,))


@dataclass(frozen=True, slots=True)
class PaliGemmaRule(PromptRule):
    """PaliGemmaProcessor: pictures first, then the beginning of the text and the text, then a line
    break. The whole prompt attends in both directions.
    """

    has_whole_prompt = True

    num_tokens: int
    bos_token: str

    @property
    def is_bidirectional(self) -> bool:
        return True

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("image_token", "<image>")
        default = facts.processor.get("image_seq_length") or 256
        length = facts.whole("image_seq_length", default, source="image")
        return cls(token, token, length, facts.token("bos_token", "<bos>"))

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        return ExpandedPicture(self.soft_token, (self.num_tokens,))

    def prompt_text(self, text: str, pictures: Sequence[ExpandedPicture]) -> str:
        """The text may leave the placeholders out."""
        if not pictures:
            return PromptRule.prompt_text(self, text, pictures)
        if self.placeholder not in text:
            text = self.placeholder * len(pictures) + text
        head, _, tail = text.rpartition(self.placeholder)
        text = f"{head}{self.placeholder}{self.bos_token}{tail}\n"
        return PromptRule.prompt_text(self, text, pictures)
