"""From validated inputs to request outputs: the core, its clients, and the ends of a request's
path.
"""
