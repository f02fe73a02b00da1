"""The workers of a model on several machines: those of a Ray cluster, or plain ones."""
