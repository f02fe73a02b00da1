"""Prompts that are embeddings, or have some among their texts."""
