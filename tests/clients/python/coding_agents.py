"""Claude Code and Codex themselves, without a terminal. Their prompts have about 4,000 to 10,000
tokens, so that the server needs more positions than the small model was made for.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.clients.modes import Unsupported

CODEX_CONFIG = """
model = "{model}"
model_provider = "quire"
web_search = "disabled"

[features]
multi_agent = false

[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "QUIRE_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def _run(program, *arguments, **environ):
    path = shutil.which(program)
    if path is None:
        raise Unsupported(f"{program} is not installed")
    folder = tempfile.mkdtemp()
    return subprocess.run(
        [path, *arguments], cwd=folder, env=os.environ | {"HOME": folder} | environ, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=110, check=False,
    )  # fmt: skip


def claude_code(url, model):
    """`claude -p` with two tools; all 24 are described in 64,000 characters."""
    done = _run(
        "claude", "-p", "say hi", "--max-turns", "1", "--tools", "Bash,Read",
        ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=model,
        ANTHROPIC_SMALL_FAST_MODEL=model, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="300",
    )  # fmt: skip
    assert done.stdout.strip() and "API Error" not in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 or "max turns" in done.stdout.lower(), done.stdout + done.stderr


def codex(url, model):
    """`codex exec` without a search of the web and other agents."""
    home = Path(tempfile.mkdtemp())
    (home / "config.toml").write_text(CODEX_CONFIG.format(url=url, model=model))
    done = _run(
        "codex", "exec", "--skip-git-repo-check", "say hi", CODEX_HOME=str(home), QUIRE_KEY="none"
    )
    # An answer that its limit cuts is an error for Codex, and no fault of the server.
    cut = "Incomplete response returned, reason: max_output_tokens" in done.stderr + done.stdout
    assert done.returncode == 0 or cut, done.stderr[-1500:]
