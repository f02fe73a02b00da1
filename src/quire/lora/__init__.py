"""LoRA adapters as callers name them."""
