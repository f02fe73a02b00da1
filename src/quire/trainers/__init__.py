"""The trainer's side of weight updates: what sends a module's weights to engines.

Nothing here is part of an engine: a training program imports it, in processes of its own.
"""
