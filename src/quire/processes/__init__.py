"""Processes that this one starts: how they are begun, watched, limited and ended."""
