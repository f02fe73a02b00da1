"""Help of commands with many flags: the ones that people use first, one group, one flag, or all.

`--help` alone lists `FirstFlags` where a command has them; `--help=TOPIC` takes `all`, the name of
a group, the name of a flag or a part of it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.config.args.foreign_flags import FOREIGN_FLAGS
from quire.config.args.option import Option

FirstFlags = Mapping[str, Sequence[str]]
"""Heading -> names of the flags below it (`max_model_len`), as `--help` alone shows them."""

EVERYTHING = "all"
_SIMILARITY = 0.65
"""Least ratio (difflib) at which a name is taken for a misspelt one."""


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows a default where there is one to speak of, and the form of a value once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or action.default is False or action.default == {}
        return action.help if nothing else super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """The flag and its aliases, then the value once."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class HelpAction(argparse.Action):
    """Print the help about a topic and stop."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text = "print this; TOPIC: all, a group, a flag or a part of its name"
        super().__init__(option_strings, argparse.SUPPRESS, "?", metavar="TOPIC", help=text,
                         default=argparse.SUPPRESS)  # fmt: skip

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        parser._print_message(parser.help_about(values), sys.stdout)
        parser.exit()


def meant(word: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` for a word that is not among the names, or nothing."""
    near = difflib.get_close_matches(word, names, 1, _SIMILARITY)
    return f"; did you mean {near[0]}?" if near else ""


def unknown_words(words: Sequence[str], flags: Iterable[str]) -> str:
    """A sentence about words that no argument takes: flags of other servers by name."""
    unknown = [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
    if not unknown:
        return "unexpected argument" + "s" * (len(words) > 1) + ": " + " ".join(words)
    known = [flag for flag in flags if flag.startswith("--")]
    return "; ".join(_unknown_flag(flag, known) for flag in unknown)


def _unknown_flag(flag: str, known: Sequence[str]) -> str:
    name = flag.lstrip("-")
    instead = FOREIGN_FLAGS.get(name) or FOREIGN_FLAGS.get(name.removeprefix("no-"))
    if instead:
        return f"{flag} is an option of vLLM that Quire does not have. {instead}"
    return f"unknown option {flag}{meant(flag, known)}"


def short_help(parser: argparse.ArgumentParser, first: FirstFlags) -> str:
    """Usage, the first flags below their headings, and how to see the others."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, [], [])
    formatter.add_text(parser.description)
    actions = {action.dest: action for action in parser._actions}
    for heading, names in first.items():
        formatter.start_section(heading)
        formatter.add_arguments([actions[name] for name in names])
        formatter.end_section()
    others = "--help=all lists all flags, --help=GROUP those of a group, --help=FLAG one of them."
    formatter.add_text(f"{others} Groups: {', '.join(_groups(parser))}.")
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def help_about(
    parser: argparse.ArgumentParser, topic: str, options: Mapping[str, Option]
) -> str | None:
    """The help of a group or of the flags that have `topic` in their names; None: neither.

    `options`: those that are not built are described by them.
    """
    groups = _groups(parser)
    by_name = {heading.lower(): heading for heading in groups}
    if heading := by_name.get(topic.lower().replace("-", " ").replace("_", " ")):
        return _section(parser, heading, groups[heading])
    name = topic.lstrip("-").replace("_", "-")
    if instead := FOREIGN_FLAGS.get(name):
        return f"--{name} is an option of vLLM that Quire does not have. {instead}\n"
    exact = [action for action in parser._actions if _has(action, name)]
    part = [action for action in parser._actions if name in " ".join(action.option_strings)]
    # --help=model is about that flag alone, though many have the word in their names
    found = exact or part
    if not name or not found:
        return None
    shown = [action for action in found if action.help is not argparse.SUPPRESS]
    hidden = [action for action in found if action.help is argparse.SUPPRESS]
    unbuilt = [_not_built(action, options[action.dest]) for action in hidden]
    return (_section(parser, "Flags", shown) if shown else "") + "".join(unbuilt)


def _not_built(action: argparse.Action, option: Option) -> str:
    flags = ", ".join(action.option_strings)
    return f"{flags}: {option.help}. Not built: only {option.allowed}. {option.hint}\n"


def topics(parser: argparse.ArgumentParser) -> list[str]:
    """Values of `--help=`, for the words of an error."""
    flags = [flag.lstrip("-") for action in parser._actions for flag in action.option_strings]
    return [EVERYTHING, *_groups(parser), *flags]


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Heading -> the flags below it that are shown."""
    groups: dict[str, list[argparse.Action]] = {}
    for group in parser._action_groups[2:]:  # after argparse's own two
        shown = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]
        if shown and group.title:
            groups[group.title] = shown
    return groups


def _section(
    parser: argparse.ArgumentParser, heading: str, actions: Sequence[argparse.Action]
) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(heading)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def _has(action: argparse.Action, name: str) -> bool:
    return f"--{name}" in action.option_strings or f"-{name}" in action.option_strings
