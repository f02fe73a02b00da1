"""Measurements of this engine, each next to the limit of the machine that it ran on."""
