"""From validated inputs to request outputs: the core, its clients, and the two ends of a request's path."""
