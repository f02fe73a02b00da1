"""Try every name of transformers' mapping of causal language models, or those given, and write what
became of them:

PYTHONPATH=src python -m tests.models.causal_mapping.run [NAME...]
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from tests.models.causal_mapping.comparing import Outcome, names, outcome_of

RESULTS = Path(__file__).with_name("results.json")


def main(asked: list[str]) -> int:
    warnings.simplefilter("ignore")
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    failed = []
    for name in asked or names():
        outcome = _tried(name)
        if outcome.error is not None and not outcome.is_equal:
            failed.append(name)
        if outcome.kind == "native":
            other = _tried(name, "transformers")
            if other.is_equal:
                outcome = replace(outcome, through_transformers=other.error)
            elif other.error not in (None, math.inf):
                failed.append(name)
        known[name] = asdict(outcome)
        print(f"{outcome.kind:8} {name:36} {outcome.error} {outcome.why}", flush=True)
        results = {name: known[name] for name in names() if name in known}
        RESULTS.write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")
    print(Counter(entry["kind"] for entry in results.values()))
    print("differ:", *dict.fromkeys(failed))
    return bool(failed)


def _tried(name: str, implementation: str = "auto") -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return outcome_of(name, Path(folder), implementation)
        except Exception as error:  # the run goes on, and says so
            return Outcome("refused", error=math.inf, why=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
