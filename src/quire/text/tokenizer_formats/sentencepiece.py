"""SentencePiece models (`tokenizer.model`): BPE or unigram pieces, and how texts are normalised.

The file is a protocol buffer (sentencepiece_model.proto of that project); the few fields that
matter are read here, so that no package is needed. As in transformers, a text is cut at special
and user-defined pieces before it is normalised, so that next to such a piece blanks may be other
tokens than in SentencePiece itself. User-defined runs of blanks are found in the normalised text,
as SentencePiece does: the longest first, and whole. In a unigram model a run that is longer than
the longest piece is as many pieces as there, perhaps of other lengths.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from quire.errors import LoadError
from quire.text.model_files import MOST_VOCABULARY_BYTES, has_file
from quire.text.tokenizer_formats.character_map import CharacterMap
from quire.text.tokenizer_formats.foreign import ForeignTokenizer

_ALL = 1 << 16
"""Blanks that no text begins with."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Values of a piece's type."""
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
_UNIGRAM, _BPE = 1, 2
_SPACE = "\u2581"
_MOST_PIECES = 1 << 21
_MOST_PIECE = 1024
"""Characters of one piece; the number of its divisions grows with it."""
Value = int | bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class _Model:
    pieces: list[_Piece]
    trainer: dict[int, Value]
    normalizer: dict[int, Value]
    characters: CharacterMap | None


def read_sentencepiece(path: Path) -> ForeignTokenizer:
    """Read a SentencePiece model. Raises LoadError."""
    # for its errors: the file is read as a whole below
    has_file(path, MOST_VOCABULARY_BYTES)
    try:
        model = _parse(path.read_bytes())
    except (ValueError, IndexError, TypeError, struct.error, OSError) as error:
        raise LoadError(f"{path} is not a SentencePiece model: {error}.") from error
    _check(path, model)
    try:
        library = _build(model)
    except BaseException as error:  # the library raises Exception, or panics at hostile tables
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise LoadError(f"{path} cannot be read by the tokenizers library: {error}.") from error
    for length in _runs(model.pieces):
        if len(library.model.tokenize(_SPACE * length)) > 1:
            raise LoadError(
                f"{path} has a user-defined piece of {length} blanks, which its other runs of "
                "blanks do not add up to; this is not implemented."
            )
    library.add_tokens(_added(model.pieces))
    return ForeignTokenizer(library, _roles(model), adds_bos=True)


def _check(path: Path, model: _Model) -> None:
    kind = _number(model.trainer, 3, _UNIGRAM)
    texts = {piece.text for piece in model.pieces}
    if kind not in (_UNIGRAM, _BPE):
        raise LoadError(f"{path} has pieces of type {kind}; known are 1 (unigram) and 2 (BPE).")
    if len(texts) < len(model.pieces) or "" in texts:
        raise LoadError(f"{path} has pieces that are empty or equal.")
    if sum(piece.kind == _UNKNOWN for piece in model.pieces) != 1:
        raise LoadError(f"{path} has not exactly one piece for what it does not know.")
    if max(map(len, texts)) > _MOST_PIECE:
        raise LoadError(f"{path} has a piece of more than {_MOST_PIECE} characters.")
    if not all(-1e30 < piece.score < 1e30 for piece in model.pieces):
        raise LoadError(f"{path} has a piece whose score is not a number.")
    if _number(model.trainer, 24, 0):
        raise LoadError(f"{path} has blanks at the end of its pieces, which is not implemented.")


