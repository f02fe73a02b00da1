"""Code of installed packages that plugs in: found by entry points, limited by VLLM_PLUGINS, loaded
one by one, each at its own risk; and the tables that it fills. docs/plugins.md has the contracts.

Level 0: the tables are defined where their entries are used, and know nothing of who fills them.
"""

from quire.plugins.entry_points import GROUPS, EntryPoint, all_installed, allowed, installed
from quire.plugins.loading import load_general_plugins, load_group, records
from quire.plugins.name_table import NameTable, program_entries, register_all
from quire.plugins.records import PluginRecord
from quire.plugins.references import (
    References,
    class_of_connector,
    class_of_option,
    require_module,
    resolve_reference,
)

__all__ = [
    "References",
    "GROUPS",
    "EntryPoint",
    "PluginRecord",
    "NameTable",
    "all_installed",
    "allowed",
    "class_of_connector",
    "class_of_option",
    "installed",
    "load_general_plugins",
    "load_group",
    "program_entries",
    "records",
    "register_all",
    "require_module",
    "resolve_reference",
]
