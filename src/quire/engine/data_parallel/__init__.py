"""Cores on several hosts: coordinator, handshake, headless launcher."""
