"""The interface of a rule, and how one is applied to text and to ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.errors import RequestError
from quire.media.image_processors.processor import PictureLayout

Place = tuple[int, int]
"""Positions [start, end) of a prompt."""


@dataclass(frozen=True, slots=True)
class ExpandedPicture:
    """The tokens of one picture. `text` has one soft token for every run; `runs` are the lengths.

    A run of a special token is tokenized token by token, so that the text with its runs in full
    would have the same ids: a prompt is tokenized short, then widened.
    """

    text: str
    runs: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows that the encoder makes."""
        return sum(self.runs)


@dataclass(frozen=True, slots=True)
class PromptRule:
    """The rule of a processor class. `placeholder` is the text in a prompt that stands for a
    picture, `soft_token` the token whose embeddings are replaced; `chat_text` is what a chat whose
    template knows no pictures gets for one.

    `has_edges`: an expansion begins or ends with ordinary text, which may join what is next to it.
    `has_whole_prompt`: where rows attend to each other, the text of the prompt does, too.
    """

    has_edges: ClassVar[bool] = False
    has_whole_prompt: ClassVar[bool] = False

    placeholder: str
    soft_token: str

    @property
    def is_bidirectional(self) -> bool:
        """Whether the rows of a picture attend to each other in both directions."""
        return False

    @property
    def chat_text(self) -> str:
        """The placeholder, with what the model's own template has around it."""
        return self.placeholder

    def processor_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of the image processor, with what the processor class sets on its own."""
        return dict(values)

    def expanded(self, layout: PictureLayout) -> ExpandedPicture:
        """The tokens of a picture."""
        raise NotImplementedError

    def prompt_text(self, text: str, pictures: Sequence[ExpandedPicture]) -> str:
        """The prompt with its placeholders expanded. Raises RequestError for another number."""
        parts = text.split(self.placeholder)
        self._check(len(parts) - 1, len(pictures))
        joined = [parts[0]]
        for picture, part in zip(pictures, parts[1:], strict=True):
            joined += picture.text, part
        return "".join(joined)

    def prompt_ids(
        self,
        ids: Sequence[int],
        pictures: Sequence[ExpandedPicture],
        placeholder_id: int,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
    ) -> list[int]:
        """As `prompt_text`, of a prompt that is given as ids. `encode` adds no special tokens."""
        self._check(sum(each == placeholder_id for each in ids), len(pictures))
        result: list[int] = []
        waiting = list(pictures)
        place = 0
        while place < len(ids):
            if ids[place] != placeholder_id:
                result.append(ids[place])
                place += 1
                continue
            text, place = waiting.pop(0).text, place + 1
            # tokenizers have tokens for several line ends, which join across the edge
            if self.has_edges:
                if result and not decode(result[-1:]).strip("\n"):
                    text = decode([result.pop()]) + text
                if place < len(ids) and not decode([ids[place]]).strip("\n"):
                    text, place = text + decode([ids[place]]), place + 1
            result += encode(text)
        return result

    def widened(
        self, ids: Sequence[int], pictures: Sequence[ExpandedPicture], soft_id: int
    ) -> tuple[list[int], list[list[Place]]]:
        """The ids with runs in full, and the places of every picture's rows. Raises RequestError
        where the prompt has soft tokens of its own.
        """
        runs = [(index, run) for index, each in enumerate(pictures) for run in each.runs]
        found = [place for place, each in enumerate(ids) if each == soft_id]
        # soft tokens in the text would get rows that belong elsewhere
        if len(found) != len(runs):
            raise RequestError(
                f"The prompt has the text {self.soft_token!r}, which stands for the inside of a "
                "picture; leave it out.",
                parameter="prompt",
            )
        result: list[int] = []
        places: list[list[Place]] = [[] for _ in pictures]
        last = 0
        for at, (index, run) in zip(found, runs, strict=True):
            result += ids[last:at]
            places[index].append((len(result), len(result) + run))
            result += [soft_id] * run
            last = at + 1
        result += ids[last:]
        return result, places

    def _check(self, num_placeholders: int, num_pictures: int) -> None:
        if num_placeholders > num_pictures:
            raise RequestError(
                f"Found more '{self.placeholder}' placeholders in input prompt than actual "
                f"multimodal data items: {num_placeholders} for {num_pictures}.",
                parameter="prompt",
            )
        if num_placeholders < num_pictures:
            raise RequestError(
                f"The prompt has {num_placeholders} '{self.placeholder}' placeholders for "
                f"{num_pictures} pictures. Write one for each, or apply the chat template.",
                parameter="prompt",
            )
