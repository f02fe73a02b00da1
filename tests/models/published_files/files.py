"""Published config.json files, and where they were found; long lists of modules are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.test_config import PUBLISHED

_FILES = Path(__file__).with_name("configs.jsonl")


def published_files() -> dict[str, dict[str, Any]]:
    lines = _FILES.read_text(encoding="utf-8").splitlines()
    found = {entry["name"]: entry["config"] for entry in map(json.loads, lines)}
    return {**{name: config for name, (config, _) in PUBLISHED.items()}, **found}
