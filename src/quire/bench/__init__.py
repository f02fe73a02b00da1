"""Measurements of this engine, each beside the limit of the machine that it ran on."""
