"""The statistics of an engine: per step, running totals, and the loggers that consume them."""
