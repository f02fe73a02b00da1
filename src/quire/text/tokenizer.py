"""The tokenizer: text to ids and back, with the names that people use of the Hugging Face object.

It wraps one `tokenizers.Tokenizer` and the facts of its side files; nothing in it changes after
loading, unless a program sets an attribute, so threads may share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from quire.errors import InvalidParameter, InvalidType, RequestError, UnknownParameter
from quire.text.encode_options import (
    ENCODE_PARAMETERS,
    check_max_length,
    check_side,
    check_truncation,
)
from quire.text.template_files import choose_template
from quire.text.text_bounds import longest_token_bytes, may_backtrack
from quire.text.token_pieces import TokenPieces, token_of
from quire.text.token_texts import TokenTexts
from quire.text.tokenizer_files import TokenizerFacts, read_tokenizer_folder
from quire.text.tokenizer_formats.folder import MODES
from quire.text.whole_tokenizer import CALL_PARAMETERS, SHARED, WholeTokenizer

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate

_MAX_CACHED_TEMPLATES = 16
_MAX_SHOWN = 200
_UNSUPPORTED_CHAT_PARAMETERS = ("return_assistant_tokens_mask", "sanitize_control_tokens")
_ENCODING_OF_CHATS = ("padding", "truncation", "max_length", "return_tensors")


class Encoded(dict[str, Any]):
    """The result of calling a tokenizer: a dict whose keys are also attributes (`.input_ids`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """Encodes and decodes text and renders chats, as the fast tokenizers of transformers do.

    `library` is the wrapped `tokenizers.Tokenizer`; callers must not change it. What engines do not
    need of a tokenizer (padding, tensors, files) is done by transformers', where that is installed.
    """

    is_fast = True

    def __init__(
        self,
        library: LibraryTokenizer,
        facts: TokenizerFacts,
        name_or_path: str = "",
        mode: str = "auto",
    ) -> None:
        """`mode`: the one that it was read from `name_or_path` with."""
        self.library = library
        self.name_or_path = name_or_path
        self.mode = mode
        self.special_tokens_map = dict(facts.special_tokens)
        self._given: dict[str, Any] = {}
        texts = [*facts.special_tokens.values(), *facts.extra_special_tokens]
        self.all_special_tokens = list(dict.fromkeys(texts))
        self._templates: dict[tuple[str | None, bool], ChatTemplate] = {}
        self.chat_template = facts.chat_template
        self.clean_up_tokenization_spaces = facts.cleans_up_spaces
        self.truncation_side = facts.truncation_side
        self.model_max_length = facts.model_max_length
        ids = (library.token_to_id(text) for text in self.all_special_tokens)
        self.all_special_ids = [index for index in ids if index is not None]
        added = library.get_added_tokens_decoder()
        self.added_token_texts: dict[int, str] = {
            index: token.content for index, token in added.items()
        }
        self.control_tokens = [token.content for token in added.values() if token.special]
        self.pieces = TokenPieces(library)
        self._vocab_size: int | None = None
        self._token_texts = TokenTexts(library)
        self._whole = WholeTokenizer(name_or_path)

    def __getattr__(self, name: str) -> Any:
        """Attributes that transformers' tokenizer of the same folder has besides."""
        # by `vars`: in a copy that has no attributes yet, `self.name_or_path` would come here again
        if not name.startswith("_") and vars(self).get("name_or_path"):
            try:
                return getattr(self._transformers(), name)
            except (ImportError, OSError, ValueError, AttributeError) as error:
                why = f"the tokenizer of transformers does not have it either ({error})"
                raise AttributeError(f"Tokenizer has no {name!r}, and {why}.") from error
        raise AttributeError(f"Tokenizer has no {name!r}.", name=name, obj=self)

    def _transformers(self, truncation_side: str | None = None) -> Any:
        own = {name: vars(self)[name] for name in SHARED if vars(self).get(name) is not None}
        now = {"chat_template": self.chat_template, **self._given, **own}
        return self._whole.get(now | {"truncation_side": truncation_side or self.truncation_side})

    @classmethod
    def from_folder(cls, folder: Path | str, *, mode: str = "auto") -> Tokenizer:
        """Load the tokenizer of a checkpoint folder. `mode` is the engine's `tokenizer_mode`.

        Raises LoadError for anything about the files, InvalidParameter for another mode.
        """
        if mode not in MODES:
            hint = "auto reads what the folder has."
            raise InvalidParameter("tokenizer_mode", mode, "auto, hf or mistral", hint)
        library, facts = read_tokenizer_folder(Path(folder), mode=mode)
        return cls(library, facts, str(folder), mode)

    def __len__(self) -> int:
        return self.library.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included: every id lies in [0, vocab_size)."""
        if self._vocab_size is None:
            self._vocab_size = max(self.get_vocab().values(), default=-1) + 1
        return self._vocab_size

    @property
    def max_token_id(self) -> int:
        """The largest id."""
        return self.vocab_size - 1

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The tokenizer's template, or several by name; may be set."""
        return self._chat_template

    @chat_template.setter
    def chat_template(self, template: str | dict[str, str] | None) -> None:
        # compiled ones are kept by name, which may mean another text now
        self._chat_template = template
        self._templates.clear()

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a text, or None."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a text, or None."""
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token, or None; may be set to a token of the vocabulary."""
        return self.special_tokens_map.get("pad_token")

    @pad_token.setter
    def pad_token(self, text: str) -> None:
        if self.library.token_to_id(text) is None:
            raise InvalidParameter("pad_token", text, "it must be a token of the vocabulary")
        self.special_tokens_map["pad_token"] = self._given["pad_token"] = text

    @property
    def unk_token(self) -> str | None:
        """Text of the token for what the vocabulary lacks, or None."""
        return self.special_tokens_map.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of `bos_token`."""
        return self._id_of_role("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`."""
        return self._id_of_role("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of `pad_token`; may be set."""
        return self._id_of_role("pad_token")

    @pad_token_id.setter
    def pad_token_id(self, index: int) -> None:
        text = self._token(index)
        if text is None:
            raise InvalidParameter("pad_token_id", index, "it must be an id of the vocabulary")
        self.pad_token = text

    @property
    def unk_token_id(self) -> int | None:
        """Id of `unk_token`."""
        return self._id_of_role("unk_token")

    def _id_of_role(self, role: str) -> int | None:
        text = self.special_tokens_map.get(role)
        return None if text is None else self.library.token_to_id(text)

    def get_vocab(self) -> dict[str, int]:
        """Token text -> id with added tokens, a new dict each time (tens of ms for 150k tokens)."""
        return self.library.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Text -> id of the added tokens."""
        return {text: index for index, text in sorted(self.added_token_texts.items())}

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or a list of ids; `unk_token_id` for a text that is not a token."""
        if isinstance(tokens, str):
            index = self.library.token_to_id(tokens)
            return self.unk_token_id if index is None else index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> Any:
        """The token of an id (None outside the vocabulary), or a list of them."""
        if isinstance(ids, int):
            return self._token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self._token(int(index)) for index in ids if int(index) not in skipped]

    def _token(self, index: int) -> str | None:
        return token_of(self.library, index)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        truncation_side: str | None = None,
        **unknown: Any,
    ) -> list[int]:
        """The ids of `text`, with the special tokens of the post-processor unless told otherwise.

        `max_length` alone turns truncation on, at `truncation_side` (None: the tokenizer's own),
        and counts the special tokens; `truncation=True` alone uses the tokenizer's
        `model_max_length`. Raises InvalidType,
        InvalidParameter or UnknownParameter.
        """
        _refuse_unknown(unknown, ENCODE_PARAMETERS)
        limit = self._truncation_limit(truncation, max_length)
        if truncation_side is not None:
            check_side("truncation_side", truncation_side)
        side = truncation_side or self.truncation_side
        return self._encoding(text, bool(add_special_tokens), limit, side).ids

    def beginning(self, text: str, num_tokens: int) -> str:
        """The part of `text` that its first tokens stand for, without special tokens."""
        with _panics_as_errors():
            # not `encode_batch_fast`, which leaves the offsets out
            [encoding] = self.library.encode_batch([text], add_special_tokens=False)
        ends = [end for _, end in encoding.offsets]
        return text if len(ends) <= num_tokens else text[: ends[num_tokens - 1]]

    def encode_pair(
        self,
        text: str,
        pair: str,
        *,
        max_length: int | None = None,
        truncation_side: str | None = None,
    ) -> tuple[list[int], list[int]]:
        """The ids of two texts as the post-processor joins them, and the type of each: 0 for the
        first text, 1 for the second where the model tells them apart.

        With `max_length` the longer one of the texts is cut until the whole fits; special tokens
        stay. Raises InvalidParameter.
        """
        side = truncation_side or self.truncation_side
        # without special tokens, which the cut must not take away; they are added afterwards
        first, second = (self._encoded(one, False) for one in (text, pair))
        if max_length is not None:
            room = max_length - self.library.num_special_tokens_to_add(True)
            if room < 0:
                allowed = "it does not even hold the special tokens"
                raise InvalidParameter("max_length", max_length, allowed)
            rooms = _shared_room(room, len(first.ids), len(second.ids))
            for encoding, count in zip((first, second), rooms, strict=True):
                encoding.truncate(count, direction=side)
        joined = self.library.post_process(first, second, True)
        return joined.ids, joined.type_ids

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        *,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        **unknown: Any,
    ) -> Any:
        """Encode one text or several: {"input_ids", "attention_mask"}, lists of lists for several
        texts. With parameters that only transformers' tokenizers have (`padding`,
        `return_tensors`, ...) it is what theirs gives.
        """
        if CALL_PARAMETERS & unknown.keys():
            side = unknown.pop("truncation_side", None)
            _refuse_unknown(unknown.keys() - CALL_PARAMETERS, ENCODE_PARAMETERS)
            return self._transformers(side)(
                text,
                add_special_tokens=add_special_tokens,
                truncation=max_length is not None if truncation is None else truncation,
                max_length=max_length,
                **unknown,
            )
        if isinstance(text, str):
            ids = self.encode(
                text, add_special_tokens, truncation=truncation, max_length=max_length, **unknown
            )
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [
            self.encode(
                one, add_special_tokens, truncation=truncation, max_length=max_length, **unknown
            )
            for one in text
        ]
        return Encoded(input_ids=rows, attention_mask=[[1] * len(ids) for ids in rows])

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The tokens of `text` as texts."""
        with _panics_as_errors():
            [encoding] = self.library.encode_batch([text], add_special_tokens=add_special_tokens)
        tokens: list[str] = encoding.tokens
        return tokens

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of a text that one token can stand for (None: unknown); found in tens of
        milliseconds when it is first asked for.
        """
        return longest_token_bytes(self.library)

    @cached_property
    def may_backtrack(self) -> bool:
        """Whether a short text may take a time without bound."""
        return may_backtrack(self.library)

    def num_special_tokens_to_add(self) -> int:
        """The number of special tokens that the post-processor adds to one text."""
        return self.library.num_special_tokens_to_add(False)

    def _encoding(
        self, text: str, add_special_tokens: bool, limit: int | None, side: str
    ) -> Encoding:
        if not isinstance(text, str):
            raise InvalidType("text", text, "a string is expected")
        if limit is None:
            return self._encoded(text, add_special_tokens)
        encoding = self._encoded(text, False)
        # The library's own truncation is a setting of the shared object; cutting the encoding is
        # free of state.
        room = limit - (self.num_special_tokens_to_add() if add_special_tokens else 0)
        if room < 0:
            raise InvalidParameter("max_length", limit, "it does not even hold the special tokens")
        encoding.truncate(room, direction=side)
        return self.library.post_process(encoding, None, add_special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> Encoding:
        """Encodes `text`, ids alone. The library's call for one text would hold the
        interpreter; this one does not, and takes half the time.
        """
        encode = self.library.encode_batch_fast
        try:
            with _panics_as_errors():
                [encoding] = encode([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # how the library refuses what it cannot take as UTF-8
            allowed = "it holds a lone surrogate, which is not a character"
            hint = "Send valid Unicode."
            raise InvalidParameter("text", text, allowed, hint) from error
        return encoding

    def _truncation_limit(
        self, truncation: bool | str | None, max_length: int | None
    ) -> int | None:
        if max_length is not None:
            check_max_length("max_length", max_length)
        if truncation is None:
            return max_length
        check_truncation("truncation", truncation)
        if truncation in (False, "do_not_truncate"):
            return None
        return self.model_max_length if max_length is None else max_length

    def decode(
        self,
        ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **unknown: Any,
    ) -> str:
        """The text of `ids`; ids outside the vocabulary give nothing, bytes that are not a
        character give U+FFFD.

        `clean_up_tokenization_spaces` (default: the file's word) joins WordPiece's " ." to "."; for
        BPE, whose spaces are text, it does nothing. Raises InvalidType or UnknownParameter.
        """
        _refuse_unknown(unknown, "skip_special_tokens and clean_up_tokenization_spaces")
        decode = self.library.decode_batch  # lets other threads run, which `decode` does not
        with _panics_as_errors():
            [text] = decode([self._valid_ids(ids)], skip_special_tokens=skip_special_tokens)
        clean = self.clean_up_tokenization_spaces
        if clean_up_tokenization_spaces is not None:
            is_bpe = type(self.library.model).__name__ == "BPE"
            clean = clean_up_tokenization_spaces and (not is_bpe or clean)
        return clean_up_spaces(text) if clean else text

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, skip_special_tokens, **options) for ids in sequences]

    def _valid_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, Mapping):
            ids = ids["input_ids"]
        if hasattr(ids, "tolist"):  # arrays and tensors
            ids = ids.tolist()
        try:
            whole = [ids] if isinstance(ids, int) else [int(index) for index in ids]
        except (TypeError, ValueError) as error:
            raise InvalidType(
                "ids", ids, "an integer or a sequence of integers is expected"
            ) from error
        # the library's ids have 32 bits, and it raises for others
        return [index for index in whole if 0 <= index < 2**32]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens given as texts."""
        decoder = self.library.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def token_text(self, id: int, context: Sequence[int] = ()) -> str:
        """The `decoded_token` of a logprob: the id's own text, with the space that its metaspace
        stands for.

        An id whose bytes only complete a character gives that character when up to four ids of
        `context` (those before it, oldest first) supply the beginning, and "" when they do not.
        """
        return self._token_texts.text(id, context)

    def token_bytes(self, id: int) -> bytes:
        """The id's bytes in UTF-8, perhaps part of a character; none of what is not an id."""
        piece = self.pieces.tables[False][id]
        return piece.encode("utf-8", "replace") if isinstance(piece, str) else piece

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """The template's text: the argument (a text, or the name of one of the tokenizer's), else
        the tokenizer's own.

        With tools, a template named "tool_use" comes before "default". Raises RequestError without
        a template.
        """
        return choose_template(self.chat_template, chat_template, tools is not None)

    def compiled_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> ChatTemplate:
        """`get_chat_template`, compiled, the last few kept. Raises RequestError for bad syntax."""
        key = (chat_template, tools is not None)
        if key not in self._templates:
            from quire.text.chat_template import ChatTemplate  # imports jinja2

            template = ChatTemplate(self.get_chat_template(chat_template, tools))
            # a server may let requests bring templates of their own
            if len(self._templates) >= _MAX_CACHED_TEMPLATES:
                self._templates.clear()
            self._templates[key] = template
        return self._templates[key]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_variables: Any,
    ) -> Any:
        """Render messages, or each of several chats, through the template; ids, or the text with
        `tokenize=False`, or `Encoded` with `return_dict`. `padding`, `truncation`, `max_length` and
        `return_tensors` are those of calling the tokenizer.

        Messages go to the template as they are (see text/chat.py for the engine's normalisation),
        less the keys whose value is None. Further keywords become template variables. Raises
        RequestError.
        """
        for name in _UNSUPPORTED_CHAT_PARAMETERS:
            if name in template_variables:
                raise UnknownParameter(name, "apply_chat_template renders one chat to ids or text")
        if not isinstance(continue_final_message, bool):
            raise InvalidType(
                "continue_final_message", continue_final_message, "a bool is expected"
            )
        encoding = template_variables.pop("tokenizer_kwargs", None) or {}
        for name in _ENCODING_OF_CHATS:
            if template_variables.get(name) is not None:
                encoding = {**encoding, name: template_variables[name]}
            template_variables.pop(name, None)
        template = self.compiled_chat_template(chat_template, tools)
        variables = {
            **self.special_tokens_map,
            **template_variables,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        render = template.render_open if continue_final_message else template.render
        are_several = bool(conversation) and isinstance(conversation[0], list | tuple)
        chats = conversation if are_several else [conversation]
        texts = [render(chat, variables) for chat in chats]
        given: Any = texts if are_several else texts[0]
        if not tokenize:
            return given
        encoded = self(given, add_special_tokens=False, **encoding)
        return encoded if return_dict else encoded["input_ids"]


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise RequestError for a failure of the library that is no Exception: an expression that
    gives up on a text, for one.
    """
    try:
        yield
    except BaseException as error:
        # by name: PyO3 makes the class in each extension, and there is no module to import it from
        if type(error).__name__ != "PanicException":
            raise
        raise RequestError(
            f"The tokenizer fails at this text ({str(error)[:_MAX_SHOWN]}). Send another one.",
            parameter="prompt",
        ) from None


def _refuse_unknown(unknown: Iterable[str], allowed: str) -> None:
    for name in unknown:
        raise UnknownParameter(name, f"{allowed} exist")


def encode_prompt(
    tokenizer: Tokenizer | None, text: str, kwargs: Mapping[str, Any] | None
) -> list[int]:
    """The ids of a prompt's text. Raises InvalidParameter where there is no tokenizer."""
    if tokenizer is None:
        hint = "Give prompt_token_ids, or an engine with a tokenizer."
        allowed = "the engine has no tokenizer (`skip_tokenizer_init=True`)"
        raise InvalidParameter("prompt", text, allowed, hint)
    return tokenizer.encode(text, **dict(kwargs or {}))


def clean_up_spaces(text: str) -> str:
    """Take out the spaces that WordPiece leaves before English punctuation and contractions."""
    for spaced in (" .", " ?", " !", " ,"):
        text = text.replace(spaced, spaced[1])
    text = text.replace(" ' ", "'")
    for spaced in (" n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text


def _shared_room(room: int, first: int, second: int) -> tuple[int, int]:
    """The numbers of tokens of two texts that fit in `room`, where the longer one is cut first."""
    over = max(0, first + second - room)
    cut = min(over, abs(first - second))
    first, second = (first - cut, second) if first > second else (first, second - cut)
    rest = over - cut
    return first - rest // 2, second - (rest - rest // 2)
