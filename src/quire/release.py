"""The number of this release."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quire")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.0.0"
__version_tuple__ = tuple(int(part) for part in __version__.split(".")[:3])
