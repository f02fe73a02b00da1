"""Try every published config.json, or those of the names, and write what became of them:

PYTHONPATH=src python -m tests.models.published_files.run [NAME...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.models.published_files.comparing import Outcome, outcome_of
from tests.models.published_files.files import published_files

RESULTS = Path(__file__).with_name("results.json")


def main(names: list[str]) -> int:
    files = published_files()
    found = {}
    for name in names or files:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = outcome_of(files[name], Path(folder))
            except Exception as error:  # the run goes on, and says so
                outcome = Outcome("differs", f"{type(error).__name__} in small: {error}")
        found[name] = asdict(outcome)
        print(f"{outcome.kind:8} {name}  {outcome.why[:200]}", flush=True)
    print(Counter(entry["kind"] for entry in found.values()))
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = {name: found.get(name, known.get(name)) for name in files}
    RESULTS.write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")
    return any(entry["kind"] == "differs" for entry in found.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
