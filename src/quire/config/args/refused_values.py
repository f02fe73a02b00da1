"""Values of options that are documented elsewhere and not built here, with what to do instead."""

from __future__ import annotations

_SAFETENSORS = "Use 'auto' with safetensors files."
_PLUGIN = "A plugin can register it (docs/plugins.md); else use 'auto' with safetensors files."
_PARTS = "Use 'sharded_state', whose files save_sharded_state writes."
LOAD_FORMATS = {
    "npcache": "It keeps a copy of pickled weights: use 'pt', or convert them to safetensors.",
    "tensorizer": _PLUGIN,
    "bitsandbytes": "The checkpoint says how it is quantised: use 'auto'.",
    "gguf": "Use the safetensors files of the same model.",
    "fastsafetensors": _PLUGIN,
    "instanttensor": _PLUGIN,
    "ipc_cache": _SAFETENSORS,
    "modelexpress": _PLUGIN,
    "runai_streamer_sharded": _PARTS,
}
_TOKENIZER_JSON = "Provide a tokenizer.json and a chat template, and use 'auto'."
TOKENIZER_MODES = {
    "slow": "Every tokenizer is the fast one: use 'auto'.",
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "inkling", "kimi_k3", "cohere", "plugin"), _TOKENIZER_JSON
    ),
}
