"""From the name of a model to weights in memory: files, checks, conversion."""
