"""The parts of `quire bench serve`: the load, its metrics, its picture."""
