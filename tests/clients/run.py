"""Every client in an environment of its own against a running server, and the table of results.

    python -m tests.clients.run --install FOLDER [CLIENT ...]

makes the environments that FOLDER lacks (they need PyPI and npm), starts `quire serve` unless
`--url` names a server, and prints client x mode x result.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.clients.catalog import CLIENTS, Client, Model
from tests.server.serve_process import serving

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "node"
GIB = 2**30


def folder_of(client: Client, base: Path) -> Path:
    """Clients with the same packages share an environment."""
    first = next(other for other in CLIENTS if other.requirements == client.requirements)
    return base / first.name.lower().replace(":", "").replace(" ", "-")


def install(client: Client, folder: Path) -> None:
    """Make the environment unless it is there."""
    done = folder / "installed"
    if done.exists() or not client.requirements:
        folder.mkdir(parents=True, exist_ok=True)
        return
    if client.is_npm:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run([*command, *client.requirements], cwd=folder, check=True)
    else:
        venv.create(folder, with_pip=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *client.requirements], check=True)
    done.touch()


def version_of(client: Client, folder: Path) -> str:
    """The installed version of the first requirement."""
    if not client.requirements:
        return ""
    name = client.requirements[0]
    if client.is_npm:
        package = folder / "node_modules" / name.rpartition("@")[0] / "package.json"
        return str(json.loads(package.read_text())["version"])
    name = name.split("[")[0].split(">")[0]
    script = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.check_output([folder / "bin" / "python", "-c", script], text=True).strip()


def command_of(client: Client, folder: Path) -> list[str]:
    """The program that runs a client's modes and prints a line for each."""
    if (SCRIPTS / f"{client.module}.mjs").exists():
        # Node looks for packages from the folder of the script.
        scripts = folder / "scripts"
        shutil.rmtree(scripts, ignore_errors=True)
        shutil.copytree(SCRIPTS, scripts)
        return ["node", str(scripts / "modes.mjs"), client.module]
    python = folder / "bin" / "python"
    program = str(python) if python.exists() else sys.executable
    return [program, "-m", "tests.clients.modes", client.module]


def outcomes_of(
    client: Client, folder: Path, url: str, model: str, modes: list[str]
) -> list[dict[str, Any]]:
    """Run a client's modes in its environment; what it prints besides goes to FOLDER's log."""
    programs = f"{folder}/bin:{folder}/node_modules/.bin:{os.environ['PATH']}"
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs}
    command = [*command_of(client, folder), url, model, *modes]
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    (folder / f"{client.module}.log").write_text(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTCOME ")]
    found = [json.loads(line.removeprefix("OUTCOME ")) for line in lines]
    if done.returncode or not found:
        found.append({"mode": "all", "result": "failed", "detail": done.stdout[-1500:]})
    return found


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())


def report(client: Client, folder: Path, url: str, model: str, modes: list[str]) -> list[str]:
    """Print a client's rows of the table and give their results."""
    version = version_of(client, folder)
    rows = outcomes_of(client, folder, url, model, modes)
    for row in rows:
        detail = row["detail"].replace("\n", " ").replace("|", "/")[:600]
        cells = (client.name, version, row["mode"], row["result"], detail)
        print("| " + " | ".join(cells) + " |", flush=True)
    return [row["result"] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--install", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--url", help="a server that runs; by default one is started")
    parser.add_argument("--model", help="its name there; by default the one that a client is for")
    parser.add_argument("--mode", action="append", default=[], help="only these modes")
    parser.add_argument("--keep", action="store_true", help="environments larger than 1 GiB, too")
    parser.add_argument("client", nargs="*", help="names; by default all")
    given = parser.parse_args()
    chosen = [c for c in CLIENTS if not given.client or c.name in given.client]
    unknown = set(given.client) - {c.name for c in CLIENTS}
    if unknown:
        parser.error(f"no client {sorted(unknown)}; there are {[c.name for c in CLIENTS]}")
    results: Counter[str] = Counter()
    with ExitStack() as stack:
        servers: dict[Model, str] = {}
        for client in chosen:
            folder = folder_of(client, given.install)
            install(client, folder)
            model = client.model
            url = given.url or servers.get(model)
            if url is None:
                flags = model.flags
                if model.write is not None:
                    files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    model.write(files)
                    flags = (str(files), *flags)
                url = stack.enter_context(serving(*flags, basis=model.basis)).url
                servers[model] = url
            name = given.model or model.name
            results += Counter(report(client, folder, url, name, given.mode))
            if not given.keep and size_of(folder) > GIB:
                shutil.rmtree(folder)
    print(f"{results['ok']} ok, {results['client']} refused by clients, {results['failed']} failed")
    return int(results["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
