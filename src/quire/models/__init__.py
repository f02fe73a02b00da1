"""Models as data: specs, the families that make them from Hugging Face configs, and the one decoder
that runs them.

`read_spec` and what it returns are free of torch, so that configuration can be resolved without
loading it; `decoder`, `heads`, `rotary` and `weights` need torch and are imported by name.
"""

from quire.models.families import find_family, read_spec
from quire.models.kv_pool import KVGroup, KVPool, memories_of, plan_kv_pool

__all__ = [
    "KVGroup",
    "KVPool",
    "find_family",
    "memories_of",
    "plan_kv_pool",
    "read_spec",
]
