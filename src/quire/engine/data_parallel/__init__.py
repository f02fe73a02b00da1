"""Cores on several hosts or in lock-step: coordinator, handshake, headless launcher."""
