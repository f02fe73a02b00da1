"""The command line of the engine options: flags from the declaration, and a parser with the
reference's conveniences.

The parser takes `--max_model_len` for `--max-model-len`, and dotted pieces of an object:
`--hf-overrides.a.b 3`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

from quire.config.args.command_help import (
    EVERYTHING,
    FirstFlags,
    HelpAction,
    HelpWithDefaults,
    help_about,
    meant,
    short_help,
    topics,
    unknown_words,
)
from quire.config.args.config_file import words_of
from quire.config.args.option import Kind, Option, default_of, fields_of
from quire.errors import RequestError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)")


def parse_size(text: str) -> int:
    """An integer: 8k = 8000, 8K = 8192, `auto` = -1; fractions (1.5k) only with k, m, g, t."""
    if text == "auto":
        return -1
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 8192, 8k or 8K")
    digits, suffix = match.groups()
    # the rule of vLLM's own parser, whose notation this is
    if "." in digits and (not suffix or suffix.isupper()):
        raise argparse.ArgumentTypeError(f"{text!r}: fractions go with k, m, g and t only")
    value = float(digits) if "." in digits else int(digits)
    return round(value * _SUFFIXES.get(suffix, 1))


def parse_object(text: str) -> dict[str, Any]:
    """`text` as a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def parse_any(text: str) -> Any:
    """`text` as JSON where it is JSON, None, True and False as in Python, else itself."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


_PARSERS: dict[Kind, Callable[[str], Any]] = {
    Kind.TEXT: str,
    Kind.CLASS: str,
    Kind.NAMES: str,
    Kind.NAME_SET: str,
    Kind.PROCESSORS: str,
    Kind.TOKEN: str,
    Kind.INTEGER: int,
    Kind.SIZE: parse_size,
    Kind.NUMBER: float,
    Kind.OBJECT: parse_object,
    Kind.OVERRIDES: parse_object,
    Kind.ANY: parse_any,
}


class CommandLineOptions:
    """A dataclass of options that flags can be made of, and that parsed flags can be made into."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give `parser` a flag for every field, hidden for names that are not built."""
        return add_options(parser, cls)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options in what `argparse` made of the command line; other names are left alone."""
        given = vars(args)
        names = (field.name for field in fields_of(cls))
        return cls(**{name: given[name] for name in names if name in given})


def add_options(
    parser: argparse.ArgumentParser, declaration: type, only: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """Give `parser` a flag for each field of `only` (None: all) of a dataclass of options."""
    groups: dict[str, Any] = {}
    for field in fields_of(declaration):
        if only is not None and field.name not in only:
            continue
        option = field.metadata["option"]
        if isinstance(parser, QuireParser):
            parser.options[field.name] = option
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_flag(groups[option.group], field, option)
    return parser


def _add_flag(group: Any, field: dataclasses.Field[Any], option: Option) -> None:
    flag = "--" + field.name.replace("_", "-")
    # a command that asks one question has -q for it
    taken = group._option_string_actions
    names = (flag, *(alias for alias in option.flags if alias not in taken))
    default = default_of(field)
    # argparse formats help with %
    help = option.help.replace("%", "%%") if option.is_built else argparse.SUPPRESS
    if option.kind is Kind.FLAG or isinstance(default, bool):
        action = "store_true" if field.name.startswith("disable_log") else None
        group.add_argument(
            *names, action=action or argparse.BooleanOptionalAction, default=default, help=help
        )
        return
    group.add_argument(
        *names,
        type=_PARSERS[option.kind],
        action=_ACTIONS.get(option.kind, "store"),
        default=default,
        help=help,
        **_value_form(option),
    )


def _value_form(option: Option) -> dict[str, Any]:
    """The number of values of a flag, and their names in the help."""
    if option.kind in (Kind.NAMES, Kind.NAME_SET, Kind.PROCESSORS):
        return {"nargs": "+", "metavar": "NAME"}
    if option.kind is Kind.TOKEN:
        return {"nargs": "?", "const": True, "metavar": "TOKEN"}
    if option.choices:
        checked = {} if option.is_built else {"choices": option.choices}
        return {"metavar": "{" + ",".join(option.choices) + "}", **checked}
    return {"metavar": option.unit.upper() or option.kind.name}


class MergeObject(argparse.Action):
    """Given several times, the objects are merged; what comes later wins."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        before = vars(namespace).get(self.dest) or {}
        setattr(namespace, self.dest, merged(before, values))


