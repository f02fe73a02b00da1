"""`/v1/responses/compact`: a long conversation made short by the model itself.

The reply has the user's messages as they were and one `compaction` item with a summary of the
rest. Sent back as input, the item stands for that summary.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from quire.errors import InvalidParameter

_PREFIX = "quire-summary-1:"
MAX_SUMMARY_TOKENS = 1024
REQUEST = (
    "Summarise this conversation for somebody who will go on with it: the goals, the decisions and "
    "their reasons, names, numbers and file names that matter, the results of tools, and what is "
    "still to be done. Write the summary only."
)
"""The request to the model at the end of the conversation."""
_OPENING = "Summary of the conversation before this point:\n\n"


def sealed(summary: str) -> str:
    """A summary as `encrypted_content`; not secret, since its owner wrote the conversation."""
    return base64.b64encode((_PREFIX + summary).encode()).decode()


def message_of(item: dict[str, Any], name: str) -> dict[str, Any]:
    """The message of a `compaction` item. Raises InvalidParameter for foreign content."""
    content = item.get("encrypted_content")
    try:
        text = base64.b64decode(content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, TypeError, ValueError):
        text = ""
    # content of another server is encrypted with its key, and would be read as noise
    if not text.startswith(_PREFIX):
        allowed = "it must be what /v1/responses/compact of this server returned"
        raise InvalidParameter(f"{name}.encrypted_content", content, allowed)
    return {"role": "user", "content": _OPENING + text.removeprefix(_PREFIX)}
