"""The error for one item of a request that cannot be used."""

from __future__ import annotations

from quire.errors import RequestError


class MediaFault(RequestError):
    """An item cannot be used. `words` go on after its name: "Image 2 `words`."."""

    def __init__(self, words: str, *, label: str = "The picture") -> None:
        super().__init__(f"{label} {words}.", parameter="image")
        self.words = words

    def of(self, label: str) -> MediaFault:
        """The same of the item that `label` names, as a sentence begins with it."""
        return MediaFault(self.words, label=label)
