"""`vllm` as `importlib.metadata` shows it."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path

from quire.as_vllm.table import ROOT, VERSION


class ServedDistribution(Distribution):
    """An installed package in name: a version, and nothing on the disk."""

    def read_text(self, filename: str) -> str | None:
        """The two files that describe it; None for others."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n"
            "Summary: Quire under the names of vLLM\n",
            "top_level.txt": f"{ROOT}\n",
        }.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(__file__).parent / path