def _build(model: _Model) -> LibraryTokenizer:
    pieces, falls_back = model.pieces, bool(_number(model.trainer, 35, 0))
    unknown = next(i for i, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    runs = _runs(pieces)
    if _number(model.trainer, 3, _UNIGRAM) == _UNIGRAM:
        best = max(p.score for p in pieces if p.kind in (_NORMAL, _USER_DEFINED, _UNKNOWN))
        scores = [(p.text, _score(p, best)) for p in pieces]
        library = LibraryTokenizer(models.Unigram(scores, unknown, falls_back))
    else:
        vocab = {piece.text: index for index, piece in enumerate(pieces)}
        library = LibraryTokenizer(
            models.BPE(
                vocab=vocab,
                merges=[*_merges_of_runs(runs), *_merges(pieces)],
                unk_token=pieces[unknown].text,
                # SentencePiece makes one piece of unknown characters in a row
                fuse_unk=True,
                byte_fallback=falls_back,
            )
        )
        if runs:
            lengths = "|".join(f"{_SPACE}{{{length}}}" for length in reversed(runs))
            library.pre_tokenizer = pre_tokenizers.Split(Regex(lengths), behavior="isolated")
    library.normalizer = _normalizer(model)
    library.decoder = _decoder(model, falls_back)
    return library


def _is_run(piece: _Piece) -> bool:
    """Whether it is a user-defined run of blanks."""
    return piece.kind == _USER_DEFINED and not piece.text.strip(_SPACE)


def _runs(pieces: list[_Piece]) -> list[int]:
    """The lengths of the user's runs of blanks, in order."""
    return sorted(len(piece.text) for piece in pieces if _is_run(piece))


def _score(piece: _Piece, best: float) -> float:
    """A unigram piece's score; the user's are chosen wherever they can be."""
    if piece.kind != _USER_DEFINED:
        return piece.score
    # the formula of SentencePiece's unigram model
    return len(piece.text) * best - 0.1


def _merges_of_runs(lengths: list[int]) -> list[tuple[str, str]]:
    """Merges that make one piece of a run that has been cut out of the text: the shortest first,
    and of those with one length the longest beginning.
    """
    known = {1, *lengths}
    return [
        (_SPACE * left, _SPACE * (length - left))
        for length in lengths
        for left in range(length - 1, 0, -1)
        if left in known and length - left in known
    ]


def _merges(pieces: list[_Piece]) -> list[tuple[str, str]]:
    """The divisions of each piece into two others, the best score first. Of equal scores (runs of
    blanks in Llama's and Mistral's files) SentencePiece takes the leftmost pair, whose left part
    has grown most.
    """
    mergeable = {p.text for p in pieces if p.kind not in (_UNKNOWN, _CONTROL)}
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece in pieces:
        if piece.kind in (_UNKNOWN, _CONTROL, _BYTE, _UNUSED, _USER_DEFINED):
            continue
        for at in range(1, len(piece.text)):
            left, right = piece.text[:at], piece.text[at:]
            if left in mergeable and right in mergeable:
                pair = left, right
                found.append((-piece.score, -len(left), -len(right), pair))
    return [pair for *_, pair in sorted(found)]


def _normalizer(model: _Model) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.characters is not None:
        steps.append(normalizers.Normalizer.custom(model.characters))
    is_trimmed = bool(_number(model.normalizer, 4, 1))  # remove_extra_whitespaces
    if is_trimmed:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if _number(model.normalizer, 3, 1):  # add_dummy_prefix
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", _SPACE))
    if is_trimmed:  # also what a text has of the mark itself
        steps.append(normalizers.Replace(Regex(f"{_SPACE}+\\z"), ""))
    return normalizers.Sequence(steps)


def _decoder(model: _Model, falls_back: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " ")]
    if falls_back or not any(_BYTE_PIECE.fullmatch(piece.text) for piece in model.pieces):
        steps.append(decoders.ByteFallback())  # which streams know, and changes nothing else
    steps.append(decoders.Fuse())
    if _number(model.normalizer, 4, 1):  # remove_extra_whitespaces
        steps.append(decoders.Strip(" ", _ALL, 0))
    elif _number(model.normalizer, 3, 1):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _added(pieces: list[_Piece]) -> list[AddedToken]:
    """Pieces that are found in a text before it is normalised; all but the user's are special."""
    return [
        AddedToken(piece.text, special=piece.kind != _USER_DEFINED, normalized=False)
        for piece in pieces
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and not _is_run(piece)
    ]


def _roles(model: _Model) -> dict[str, str]:
    """The tokens that the trainer has ids for; -1 is none."""
    fields = {
        "unk_token": (40, 0),
        "bos_token": (41, 1),
        "eos_token": (42, 2),
        "pad_token": (43, -1),
    }
    ids = {role: _number(model.trainer, *field) for role, field in fields.items()}
    return {
        role: model.pieces[index].text
        for role, index in ids.items()
        if 0 <= index < len(model.pieces) and model.pieces[index].kind in (_UNKNOWN, _CONTROL)
    }


def _parse(data: bytes) -> _Model:
    pieces: list[_Piece] = []
    parts: dict[int, dict[int, Value]] = {}
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_piece(_bytes(value)))
            if len(pieces) > _MOST_PIECES:
                raise ValueError(f"it has more than {_MOST_PIECES} pieces")
        elif field in (2, 3):
            # of a field that is there twice the last one counts, as in every reader of protocol
            # buffers
            parts[field] = dict(_fields(_bytes(value)))
    if not pieces:
        raise ValueError("it has no pieces")
    normalizer = parts.get(3, {})
    table = _bytes(normalizer.get(2, b""))
    characters = CharacterMap(table) if table else None
    return _Model(pieces, parts.get(2, {}), normalizer, characters)


def _piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    score = struct.unpack("<f", _bytes(fields.get(2, b"\0\0\0\0")))[0]
    return _Piece(_bytes(fields.get(1, b"")).decode(), score, _number(fields, 3, 1))


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another type")
    return value


def _number(fields: dict[int, Value], field: int, default: int) -> int:
    """An integer field; negative ones take 64 bits."""
    value = fields.get(field, default)
    if not isinstance(value, int):
        raise ValueError(f"field {field} is not an integer")
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message: integers, and bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field is written in the way {wire}")
        if at + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number has more than 64 bits")
