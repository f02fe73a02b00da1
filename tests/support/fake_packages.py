"""Packages that are installed for the time of a test: a folder on sys.path with a module and the
entry points that name what is in it.
"""

import shutil
import sys
import textwrap
import tomllib

from quire.lora.resolver import LORA_RESOLVERS
from quire.models.families import ADDED
from quire.models.formats import METHODS
from quire.plugins import entry_points, loading, tables
from quire.server.output_parsing import REASONING_PARSERS, TOOL_PARSERS

TABLES = (
    *(ADDED, METHODS, TOOL_PARSERS, REASONING_PARSERS),
    *(tables.LOAD_FORMATS, tables.OP_PROVIDERS, tables.EC_CONNECTORS),
    LORA_RESOLVERS,
)


class FakePackages:
    """Installs packages into one folder of sys.path."""

    def __init__(self, folder):
        self.folder = folder
        self._modules = []

    def install(self, package, source, points, version="1.0"):
        """A package with one module of its name and `points`: {"quire.general_plugins": {"name":
        "attribute"}}.
        """
        (self.folder / f"{package}.py").write_text(textwrap.dedent(source))
        self._modules.append(package)
        info = self.folder / f"{package}-{version}.dist-info"
        info.mkdir()
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {package}:{at}\n" for name, at in members.items())
            for group, members in points.items()
        )
        (info / "entry_points.txt").write_text(text)
        entry_points._all_points.cache_clear()

    def install_project(self, project, package, version):
        """A package of a folder with a pyproject.toml, as pip installs it."""
        shutil.copytree(project / package, self.folder / package)
        facts = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        assert facts["version"] == version
        info = self.folder / f"{facts['name'].replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in members.items())
            for group, members in facts["entry-points"].items()
        )
        (info / "entry_points.txt").write_text(text)
        self._modules.append(package)
        entry_points._all_points.cache_clear()

    def forget(self):
        """Undo what they did to this process."""
        for record in loading.records():
            record.take_back()
        loading._records.clear()
        loading._values.clear()
        for table in TABLES:
            table._added.clear()
        for name in list(sys.modules):
            if name.partition(".")[0] in self._modules:
                del sys.modules[name]
        entry_points._all_points.cache_clear()
