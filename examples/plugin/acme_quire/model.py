"""A family of models: Llama under another name. A description of one's own is docs/models.md's."""

from dataclasses import replace

from quire.models.families.llama import FAMILY as LLAMA

FAMILY = replace(LLAMA, architectures=("AcmeForCausalLM",))
