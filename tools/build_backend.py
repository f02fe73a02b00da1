"""The build of a wheel: scikit-build-core's, and without the native module where that cannot be
compiled.

scikit-build-core has an override for builds that fail (`if.failed`). With it the metadata are known
only when everything is compiled, so that an installer builds the package once for its metadata and
again for the wheel. Here metadata take no compiler, and a wheel is built once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from scikit_build_core import build as scikit
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, str | list[str]]
Build = Callable[[str, Settings | None, str | None], str]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel (PEP 517). Returns its file name."""
    return _build(scikit.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel of an editable install (PEP 660). Returns its file name."""
    return _build(scikit.build_editable, wheel_directory, config_settings, metadata_directory)


def _build(
    build: Build, wheel_directory: str, settings: Settings | None, metadata_directory: str | None
) -> str:
    try:
        return build(wheel_directory, settings, metadata_directory)
    except (Exception, SystemExit) as failure:
        print(f"*** The native module was not built: {failure!r}", file=sys.stderr)
    print("*** WARNING: without it plain torch computes, several times slower.", file=sys.stderr)
    without_native = {**(settings or {}), "wheel.cmake": "false"}
    # not with the metadata prepared before: their tag is that of a wheel with compiled code
    return build(wheel_directory, without_native, None)
