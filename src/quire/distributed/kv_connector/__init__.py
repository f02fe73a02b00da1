"""Connectors of K/V: the interface for classes of one's own, and those that Quire has."""
