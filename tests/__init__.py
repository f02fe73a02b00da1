"""The tests; what they share is imported by absolute names, like `tests.support.poison`."""
