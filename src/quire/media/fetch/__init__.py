"""Fetches data, http(s) and file URLs within limits, from where a stranger may read."""
