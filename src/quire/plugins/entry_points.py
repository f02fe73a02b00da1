"""The entry points of installed packages in the groups of plugins.

Read from the folders and zip files of sys.path directly: `importlib.metadata` takes 50 ms to import
and 8 ms to read 120 packages, which every start would pay; this takes 2 ms.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from quire.environment import read_plugin_environment

GROUPS = {
    "general_plugins": "called once in each process",
    "platform_plugins": "opens the device of the workers",
    "logits_processors": "edits logits in the workers",
    "stat_logger_plugins": "records the statistics of every step",
    "io_processor_plugins": "makes prompts of data, if io_processor_plugin names it",
    "endpoint_plugins": "adds routes to the server, if VLLM_PLUGINS names it",
}
"""Groups of entry points below `quire.` and `vllm.`, and what becomes of their members."""

UNLIMITED = "logits_processors"
"""The group that VLLM_PLUGINS does not limit: leaving a processor out changes answers."""

BY_NAME = "endpoint_plugins"
"""The group whose members are loaded only if VLLM_PLUGINS names them."""

_FOLDER = re.compile(r"(?P<package>.+?)(-(?P<version>[^-]+?))?(-py[\d.]+)?\.(dist|egg)-info")
_PREFIXES = ("quire", "vllm")


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One plugin: `value` is "module:attribute". `prefix` is that of its group, quire or vllm;
    `folder` the folder or zip file of sys.path that the package is installed in.
    """

    prefix: str
    group: str
    name: str
    value: str
    package: str
    version: str
    folder: str

    @property
    def title(self) -> str:
        """The plugin as errors name it."""
        package = f"{self.package} {self.version}".strip()
        return f"{self.prefix}.{self.group} {self.name!r} of {package} ({self.value})"


def installed(group: str) -> list[EntryPoint]:
    """The members of a group, in the order of sys.path and of their packages' names. A package
    that has the same name below `quire.` and `vllm.` means the first for Quire.
    """
    return [point for point in all_installed() if point.group == group]


def all_installed() -> tuple[EntryPoint, ...]:
    """The members of all groups. The folders of sys.path are read once."""
    return _all_points(tuple(sys.path))


def allowed(point: EntryPoint) -> bool:
    """Whether VLLM_PLUGINS leaves the plugin in."""
    names = read_plugin_environment().names
    if point.group == UNLIMITED:
        return True
    if point.group == BY_NAME:
        return names is not None and point.name in names
    return names is None or point.name in names


@cache
def _all_points(folders: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    seen: set[str] = {"vllm"}  # another engine's own plugins are for itself
    found: dict[tuple[str, str, str], EntryPoint] = {}
    for folder in dict.fromkeys(folders):
        for package, version, text in _packages(folder or "."):
            key = re.sub(r"[-_.]+", "-", package).lower()
            if key in seen:
                continue  # hidden by the same package in an earlier folder
            seen.add(key)
            for prefix, group, name, value in _points_in(text):
                point = EntryPoint(prefix, group, name, value, package, version, folder)
                if (key, group, name) not in found or prefix == _PREFIXES[0]:
                    found[key, group, name] = point
    return tuple(found.values())


def _packages(folder: str) -> list[tuple[str, str, str]]:
    if os.path.isfile(folder):
        from quire.plugins.zipped_packages import metadata_in  # few paths have a zip file

        found = metadata_in(folder)
    else:
        found = _metadata_in_folder(folder)
    named = [(_FOLDER.fullmatch(name), text) for name, text in found]
    return sorted((m["package"], m["version"] or "", text) for m, text in named if m)


def _metadata_in_folder(folder: str) -> Iterator[tuple[str, str]]:
    """Names of folders of metadata, with the text of their entry_points.txt ("" without)."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if _FOLDER.fullmatch(entry.name)]
    except OSError:  # not there, or not to be read
        return
    for name in names:
        try:
            with open(os.path.join(folder, name, "entry_points.txt"), encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            text = ""
        yield name, text


def _points_in(text: str) -> Iterator[tuple[str, str, str, str]]:
    prefix = group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            prefix, _, group = line.strip("[]").strip().partition(".")
        elif prefix in _PREFIXES and group in GROUPS and "=" in line and line[0] not in "#;":
            name, _, value = line.partition("=")
            yield prefix, group, name.strip(), value.partition("[")[0].strip()