class AddNames(argparse.Action):
    """Given several times, the names add up; those of a parse replace what was there before it."""

    _latest: argparse.Namespace | None = None

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest) if namespace is self._latest else []
        self._latest = namespace
        setattr(namespace, self.dest, [*before, *values])


_ACTIONS: dict[Kind, Any] = {
    Kind.OBJECT: MergeObject,
    Kind.OVERRIDES: MergeObject,
    Kind.NAMES: AddNames,
    Kind.PROCESSORS: AddNames,
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A new dict: `base` with `changes`, dicts within dicts merged alike."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both and old is not None else value
    return result


class QuireParser(argparse.ArgumentParser):
    """argparse with `_` for `-` in flags, dotted pieces of JSON objects, help by topics, and an
    error that is one line and names what was probably meant.

    `first_flags`: what `--help` alone lists; None: everything. `options`: of the flags that were
    made of a declaration.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpWithDefaults)
        has_help = kwargs.pop("add_help", True)
        # argparse's own -h takes no topic
        kwargs["add_help"] = False
        super().__init__(*args, **kwargs)
        self.first_flags: FirstFlags | None = None
        self.options: dict[str, Option] = {}
        if has_help:
            self.add_argument("-h", "--help", action=HelpAction)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; a word that none of them takes is an error."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_words(unknown, self._option_string_actions))
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Rewrite the words first; None: those of the process."""
        return super().parse_known_args(rewrite(sys.argv[1:] if args is None else args), namespace)

    def parse_with_config(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments: what the file of `--config` says, and over it what the words say."""
        if "--config" not in self._option_string_actions:
            plain: argparse.Namespace = self.parse_args(words)
            return plain
        # a parser of its own: the real one would stop at a flag that only the file gives
        probe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        probe.add_argument("--config")
        path = probe.parse_known_args(rewrite(words))[0].config
        try:
            from_file = words_of(path, self._option_string_actions) if path else []
        except RequestError as error:
            self.error(str(error))
        # a copy, so that AddNames takes the words' names for a new parse and replaces the file's
        of_file = argparse.Namespace(**vars(self.parse_args(from_file)))
        made: argparse.Namespace = self.parse_args(words, of_file)
        return made

    def help_about(self, topic: str | None) -> str:
        """The text of `--help`, or of `--help=TOPIC`; a topic that there is not is an error."""
        if topic is None and self.first_flags is not None:
            return short_help(self, self.first_flags)
        if topic is None or topic.lower() == EVERYTHING:
            return self.format_help()
        text = help_about(self, topic, self.options)
        if text is None:
            self.error(f"there is no help about {topic!r}{meant(topic, topics(self))}")
        return text

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the choice that was probably meant."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            text = f"unknown {value!r}{meant(str(value), choices)} (one of {', '.join(choices)})"
            raise argparse.ArgumentError(action, text)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where the help is; exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def rewrite(words: Sequence[str]) -> list[str]:
    """The command line with dashes in flags, and dotted pieces of one object joined as its JSON."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            plain += [word, *rest]
            break
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        # a single dash counts only before a dotted name: -1 is a value
        if not re.match(r"--[A-Za-z]" if not dot else r"--?[A-Za-z]", flag):
            plain.append(word)
            continue
        name = name.replace("_", "-")
        if not dot:
            plain.append(name + equals + value)
            continue
        _put(objects.setdefault(name, {}), path.split("."), value if equals else next(rest, ""))
    flags = [f"{name}={json.dumps(tree)}" for name, tree in objects.items()]
    # objects first: after a `--` they would be positional words
    return flags + plain


def _put(tree: dict[str, Any], path: list[str], text: str) -> None:
    *parents, leaf = path
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[leaf] = parse_any(text)
