"""The number of this release."""

import os
import sys


def _version() -> str:
    """The version of the installed package.

    Its folder of metadata is looked for here: `importlib.metadata`, which every process would
    import for it, takes 13 ms of each start.
    """
    for folder in sys.path:
        try:
            names = [name for name in os.listdir(folder or ".") if name.startswith("quire-")]
            for name in names:
                with open(os.path.join(folder, name, "METADATA"), encoding="utf-8") as file:
                    for line in file:
                        if line.startswith("Version:"):
                            return line.partition(":")[2].strip()
        except (OSError, UnicodeDecodeError):  # no folder, or another kind of installation
            continue
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("quire")
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "0.0.0"


__version__ = _version()
__version_tuple__ = tuple(int(part) for part in __version__.split(".")[:3])
