"""Pictures in chats whose templates know text alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.errors import RequestError


class PicturesAsText(msgspec.Struct, frozen=True):
    """Makes the content of a message for templates that know text alone. Placeholders that its
    texts have already count; what is missing, `chat_text` for each, stands before the whole text,
    on lines of their own, or where the picture is if it `interleaves`.
    """

    placeholder: str
    chat_text: str
    interleaves: bool = False

    def __call__(self, parts: Sequence[str | None]) -> str:
        """`parts`: texts, None for pictures. Raises RequestError for too many placeholders."""
        texts = [part for part in parts if part is not None]
        num_pictures = len(parts) - len(texts)
        num_typed = sum(text.count(self.placeholder) for text in texts)
        if num_typed > num_pictures:
            raise RequestError(
                f"Found more '{self.placeholder}' placeholders in input prompt than actual "
                f"multimodal data items: {num_typed} for {num_pictures}.",
                parameter="messages",
            )
        missing = num_pictures - num_typed
        if not self.interleaves:
            return "\n".join([self.chat_text] * missing + texts)
        lines = []
        for part in parts:
            if part is not None:
                lines.append(part)
            elif missing:
                lines.append(self.chat_text)
                missing -= 1
        return "\n".join(lines)
