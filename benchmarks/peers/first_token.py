"""One start of an engine in a process of its own, from nothing to the first token: `python
first_token.py run_quire REQUEST.json`, where the request is that of protocol.py without workloads.

Prints the monotonic clock's time of the first token, which processes share.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

_PROMPT = [[1] * 16]


def main() -> None:
    """Open the engine, and generate a token."""
    request = json.loads(Path(sys.argv[2]).read_text())
    generate = importlib.import_module(sys.argv[1]).open_engine(request)
    generate(_PROMPT, 1)
    print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main()
