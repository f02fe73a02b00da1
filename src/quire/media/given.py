"""Pictures as programs and chats give them, before anything is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quire.errors import InvalidParameter, InvalidType, RequestError
from quire.media.decoding.rgb import as_rgb, load_pillow
from quire.media.fetch.fetcher import GivenPicture
from quire.media.given_rows import RowsReader, rows_given
from quire.media.tensors import is_tensor, numbers_of

_ANTHROPIC_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
PICTURE_TYPES = ("image_url", "input_image", "image_pil", "image_embeds")
"""Types of parts that are pictures, whatever else they have."""
_FORMS = "a picture is a PIL image, an array of three axes, encoded bytes, or None with a uuid"


def label(index: int) -> str:
    """The name of a prompt's picture in errors."""
    return f"Image {index}"


def given_pictures(
    data: Any, uuids: Any = None, rows: RowsReader | None = None
) -> list[GivenPicture]:
    """The pictures of `multi_modal_data["image"]`, one or a list, with those of
    `multi_modal_uuids["image"]`. An array of four axes is a batch of pictures. `rows` knows those
    that come as an encoder's output.
    """
    made = None if rows is None or data is None else rows_given(data, rows)
    if made is not None:
        data = [GivenPicture(rows=each, label=label(n)) for n, each in enumerate(made)]
    items = list(data) if isinstance(data, list | tuple) else [data]
    if len(items) == 1 and not isinstance(data, list | tuple):
        array = _as_array(data)
        if array is not None and array.ndim == 4:
            items = list(array)
    names = list(uuids) if isinstance(uuids, list | tuple) else [uuids] * (uuids is not None)
    if names and len(names) != len(items):
        raise RequestError(
            "If given, multi_modal_uuids['image'] must have same length as "
            f"multi_modal_data['image']: there are {len(names)} and {len(items)}.",
            parameter="multi_modal_uuids",
        )
    names = names or [None] * len(items)
    pairs = zip(items, names, strict=True)
    return [_given(item, uuid, index) for index, (item, uuid) in enumerate(pairs)]


def _given(item: Any, uuid: Any, index: int) -> GivenPicture:
    if uuid is not None and not isinstance(uuid, str):
        allowed = "a uuid is a string or None"
        raise InvalidType("multi_modal_uuids", uuid, allowed, "Write the ids as text.")
    name = label(index)
    if isinstance(item, GivenPicture):
        return replace(item, uuid=uuid)
    if item is None:
        return GivenPicture(uuid=uuid, label=name)
    if isinstance(item, bytes | bytearray | memoryview):
        return GivenPicture(data=bytes(item), uuid=uuid, label=name)
    array = _as_array(item)
    if array is not None:
        if array.ndim != 3:
            hint = f"This one has {array.ndim} axes."
            raise InvalidParameter("multi_modal_data", array.shape, _FORMS, hint)
        return GivenPicture(pixels=array, uuid=uuid, label=name)
    if hasattr(item, "getbands") and hasattr(item, "convert"):  # PIL, which may not be installed
        load_pillow()
        # In this process, as the caller has the object; the file behind it is the caller's.
        return GivenPicture(pixels=np.asarray(as_rgb(item)), uuid=uuid, label=name)
    raise InvalidType("multi_modal_data", type(item).__name__, _FORMS)


def _as_array(item: Any) -> Any:
    """numpy's arrays, and tensors without importing their library."""
    if isinstance(item, np.ndarray):
        return item
    return numbers_of(item) if is_tensor(item) else None


def picture_of_part(part: Mapping[str, Any], index: int) -> GivenPicture | None:
    """The picture of a part of a chat message, in the form of OpenAI's chats (`image_url`), of its
    Responses (`input_image`), of Anthropic (`image`), or of programs (`image_pil`), or the rows of
    one (`image_embeds`). None for parts of other types. `index`: its number among the pictures of
    the prompt.
    """
    kind = part.get("type") or _kind_by_key(part)
    name, uuid = label(index), _text(part, "uuid")
    if kind in ("image_url", "input_image"):
        if part.get("file_id") is not None:
            hint = "Send the picture as image_url."
            allowed = "this server keeps no files for pictures"
            raise InvalidParameter("file_id", part["file_id"], allowed, hint)
        return _checked(GivenPicture(url=_url(part.get("image_url")), uuid=uuid, label=name))
    if kind == "image" and isinstance(part.get("source"), Mapping):
        return _checked(_of_source(part["source"], uuid, name))
    if kind == "image_embeds":
        return _checked(GivenPicture(rows=part.get("image_embeds"), uuid=uuid, label=name))
    if kind == "image_pil":
        return _given(part.get("image_pil"), uuid, index)
    return None


def _kind_by_key(part: Mapping[str, Any]) -> str | None:
    """The type of a part that has none and one known key."""
    found = [key for key in ("image_url", "image_pil", "image_embeds") if key in part]
    return found[0] if len(found) == 1 and "text" not in part else None


def _url(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is not None and not isinstance(value, str):
        allowed = "it is a string, or an object with a url"
        raise InvalidType("image_url", value, allowed)
    return value


def _text(part: Mapping[str, Any], key: str) -> str | None:
    value = part.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidType(key, value, "it is a string")
    return value


def _of_source(source: Mapping[str, Any], uuid: str | None, name: str) -> GivenPicture:
    kind = source.get("type")
    if kind == "url":
        return GivenPicture(url=_text(source, "url"), uuid=uuid, label=name)
    if kind != "base64":
        allowed = "an image comes as base64 or url"
        raise InvalidParameter("source.type", kind, allowed)
    media_type = source.get("media_type")
    if media_type not in _ANTHROPIC_TYPES:
        allowed = f"it is one of {', '.join(_ANTHROPIC_TYPES)}"
        raise InvalidParameter("source.media_type", media_type, allowed)
    data = _text(source, "data") or ""
    return GivenPicture(url=f"data:{media_type};base64,{data}", uuid=uuid, label=name)


def _checked(picture: GivenPicture) -> GivenPicture:
    if picture.is_reference and not picture.uuid:
        text = f"{picture.label} has neither a URL nor a uuid."
        raise RequestError(text, parameter="messages")
    return picture
