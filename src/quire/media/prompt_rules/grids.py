"""Rules with tokens between rows or tiles: Pixtral (LightOnOCR has none), Idefics3 and SmolVLM,
LFM2-VL, Aya Vision, Command A Vision, Llama 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.errors import UnsupportedConfigValue
from quire.media.image_processors.processor import PictureLayout
from quire.media.prompt_rules.facts import PromptFacts
from quire.media.prompt_rules.rule import ExpandedPicture, PromptRule


@dataclass(frozen=True, slots=True)
class PixtralRule(PromptRule):
    """PixtralProcessor: a run for each row of patches, which a token ends. It sets the patch of its
    image processor, as the encoder merges patches.
    """

    cell: int
    row_end: str
    picture_end: str

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        patch = facts.whole("patch_size", 16)
        merge = facts.whole("spatial_merge_size", 1)
        token = facts.token("image_token", "[IMG]")
        row_end = facts.token("image_break_token", "[IMG_BREAK]")
        return cls(
            token, token, patch * merge, row_end, facts.token("image_end_token", "[IMG_END]")
        )

    def processor_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sides are multiples of merged patches."""
        return {**values, "patch_size": self.cell}

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        rows, cols = (side // self.cell for side in layout.tile)
        text = (self.soft_token + self.row_end) * (rows - 1) + self.soft_token + self.picture_end
        return ExpandedPicture(text, (cols,) * rows)


@dataclass(frozen=True, slots=True)
class LightOnOcrRule(PromptRule):
    """LightOnOcrProcessor: a run for the whole picture, whose sides are whole merged patches."""

    cell: int

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("image_token", "<|image_pad|>")
        return cls(
            token, token, facts.whole("patch_size", 14) * facts.whole("spatial_merge_size", 2)
        )

    def processor_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sides are multiples of merged patches."""
        return {**values, "patch_size": self.cell}

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        rows, cols = (side // self.cell for side in layout.tile)
        return ExpandedPicture(self.soft_token, (rows * cols,))


@dataclass(frozen=True, slots=True)
class Idefics3Rule(PromptRule):
    """Idefics3Processor, SmolVLMProcessor: a run per tile after its place, then the whole."""

    fence: str
    whole: str
    per_tile: int

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("image_token", "<image>")
        fence = facts.token("fake_image_token", "<fake_token_around_image>")
        whole = facts.token("global_image_token", "<global-img>")
        return cls(token, token, fence, whole, facts.whole("image_seq_len", 169))

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        lines = [
            "".join(
                f"{self.fence}<row_{row + 1}_col_{col + 1}>{self.soft_token}"
                for col in range(layout.cols)
            )
            + "\n"
            for row in range(layout.rows)
        ]
        lines += ["\n"] * bool(lines)
        lines.append(f"{self.fence}{self.whole}{self.soft_token}{self.fence}")
        return ExpandedPicture("".join(lines), (self.per_tile,) * layout.num_tiles)


@dataclass(frozen=True, slots=True)
class Lfm2VlRule(PromptRule):
    """Lfm2VlProcessor: a run for each tile after a token with its place, then the overview."""

    cell: int
    patch_size: int
    has_overview: bool
    has_tokens: bool
    before: str
    after: str
    overview: str

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("image_token", "<image>")
        patch = facts.whole("encoder_patch_size", 16, source="image")
        use = facts.processor.get("use_image_special_tokens")
        thumbnail = facts.image.get("use_thumbnail")
        return cls(
            token,
            token,
            cell=facts.whole("downsample_factor", 2, source="image"),
            patch_size=patch,
            has_overview=True if thumbnail is None else bool(thumbnail),
            has_tokens=True if use is None else bool(use),
            before=facts.token("image_start_token", "<|image_start|>"),
            after=facts.token("image_end_token", "<|image_end|>"),
            overview=facts.token("image_thumbnail_token", "<|img_thumbnail|>"),
        )

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        parts, runs = [], []
        is_split = layout.rows * layout.cols > 1
        if layout.rows and is_split:
            for row in range(layout.rows):
                for col in range(layout.cols):
                    parts.append(self._mark(f"<|img_row_{row + 1}_col_{col + 1}|>"))
                    parts.append(self.soft_token)
                    runs.append(self._num(layout.tile))
        if self.has_overview or not is_split:
            parts += [self._mark(self.overview) if is_split else "", self.soft_token]
            runs.append(self._num(layout.resized))
        text = f"{self._mark(self.before)}{''.join(parts)}{self._mark(self.after)}"
        return ExpandedPicture(text, tuple(runs))

    def _mark(self, token: str) -> str:
        return token if self.has_tokens else ""

    def _num(self, size: tuple[int, int]) -> int:
        rows, cols = (-(-(side // self.patch_size) // self.cell) for side in size)
        return rows * cols


@dataclass(frozen=True, slots=True)
class AyaVisionRule(PromptRule):
    """AyaVisionProcessor: a run for each tile after its number, the whole picture as the last."""

    per_tile: int
    before: str
    after: str
    tile: str
    whole: str

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        patch = facts.whole("patch_size", 28) * facts.whole("downsample_factor", 1)
        return cls(
            facts.token("image_token", "<image>"),
            facts.token("img_patch_token", "<|IMG_PATCH|>"),
            per_tile=(facts.whole("img_size", 364) // patch) ** 2,
            before=facts.token("start_of_img_token", "<|START_OF_IMG|>"),
            after=facts.token("end_of_img_token", "<|END_OF_IMG|>"),
            tile=facts.token("tile_token", "TILE"),
            whole=facts.token("tile_global_token", "TILE_GLOBAL"),
        )

    def processor_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Splits into tiles."""
        return {**values, "crop_to_patches": True}

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        numbers = "".join(
            f"{self.tile}_{index}{self.soft_token}" for index in range(1, layout.num_tiles)
        )
        text = f"{self.before}{numbers}{self.whole}{self.soft_token}{self.after}"
        return ExpandedPicture(text, (self.per_tile,) * layout.num_tiles)


@dataclass(frozen=True, slots=True)
class Cohere2VisionRule(PromptRule):
    """Cohere2VisionProcessor: a run for each tile, which a token ends."""

    per_tile: int
    before: str
    after: str
    tile_end: str

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        token = facts.token("image_token")
        return cls(
            token,
            token,
            per_tile=facts.whole("patch_size", 16, source="image") ** 2,
            before=facts.token("boi_token"),
            after=facts.token("eoi_token"),
            tile_end=facts.token("img_line_break_token"),
        )

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        tiles = (self.soft_token + self.tile_end) * layout.num_tiles
        text = f"{self.before}{tiles}{self.after}"
        return ExpandedPicture(text, (self.per_tile,) * layout.num_tiles)


@dataclass(frozen=True, slots=True)
class Llama4Rule(PromptRule):
    """Llama4Processor: a run for each tile, with tokens between those of a row and after a row; the
    whole picture as the last. Its tokens are fixed.
    """

    patch_size: int
    ratio: int

    @classmethod
    def read(cls, facts: PromptFacts) -> Self:
        ratio = facts.processor.get("pixel_shuffle_ratio") or 0.5
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            text = f"processor_config.json has pixel_shuffle_ratio={ratio!r}; it is up to 1."
            raise UnsupportedConfigValue(text)
        placeholder = facts.token("fake_image_token", "<|image|>")
        if placeholder != "<|image|>":
            text = "processor_config.json has another fake_image_token than '<|image|>'."
            raise UnsupportedConfigValue(text)
        patch = facts.whole("patch_size", 14)
        return cls(placeholder, "<|patch|>", patch, round(1 / ratio**2))

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        row = "<|tile_x_separator|>".join([self.soft_token] * layout.cols) + "<|tile_y_separator|>"
        is_split = layout.rows * layout.cols > 1
        inside = row * layout.rows if is_split else ""
        text = f"<|image_start|>{inside}<|image|>{self.soft_token}<|image_end|>"
        tall, wide = (side // self.patch_size for side in layout.tile)
        return ExpandedPicture(text, (tall * wide // self.ratio,) * layout.num_tiles)
