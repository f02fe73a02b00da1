"""Several API servers in front of the cores of one engine."""
