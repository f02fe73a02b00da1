"""Install examples/plugin as a wheel into an environment of its own, and see what each part of it
changes there: `python tools/check_plugin.py`.

The environment sees the packages of this interpreter's, so that nothing is downloaded, and Quire is
that of this folder. tests/plugins/installed.py says what is looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Raise CalledProcessError where something fails."""
    with tempfile.TemporaryDirectory() as folder:
        wheels, environment = Path(folder, "wheels"), Path(folder, "environment")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-build-isolation", "--quiet"]
        source = Path(folder, "plugin")  # building writes into the folder
        run("cp", "-r", str(ROOT / "examples" / "plugin"), str(source))
        run(*pip, "wheel", *options, "--wheel-dir", str(wheels), str(source))
        run(sys.executable, "-m", "venv", "--system-site-packages", str(environment))
        [site] = environment.glob("lib/python*/site-packages")
        paths = [path for path in sys.path if path.endswith("site-packages")]
        (site / "outer.pth").write_text("\n".join(paths))  # also where this is an environment
        python = str(environment / "bin" / "python")
        [wheel] = wheels.glob("acme_quire-*.whl")
        run(python, "-m", "pip", "install", *options, str(wheel))
        where = run(python, "-c", "import acme_quire; print(acme_quire.__file__)")
        assert where.startswith(str(environment)), where
        print(run(python, "-m", "tests.plugins.installed", str(Path(folder, "made"))), end="")
        report = run(python, "-m", "quire.cli.main", "doctor")
        lines = [line for line in report.splitlines() if line.startswith("plugin acme")]
        assert len(lines) == 6, report
        print("\n".join(lines))


def run(*command: str) -> str:
    """What a command prints."""
    source = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **source}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
